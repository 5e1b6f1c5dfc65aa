"""How far an artifact's logits are from a reference: divergence, agreement, perplexity. Streams, window by window.

KL(reference || artifact) = sum p (r - a) - (lse(r) - lse(a)) with r, a the two logit rows, p = softmax(r) and lse the
log of the sum of exponentials. Exponentials are taken in float32 relative to the row's maximum; sums run in float32
over at most 256 terms and in float64 above, which keeps a position within 1e-6 nats of an all-float64 computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import CompressError, InputError
from compress.kv import FLOAT_CACHE, CacheTypes
from compress.protocols import Artifact, Runtime
from compress.report import Quality
from compress.runner.process import Job, JobResult, QualitySettings, run_job
from compress.runner.streaming import Stream
from compress.session import Progress, no_progress

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_BLOCK = 256
_CHUNK_BYTES = 2 << 20
"""Logits that one thread works on at once: what stays in a core's share of the cache."""


@dataclass(frozen=True)
class Files:
    """The opened inputs of a comparison: memory-mapped, nothing read yet."""

    tokens: I64
    reference: F32 | None
    parity: F32 | None


@dataclass(frozen=True)
class Scored:
    """What :func:`score` found."""

    quality: Quality | None
    parity_kld: float | None
    parity_tokens: int


@dataclass(frozen=True)
class Rows:
    """Each position of one window compared: float64 [T] of divergence (nats), both negative log likelihoods of the
    next token (nats, [T - 1]), and whether both rank the same token first (bool [T])."""

    kld: F64
    nll: F64
    nll_reference: F64
    agree: NDArray[np.bool_]


def evaluate(
    artifact: Artifact,
    tokens: Path,
    *,
    threads: int,
    reference: Path | None = None,
    parity: Path | None = None,
    stream: Stream | None = None,
    progress: Progress = no_progress,
    cache: CacheTypes = FLOAT_CACHE,
) -> JobResult:
    """Compare an artifact in a fresh process. See :class:`~compress.runner.process.QualitySettings` for the files."""
    files = QualitySettings(
        tokens=str(tokens.absolute()),
        reference=None if reference is None else str(reference.absolute()),
        parity=None if parity is None else str(parity.absolute()),
        stream=stream,
    )
    job = Job(artifact.format, str(artifact.path / artifact.entry), threads, quality=files, cache=cache)
    return run_job(job, progress)


def open_files(settings: QualitySettings) -> Files:
    """Open the token and logit files; InputError names every one that does not fit."""
    paths = [path for path in (settings.tokens, settings.reference, settings.parity) if path is not None]
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        raise InputError("\n".join(f"there is no file {path}" for path in missing))
    tokens = np.load(settings.tokens, mmap_mode="r")
    if tokens.ndim != 2 or tokens.dtype != np.int64 or tokens.shape[1] < 2 or tokens.shape[0] < 1:
        raise InputError(
            f"tokens must be int64 [windows, at least 2], not {tokens.dtype} {list(tokens.shape)}",
            where=settings.tokens,
        )
    return Files(
        tokens,
        None if settings.reference is None else _open_logits(settings.reference, tokens, tokens.shape[0]),
        None if settings.parity is None else _open_logits(settings.parity, tokens, None),
    )


def _open_logits(path: str, tokens: I64, windows: int | None) -> F32:
    """float32 [windows, T, vocab], memory-mapped; ``windows=None`` takes as many as there are, up to the tokens'."""
    length = tokens.shape[1]
    if path.endswith(".npy"):
        logits = np.load(path, mmap_mode="r")
    else:
        flat = np.memmap(path, dtype="<f4", mode="r")
        if windows is None or flat.size % (windows * length):
            raise InputError(
                f"{flat.size} numbers are not a whole number of logits for {windows or 'unknown'} windows of {length}",
                where=path,
                fix="write an .npy file, which states its shape",
            )
        logits = flat.reshape(windows, length, -1)
    fits = logits.ndim == 3 and logits.shape[1] == length and logits.shape[0] <= tokens.shape[0]
    if not fits or logits.dtype != np.float32 or (windows is not None and logits.shape[0] != windows):
        raise InputError(
            f"logits are {logits.dtype} {list(logits.shape)}, but the tokens are {list(tokens.shape)}:"
            f" expected float32 [{windows or f'up to {tokens.shape[0]}'}, {length}, vocabulary]",
            where=path,
        )
    opened: F32 = logits
    return opened


def score(runtime: Runtime, files: Files, threads: int, progress: Progress = no_progress) -> Scored:
    """Run every window through a loaded runtime and compare its logits.

    Raises CompressError where logits are not finite or the vocabularies differ: no number then means anything.
    """
    windows = len(files.tokens) if files.reference is not None else 0 if files.parity is None else len(files.parity)
    against_reference: list[Rows] = []
    against_parity: list[Rows] = []
    with ThreadPoolExecutor(threads) as pool, progress("evaluate", windows) as advance:
        for index in range(windows):
            tokens = np.array(files.tokens[index])
            logits = runtime.prefill(tokens, all_logits=True)
            for stored, rows in ((files.reference, against_reference), (files.parity, against_parity)):
                if stored is not None and index < len(stored):
                    rows.append(_compare(stored[index], logits, tokens, pool.map, f"window {index}"))
            advance(1)
    return Scored(
        _summary(against_reference) if against_reference else None,
        float(np.concatenate([rows.kld for rows in against_parity]).mean()) if against_parity else None,
        sum(len(rows.kld) for rows in against_parity),
    )


