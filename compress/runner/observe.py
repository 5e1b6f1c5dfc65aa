"""Loads an artifact, warms it up, runs it and closes it, and reads clocks and memory on the way.

The order matters: import of the runtime, load, a pass of one token (which touches every weight), a warm-up that is
thrown away, the timed runs.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import psutil
from numpy.typing import NDArray

from compress.errors import CompressError, InputError
from compress.protocols import Runtime
from compress.runner.artifact import weight_files
from compress.runner.memory import Phase, Resident, cached_share, mapped_bytes, peak_of_phase, resident
from compress.runner.process import Job, PerformanceSettings
from compress.runner.streaming import bounded
from compress.session import Progress

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]

LIBRARIES: Mapping[str, str] = {"onnx": "onnxruntime", "gguf": "llama_cpp"}
"""The library behind each built-in runtime; importing it first keeps its own memory apart from the weights'."""

_WARM_UP_STEPS = 8


@runtime_checkable
class Sized(Protocol):
    """A runtime that knows the size of its key/value cache, which it reserves whole when it loads."""

    def kv_bytes(self, context: int) -> int:
        """Bytes for ``context`` tokens."""
        ...


@dataclass(frozen=True)
class Run:
    """One timed run in seconds: the prompt, the prompt and choosing the first token, each further token."""

    prefill_s: float
    ttft_s: float
    steps_s: tuple[float, ...]


@dataclass(frozen=True)
class Found:
    """Everything read off one process. ``touched`` and ``steady`` are after the one-token pass and the last run.

    ``kv_bytes`` is the cache that the runtime reserved (None: it does not say), ``mapped_bytes`` are the resident
    pages of the weight files (None: the system does not say).
    """

    imported: Resident
    loading: Phase
    touched: Resident
    generating: Phase
    steady: Resident
    kv_bytes: int | None
    mapped_bytes: int | None
    load_s: float
    cached: float | None
    runs: Sequence[Run]
    foreign_load: float
    described: Mapping[str, Any]


def observe(kind: Callable[[], Runtime], job: Job, settings: PerformanceSettings, progress: Progress) -> Found:
    """Load, warm up, run and close; the numbers as they were read."""
    _import_library(job.format)
    imported = resident()
    entry = Path(job.entry)
    cached = cached_share(weight_files(entry))
    runtime = bounded(kind(), settings.stream, job.entry)
    context = settings.prompt_tokens + settings.generate_tokens
    with peak_of_phase() as loading:
        start = time.perf_counter()
        runtime.load(entry, job.threads, context)
        load_s = time.perf_counter() - start
    try:
        vocabulary = len(runtime.prefill(np.zeros(1, dtype=np.int64)))
        touched, mapped = resident(), mapped_bytes(weight_files(entry))
        prompt = _prompt(settings, vocabulary)
        with peak_of_phase() as generating, progress("measure", settings.repeats) as advance:
            _run(runtime, prompt, min(_WARM_UP_STEPS, settings.generate_tokens))
            watch = ForeignLoad()
            runs = []
            for _ in range(settings.repeats):
                runs.append(_run(runtime, prompt, settings.generate_tokens))
                advance(1)
            foreign_load = watch.cpus()
        steady = resident()
        described = runtime.describe()
        return Found(
            imported=imported,
            loading=loading,
            touched=touched,
            generating=generating,
            steady=steady,
            kv_bytes=_kv_bytes(runtime, described, context),
            mapped_bytes=mapped,
            load_s=load_s,
            cached=cached,
            runs=runs,
            foreign_load=foreign_load,
            described=described,
        )
    finally:
        runtime.close()


def _kv_bytes(runtime: Runtime, described: Mapping[str, Any], context: int) -> int | None:
    """What the runtime says that it has reserved, or computes; None where it does neither."""
    if "kv_bytes" in described:
        return int(described["kv_bytes"])
    return runtime.kv_bytes(int(described.get("context", context))) if isinstance(runtime, Sized) else None


def _import_library(format: str) -> None:
    # A missing library is explained by the runtime itself, a moment later.
    with contextlib.suppress(ImportError):
        importlib.import_module(LIBRARIES.get(format, "numpy"))


def _prompt(settings: PerformanceSettings, vocabulary: int) -> I64:
    if settings.tokens is None:
        return np.random.default_rng(0).integers(0, vocabulary, settings.prompt_tokens, dtype=np.int64)
    if not Path(settings.tokens).is_file():
        raise InputError("there is no such file of tokens", where=settings.tokens)
    tokens: I64 = np.load(settings.tokens, mmap_mode="r").reshape(-1)[: settings.prompt_tokens].astype(np.int64)
    if len(tokens) < settings.prompt_tokens:
        raise InputError(f"{len(tokens)} tokens, but prompt_tokens is {settings.prompt_tokens}", where=settings.tokens)
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise InputError(f"tokens outside the model's vocabulary of {vocabulary}", where=settings.tokens)
    return tokens


def _run(runtime: Runtime, prompt: I64, steps: int) -> Run:
    start = time.perf_counter()
    logits = runtime.prefill(prompt)
    prefill_s = time.perf_counter() - start
    token = int(logits.argmax())
    ttft_s = time.perf_counter() - start
    _require_finite(logits, "the prompt")
    steps_s = []
    for _ in range(steps):
        start = time.perf_counter()
        logits = runtime.decode(token)
        token = int(logits.argmax())
        steps_s.append(time.perf_counter() - start)
    _require_finite(logits, f"{steps} tokens")
    return Run(prefill_s, ttft_s, tuple(steps_s))


def _require_finite(logits: F32, after: str) -> None:
    if not np.isfinite(logits).all():
        raise CompressError(f"the artifact's logits are not finite after {after}")


class ForeignLoad:
    """CPUs that other processes kept busy, stolen time of a virtual machine included, since this was made."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.cpu_times()._asdict()
        busy = sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
        return time.perf_counter(), busy, time.process_time()

    def cpus(self) -> float:
        """Mean number of CPUs; the kernel counts in hundredths of a second, so short spans are coarse."""
        wall, busy, own = (after - before for before, after in zip(self._start, self._now(), strict=True))
        return max(0.0, (busy - own) / wall)
