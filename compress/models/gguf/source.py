"""A GGUF file as a checkpoint: its tensors by the checkpoint's names, decoded when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.errors import InputError
from compress.models.cache import make_once
from compress.models.checkpoint import SHOWN, Checkpoint
from compress.models.families import FAMILIES, Family
from compress.models.gguf.archs import KNOWN_ASIDE, Arch, Facts, arch_of, config_of, names_of
from compress.models.gguf.header import F32, UNQUANTISED, GgufFile, TensorInfo, read_gguf, stored_types
from compress.models.gguf.vocabulary import token_ids, write_tokenizer

CONVERSION = 1
"""Raise when what is written into the cache changes, so that an old one is not used."""


@dataclass(frozen=True)
class View:
    """A tensor of the checkpoint, float32; looks like safetensors' view of one.

    ``expert``: the one of a tensor [experts, out, in] that it is. ``heads`` > 0: rows lie with rotary pairs side by
    side within so many heads. ``offset`` is subtracted.
    """

    info: TensorInfo
    expert: int | None = None
    heads: int = 0
    offset: float = 0.0

    def get_shape(self) -> list[int]:
        """The tensor's shape; no number is read."""
        return list(self.info.shape if self.expert is None else self.info.shape[1:])

    def get_dtype(self) -> str:
        """In safetensors' words: what the numbers are once they are decoded."""
        return "F32"

    def __getitem__(self, rows: Any) -> Tensor:
        shape = self.get_shape()
        if self.heads or len(shape) == 1 or not isinstance(rows, slice) or rows.step not in (None, 1):
            return torch.from_numpy(self._whole())[rows]
        start, stop, _ = rows.indices(shape[0])
        return torch.from_numpy(self._rows(start, max(start, stop)))

    def _rows(self, start: int, stop: int) -> F32:
        before = 0 if self.expert is None else self.expert * self.get_shape()[0]
        return self.info.rows(before + start, before + stop)

    def _whole(self) -> F32:
        shape = self.get_shape()
        found = self._rows(0, int(np.prod(shape[:-1]))).reshape(shape)
        if self.heads:
            pairs = found.reshape(self.heads, shape[0] // self.heads // 2, 2, *shape[1:])
            found = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(shape)
        return found - np.float32(self.offset) if self.offset else found


@dataclass(frozen=True)
class GgufTensors:
    """Takes the place of open safetensors files: nothing is mapped, so nothing need be closed."""

    views: Mapping[str, View]

    def get(self, path: Path) -> GgufTensors:
        """The tensors of any file: they know where they lie."""
        return self

    def get_slice(self, name: str) -> View:
        """The tensor, not read yet."""
        return self.views[name]

    def get_tensor(self, name: str) -> Tensor:
        """The tensor, float32."""
        return self.views[name][:]

    def count(self, nbytes: int) -> None:
        """Nothing is kept of what was read."""


def open_gguf(path: Path, cache: Path) -> Checkpoint:
    """Open the model in ``path``; its configuration and tokenizer are written into a folder under ``cache``.

    InputError says what is wrong with the file, or what of it is not known here.
    """
    file = read_gguf(path)
    kind = file.text("general.type", "model")
    if kind != "model":
        raise InputError(f"the file holds no model: its general.type is {kind}", where=str(path), fix="give a model")
    facts = Facts(file)
    if not facts.architecture:
        raise InputError("the file names no architecture", where=str(path), fix="give the file of a whole model")
    arch = arch_of(facts)
    family = FAMILIES[arch.family]
    tied = "output.weight" not in file.tensors
    config = config_of(facts, arch, tied, token_ids(file))
    views = _views(file, family, arch, config)
    folder = _written(file, config, cache)
    files = {tensor: view.info.path for tensor, view in views.items()}
    return Checkpoint(
        folder,
        file.text("general.name") or path.stem,
        config,
        files,
        opened=GgufTensors(views),
        remarks=tuple(_remarks(file, path)),
    )


def _views(file: GgufFile, family: Family, arch: Arch, config: Mapping[str, Any]) -> dict[str, View]:
    """Every tensor of the checkpoint; InputError lists tensors of the file that the family has not."""
    views: dict[str, View] = {}
    used = set(KNOWN_ASIDE)
    rows = {family.linears.get("q"): "num_attention_heads", family.linears.get("k"): "num_key_value_heads"}
    norms = (*family.norms.values(), *family.head_norms.values(), family.final_norm)
    for module, stored in names_of(family, file.text("general.architecture"), config["num_hidden_layers"]).items():
        heads = next((config[key] for role, key in rows.items() if role and module.endswith(f".{role}")), 0)
        offset = family.norm_offset if module.endswith(norms) else 0.0
        for suffix in (".weight", ".bias"):
            if (info := file.tensors.get(stored + suffix)) is None:
                continue
            used.add(stored + suffix)
            if "{expert}" in module:
                views |= {module.format(expert=expert) + suffix: View(info, expert) for expert in range(info.shape[0])}
            else:
                views[module + suffix] = View(info, None, heads if arch.interleaved else 0, offset)
    unknown = [name for name in file.tensors if name not in used]
    if unknown:
        listed = "\n".join(unknown[:SHOWN]) + (f"\n... and {len(unknown) - SHOWN} more" if unknown[SHOWN:] else "")
        raise InputError(
            f"{len(unknown)} tensors are no part of the family {family.name}\n{listed}",
            where=str(file.path),
            fix="give the original checkpoint",
        )
    return views


def _remarks(file: GgufFile, path: Path) -> list[str]:
    """A warning where the weights were rounded once already."""
    kinds = [(kind, count) for kind, count in stored_types(file.tensors) if kind not in UNQUANTISED]
    if not kinds:
        return []
    listed = ", ".join(f"{count} tensors of {kind}" for kind, count in kinds)
    return [
        f"{path.name} is quantised already ({listed}): what is compressed, and compared with, are its rounded weights, "
        "not the original ones"
    ]


def _written(file: GgufFile, config: Mapping[str, Any], cache: Path) -> Path:
    """The folder with ``config.json`` and the tokenizer's files, made at the first use of such a file."""
    # A few tensors are part of the configuration, and no part of the header.
    text = json.dumps(dict(config), indent=2) + "\n"
    digest = hashlib.sha256((file.digest + text).encode()).hexdigest()
    folder = cache / "gguf" / f"{digest[:16]}-v{CONVERSION}"

    def write(partial: Path) -> None:
        (partial / "config.json").write_text(text, encoding="utf-8")
        write_tokenizer(file, config["vocab_size"], partial)

    try:
        make_once(folder, write)
    except OSError as error:
        raise InputError(
            f"configuration and tokenizer cannot be written there: {error}",
            where=str(folder),
            fix="set EDGEPRESS_CACHE to a folder with room",
        ) from error
    return folder