def compare(reference: F32, logits: F32, tokens: I64, threads: int = 1) -> Rows:
    """Compare two windows of logits, float32 [T, vocab] each, over ``tokens`` int64 [T]."""
    with ThreadPoolExecutor(threads) as pool:
        return _compare(reference, logits, tokens, pool.map, "logits")


def _compare(reference: F32, logits: F32, tokens: I64, run: Callable[..., Iterator[Any]], where: str) -> Rows:
    if reference.shape != logits.shape:
        raise CompressError(
            f"the artifact gives logits {list(logits.shape)}, the reference {list(reference.shape)}", where=where
        )
    count, vocab = logits.shape
    out_of_range = (tokens < 0) | (tokens >= vocab)
    if out_of_range.any():
        raise InputError(f"token {int(tokens[out_of_range][0])} is outside the vocabulary of {vocab}", where=where)
    step = max(1, _CHUNK_BYTES // (4 * vocab))
    starts = range(0, count, step)
    # The last position has no next token; any valid id keeps the arrays square, and it is cut off below.
    targets = np.append(tokens[1:], 0)

    def chunk(start: int) -> Sequence[NDArray[Any]]:
        rows = slice(start, start + step)
        return _rows(reference[rows], logits[rows], targets[rows])

    kld, nll, nll_reference, agree = (np.concatenate(parts) for parts in zip(*run(chunk, starts), strict=True))
    if not np.isfinite(kld).all():
        position = int(np.flatnonzero(~np.isfinite(kld))[0])
        whose = "reference" if not np.isfinite(reference[position]).all() else "artifact"
        raise CompressError(
            f"the {whose}'s logits are not finite at {int((~np.isfinite(kld)).sum())} of {count} positions,"
            f" first at {position}",
            where=where,
        )
    return Rows(kld, nll[:-1], nll_reference[:-1], agree)


def _rows(reference: F32, logits: F32, targets: I64) -> tuple[F64, F64, F64, NDArray[np.bool_]]:
    """(divergence, both negative log likelihoods of ``targets``, agreement) of rows of logits."""
    count, vocab = logits.shape
    # Padded with zeros to whole blocks, so that a view of blocks can be summed without a copy.
    padded = np.zeros((3, count, -(-vocab // _BLOCK) * _BLOCK), dtype=np.float32)
    delta, powers, powers_reference = padded
    best, best_reference = logits.argmax(1), reference.argmax(1)
    with np.errstate(invalid="ignore", over="ignore"):
        # Both relative to their own maximum: where probability lies these differences are small, hence precise.
        peak = _shift(logits, best, powers)
        peak_reference = _shift(reference, best_reference, powers_reference)
        np.subtract(powers_reference, powers, out=delta)
        log_sum = _log_sum_exp(powers, vocab)
        log_sum_reference = _log_sum_exp(powers_reference, vocab)
        mean_delta = _block_sums(powers_reference, delta) / _block_sums(powers_reference)
        kld = mean_delta - (log_sum_reference - log_sum)
    rows = np.arange(count)
    return (
        # Mathematically never negative; rounding may leave -1e-8 where both rows are nearly the same.
        np.maximum(kld, 0.0),
        log_sum + peak - logits[rows, targets].astype(np.float64),
        log_sum_reference + peak_reference - reference[rows, targets].astype(np.float64),
        best == best_reference,
    )


def _shift(rows: F32, best: I64, shifted: F32) -> F64:
    """Put ``rows`` less their maxima into ``shifted``; the maxima, float64 [rows]."""
    peak = rows[np.arange(len(rows)), best]
    np.subtract(rows, peak[:, None], out=shifted[:, : rows.shape[1]])
    return peak.astype(np.float64)


def _log_sum_exp(shifted: F32, vocab: int) -> F64:
    """float64 [rows]; replaces ``shifted`` by its exponentials, without the padding."""
    view = shifted[:, :vocab]
    np.exp(view, out=view)
    result: F64 = np.log(_block_sums(shifted))
    return result


_ONES = np.ones(_BLOCK, dtype=np.float32)


def _block_sums(left: F32, right: F32 | None = None) -> F64:
    """Sums of ``left`` (times ``right``) along rows: float32 within a block, float64 over the blocks."""
    blocks = left.reshape(len(left), -1, _BLOCK)
    factors = _ONES if right is None else right.reshape(blocks.shape)
    sums: F64 = np.vecdot(blocks, factors).sum(-1, dtype=np.float64)
    return sums


def _summary(windows: Sequence[Rows]) -> Quality:
    kld = np.concatenate([rows.kld for rows in windows])
    return Quality(
        kld_mean=float(kld.mean()),
        kld_p99=float(np.quantile(kld, 0.99)),
        top1_agreement=float(np.concatenate([rows.agree for rows in windows]).mean()),
        perplexity=_perplexity([rows.nll for rows in windows]),
        perplexity_reference=_perplexity([rows.nll_reference for rows in windows]),
        tokens=len(kld),
        windows=len(windows),
    )


def _perplexity(nll: Sequence[F64]) -> float:
    mean = float(np.concatenate(nll).mean())
    if mean > 700:
        raise CompressError(f"the mean negative log likelihood is {mean:.0f} nats a token: its perplexity overflows")
    return float(np.exp(mean))
