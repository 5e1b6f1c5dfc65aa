"""Documents to windows of tokens: joined and cut into equal lengths, or one in each window; chosen, counted."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calibration.errors import DataError
from calibration.text import RECIPE_KEYS, Texts

if TYPE_CHECKING:
    from torch import Tensor

Encode = Callable[[list[str]], list[list[int]]]
"""Texts to token ids, without special tokens."""

POOL = 32
"""A seeded choice is made among the first ``POOL * samples`` windows; text beyond them is not tokenised."""

BATCH_CHARACTERS = 250_000
"""Text given to the tokeniser at a time. A longer document is tokenised in pieces, cut after a newline."""


@dataclass(frozen=True)
class Windows:
    """``tokens`` int64 [windows, length]; ``audit`` is what the report shows.

    ``lengths`` int64 [windows]: how many tokens of each window are real, the rest is padding; None: all of them.
    """

    tokens: Tensor
    audit: dict[str, Any]
    warnings: tuple[str, ...] = ()
    lengths: Tensor | None = None

    @property
    def real(self) -> Tensor | None:
        """bool [windows, length]: which tokens are real; None: all of them."""
        import torch

        if self.lengths is None:
            return None
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]


def make_windows(
    texts: Texts,
    encode: Encode,
    samples: int,
    sequence_length: int,
    *,
    seed: int | None,
    separator_id: int | None,
    what: str,
) -> Windows:
    """Cut the documents of ``texts``, joined by ``separator_id``, into consecutive windows.

    Where there are more than ``samples`` windows, ``seed`` chooses without replacement (kept in text order); None
    takes the first ones. Fewer are returned with a warning. ``what`` names the text in messages ("calibration").
    There is no padding: a tail shorter than ``sequence_length`` is dropped and counted. In the audit,
    ``tokens_available`` are the tokens read, and ``text_exhausted`` says whether that is all the text.

    Raises:
        DataError: not one full window.
    """
    import torch

    limit = samples * (1 if seed is None else POOL)
    stream = _read(texts.texts, encode, separator_id, limit * sequence_length)
    available = min(stream.tokens // sequence_length, limit)
    if available == 0:
        raise DataError(
            f"the {what} text has {stream.tokens} tokens, not one window of {sequence_length}",
            where=texts.origin,
            fix=f"lower {RECIPE_KEYS.get(what, what)}.sequence_length to {stream.tokens} or less, or give more text",
        )
    ids = torch.cat(stream.pieces)
    cut = ids[: available * sequence_length].view(available, sequence_length)
    tokens = cut[_choose(available, samples, seed)].contiguous()
    warnings = texts.warnings
    if len(tokens) < samples:
        shortfall = f"{what}: asked for {samples} samples of {sequence_length} tokens, the text has {len(tokens)}"
        warnings = (*warnings, shortfall)
    audit = {
        **_audit(texts, tokens, None, samples, sequence_length, seed),
        "tokens_available": stream.tokens,
        "tokens_dropped": stream.tokens % sequence_length if stream.exhausted else 0,
        "text_exhausted": stream.exhausted,
        "documents": stream.documents,
    }
    return Windows(tokens, audit, warnings)


def pad_documents(
    texts: Texts, encode: Encode, samples: int, sequence_length: int, *, seed: int | None, what: str
) -> Windows:
    """One document of ``texts`` in each window: cut to ``sequence_length`` tokens, or padded on the right with id 0.

    ``seed`` chooses among the documents as :func:`make_windows` does among windows. Windows are as long as the longest
    that is chosen. In the audit, ``tokens_dropped`` are those cut off, from ``documents_truncated`` documents.

    Raises:
        DataError: no document has a token.
    """
    import torch

    considered = min(len(texts.texts), samples * (1 if seed is None else POOL))
    chosen = [texts.texts[index] for index in _choose(considered, samples, seed)]
    found = [torch.cat(_read([text], encode, None, sys.maxsize).pieces) for text in chosen]
    cut = [ids[:sequence_length] for ids in found if len(ids)]
    if not cut:
        raise DataError(f"no document of the {what} text has a token", where=texts.origin, fix="give more text")
    lengths = torch.tensor([len(ids) for ids in cut])
    tokens = torch.zeros(len(cut), int(lengths.max()), dtype=torch.int64)
    for window, ids in zip(tokens, cut, strict=True):
        window[: len(ids)] = ids
    warnings = texts.warnings
    if len(cut) < samples:
        warnings = (*warnings, f"{what}: asked for {samples} samples, got {len(cut)} documents with tokens")
    audit = {
        **_audit(texts, tokens, lengths, samples, sequence_length, seed),
        "longest": int(lengths.max()),
        "shortest": int(lengths.min()),
        "tokens_dropped": sum(map(len, found)) - int(lengths.sum()),
        "documents_truncated": sum(len(ids) > sequence_length for ids in found),
        "documents": len(cut),
    }
    if len(cut) < len(found):
        audit["dropped"]["documents_without_tokens"] = len(found) - len(cut)
    return Windows(tokens, audit, warnings, lengths)


def _audit(
    texts: Texts, tokens: Tensor, lengths: Tensor | None, samples: int, sequence_length: int, seed: int | None
) -> dict[str, Any]:
    """What both ways of making windows report."""
    digest = hashlib.sha256(tokens.numpy().astype("<i8").tobytes())
    if lengths is not None:
        digest.update(lengths.numpy().astype("<i8").tobytes())
    return {
        "origin": texts.origin,
        "text_sha256": texts.sha256,
        "packing": lengths is None,
        "requested_samples": samples,
        "obtained_samples": len(tokens),
        "requested_tokens": samples * sequence_length,
        "obtained_tokens": tokens.numel() if lengths is None else int(lengths.sum()),
        "sequence_length": sequence_length,
        "seed": seed,
        "documents_available": len(texts.texts),
        "dropped": dict(texts.dropped),
        "tokens_sha256": digest.hexdigest(),
    }


def _choose(available: int, samples: int, seed: int | None) -> Tensor:
    """``samples`` of ``available`` places, in order: without replacement by ``seed``, the first ones without a seed."""
    import torch

    if available <= samples or seed is None:
        return torch.arange(min(available, samples))
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(available, generator=generator)[:samples].sort().values


def overlap(calibration: Tensor, evaluation: Tensor, gram: int = 32, real: Tensor | None = None) -> float:
    """Share of the runs of ``gram`` tokens in ``evaluation`` [m, T] that also occur in ``calibration`` [n, T'].

    Runs lie within one window; shorter windows are compared by runs of the shorter length. Compared by 64-bit hash.
    ``real`` bool [n, T']: False for padding on the right of calibration windows, which belongs to no run.
    """
    import torch

    gram = min(gram, calibration.shape[1], evaluation.shape[1])
    vocabulary = int(max(calibration.max(), evaluation.max())) + 1
    generator = torch.Generator().manual_seed(gram)
    # Each token and each place has a random 64-bit number: products summed modulo 2**64 tell runs apart.
    values = torch.randint(-(2**63), 2**63 - 1, (vocabulary,), generator=generator)
    factors = torch.randint(-(2**62), 2**62, (gram,), generator=generator) * 2 + 1

    def hashes(windows: Tensor) -> Tensor:
        mixed = values[windows]
        places = windows.shape[1] - gram + 1
        total = torch.zeros(windows.shape[0], places, dtype=torch.int64)
        for place in range(gram):
            total += mixed[:, place : place + places] * factors[place]
        return total.flatten()

    known = hashes(calibration)
    if real is not None:
        # A run is real if its last token is.
        known = known[real[:, gram - 1 :].flatten()]
    return float(torch.isin(hashes(evaluation), known).double().mean())


@dataclass(frozen=True)
class _Stream:
    """Token ids read from the start of the text: one int64 tensor for each batch."""

    pieces: list[Tensor]
    tokens: int
    documents: int
    exhausted: bool


def _read(texts: Sequence[str], encode: Encode, separator_id: int | None, wanted: int) -> _Stream:
    """Tokenise batches until there are ``wanted`` tokens or no text is left."""
    import torch

    pieces: list[Tensor] = []
    tokens = documents = 0
    batches = _batches(texts)
    for batch in batches:
        ids: list[int] = []
        for (_, starts), encoded in zip(batch, encode([text for text, _ in batch]), strict=True):
            if starts and documents and separator_id is not None:
                ids.append(separator_id)
            documents += starts
            ids += encoded
        pieces.append(torch.tensor(ids, dtype=torch.int64))
        tokens += len(ids)
        if tokens >= wanted:
            break
    return _Stream(pieces, tokens, documents, exhausted=next(batches, None) is None)


def _batches(texts: Sequence[str]) -> Iterator[list[tuple[str, bool]]]:
    """Batches of (text, whether it starts a document), each of about ``BATCH_CHARACTERS``."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        for number, piece in enumerate(_pieces(text)):
            batch.append((piece, number == 0))
            size += len(piece)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > BATCH_CHARACTERS:
        newline = text.rfind("\n", start, start + BATCH_CHARACTERS)
        end = newline + 1 if newline >= start else start + BATCH_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]
