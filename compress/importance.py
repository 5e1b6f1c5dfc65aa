"""What ``compress imatrix`` does: one sweep over calibration text, to a file that llama.cpp's tools read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from calibration.stats import InputStats
from compress.blocks import collected, head_inputs
from compress.errors import InputError
from compress.journal import put_in_place
from compress.models.decoder import Decoder
from compress.models.gguf.imatrix import entry_of, write_imatrix
from compress.models.sources import open_model
from compress.recipe import Calibration
from compress.session import Progress, no_progress
from compress.texts import token_windows

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Collected:
    """What was written. ``unseen``: layers (experts) that no token reached."""

    path: str
    entries: int
    tokens: int
    chunks: int
    unseen: tuple[str, ...]
    warnings: tuple[str, ...]


def collect(
    model: str, section: Calibration, out: Path, overwrite: bool = False, progress: Progress = no_progress
) -> Collected:
    """Write the importance matrix of ``model`` over the text that ``section`` asks for to ``out``.

    Sums of squares over real tokens of what each matrix of the blocks, and an untied head, is fed by the unquantised
    model. InputError for what the user can mend; ``out`` appears whole or not at all.
    """
    _check_out(out, overwrite)
    checkpoint = open_model(model)
    decoder = Decoder(checkpoint)
    entries = entry_of(decoder.spec)
    windows = token_windows(checkpoint, section, "calibration")
    sums: dict[str, dict[int, tuple[F32, float]]] = {}
    unseen = []
    for layer, stats in statistics(decoder, windows.tokens, windows.real, progress):
        name, matrix = entries[layer]
        sums.setdefault(name, {})[matrix] = (stats.gram.diagonal().numpy().copy(), float(stats.tokens))
        if stats.tokens == 0:
            unseen.append(layer)
    stacked = {
        name: (np.stack([rows[m][0] for m in sorted(rows)]), np.array([rows[m][1] for m in sorted(rows)], np.float32))
        for name, rows in sums.items()
    }
    partial = out.with_name(f".{out.name}.partial")
    try:
        chunks, size = windows.tokens.shape
        write_imatrix(partial, stacked, [_described(section)], chunks, size)
        put_in_place(partial, out)
    except OSError as error:
        raise InputError(f"it cannot be written: {error}", where=str(out), fix="choose another --out") from error
    finally:
        partial.unlink(missing_ok=True)
    tokens = windows.tokens.numel() if windows.real is None else int(windows.real.sum())
    return Collected(str(out), len(stacked), tokens, chunks, tuple(unseen), tuple(windows.warnings))


def _check_out(out: Path, overwrite: bool) -> None:
    if out.is_dir() or not out.resolve().parent.is_dir():
        what = "this is a folder" if out.is_dir() else "there is no such folder"
        raise InputError(f"{what}; the output is a file", where=str(out), fix="name a file in an existing folder")
    if out.exists() and not overwrite:
        raise InputError("the file is there already", where=str(out), fix="choose another --out, or give --overwrite")


def _described(section: Calibration) -> str:
    named = section.path or section.name or section.source
    return f"{named}, {section.samples} windows of {section.sequence_length} tokens, seed {section.seed}"


def statistics(
    decoder: Decoder, tokens: torch.Tensor, real: torch.Tensor | None, progress: Progress
) -> Iterator[tuple[str, InputStats]]:
    """Each matrix and what it is fed, block by block; embeddings are fed nothing."""
    spec = decoder.spec
    with progress("collecting inputs", spec.layers + 1) as advance:
        hidden = decoder.room(tokens)
        decoder.embed_into(tokens, hidden)
        for index in range(spec.layers):
            with decoder.block(index) as module, collected(decoder, index, module, real, {}) as found:
                decoder.run_block_into(index, module, hidden, hidden)
            yield from found.items()
            advance(1)
        if not spec.tied:
            yield from head_inputs(decoder, hidden, real, {}).items()
        hidden.close()
        advance(1)
