"""How fast an artifact runs and how much memory it takes, in a fresh process: from clock readings to the record."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import CompressError
from compress.kv import FLOAT_CACHE, CacheTypes
from compress.protocols import Artifact, Runtime
from compress.report import Measurement, Performance
from compress.runner.artifact import weight_files
from compress.runner.bandwidth import Bandwidth, last_level_cache_bytes, measure_bandwidth
from compress.runner.observe import Found, observe
from compress.runner.process import Job, PerformanceSettings, run_job
from compress.session import Progress, no_progress


def bench(
    artifact: Artifact,
    settings: PerformanceSettings,
    threads: int,
    progress: Progress = no_progress,
    cache: CacheTypes = FLOAT_CACHE,
) -> Performance:
    """Measure an artifact in a fresh process."""
    job = Job(artifact.format, str(artifact.path / artifact.entry), threads, settings, cache=cache)
    result = run_job(job, progress)
    if result.performance is None:
        raise CompressError("the runner's process answered without a performance", where=str(artifact.path))
    return result.performance


def measure(
    kind: Callable[[], Runtime], job: Job, settings: PerformanceSettings, progress: Progress = no_progress
) -> tuple[Performance, Mapping[str, Any]]:
    """(what was measured, what the runtime says of itself); meant for a fresh process.

    Raises CompressError for logits that are not finite, InputError for a prompt that the model cannot take.
    """
    found = observe(kind, job, settings, progress)
    # Only now, with the runtime closed: its buffer would count as memory and its idle threads would take part.
    bandwidth = measure_bandwidth(job.threads)
    return summarise(found, settings, bandwidth, Path(job.entry)), found.described


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware"):
                return value.strip()
    return platform.processor() or platform.machine()


def summarise(found: Found, settings: PerformanceSettings, bandwidth: Bandwidth, entry: Path) -> Performance:
    """The record, each number with how it was taken."""
    threads = int(found.described.get("threads", bandwidth.threads))
    device = f"{cpu_model()}, {threads} threads"
    runs = found.runs
    prompt, steps = settings.prompt_tokens, settings.generate_tokens
    warm = "a warm-up run is left out"
    if settings.stream is not None:
        warm += f"; cache bounded: {settings.stream}"

    def timed(name: str, unit: str, values: Sequence[float], how: str) -> Measurement:
        median = float(np.median(values))
        spread = (max(values) - min(values)) / median if len(values) > 1 else None
        return Measurement(name, median, unit, len(values), spread, device, f"measured: {how}; {warm}")

    def percentile(name: str, share: int) -> Measurement:
        pooled = float(np.percentile([step for run in runs for step in run.steps_s], share))
        each = [float(np.percentile(run.steps_s, share)) for run in runs]
        spread = (max(each) - min(each)) / pooled if len(runs) > 1 else None
        how = f"measured: {share}th percentile of {steps} steps in each of {len(runs)} runs; {warm}"
        return Measurement(name, pooled, "s", len(runs), spread, device, how)

    decode = timed(
        "decode_tps",
        "tokens/s",
        [steps / sum(run.steps_s) for run in runs],
        f"median over runs of {steps} greedy steps after {prompt} tokens",
    )
    state = "unknown page cache state" if found.cached is None else f"{found.cached:.0%} of the files in the page cache"
    return Performance(
        load_s=Measurement("load_s", found.load_s, "s", 1, None, device, f"measured: once, fresh process, {state}"),
        ttft_s=timed(
            "ttft_s", "s", [run.ttft_s for run in runs], f"median, {prompt} tokens to the choice of the first new one"
        ),
        prefill_tps=timed(
            "prefill_tps", "tokens/s", [prompt / run.prefill_s for run in runs], f"median, {prompt} tokens"
        ),
        decode_tps=decode,
        tpot_p50_s=percentile("tpot_p50_s", 50),
        tpot_p95_s=percentile("tpot_p95_s", 95),
        peak_rss_bytes=_peak(found, device),
        memory=_memory(found, device),
        roofline_fraction=_roofline(decode, settings, bandwidth, entry, device),
        threads=threads,
        foreign_load=found.foreign_load,
    )


def _peak(found: Found, device: str) -> Measurement:
    peak = max(found.imported.peak, found.loading.peak, found.generating.peak)
    how = f"measured: highest resident size of the process over load and generation; {found.generating.how}"
    return Measurement("peak_rss_bytes", peak, "bytes", 1, None, device, how)


def _memory(found: Found, device: str) -> dict[str, Measurement]:
    """Parts of the generation peak (runtime + weights + kv + activations) and the three states they come from."""
    kv = found.kv_bytes or 0
    grown = found.touched.total - found.imported.total
    mapped = "an unknown share" if found.mapped_bytes is None else f"{found.mapped_bytes} bytes"
    rows = {
        "runtime": (
            found.imported.total,
            "measured: resident with the runtime imported, before it loads; Python included",
        ),
        "weights": (
            max(0, grown - kv),
            f"measured: growth from there until a pass of one token has touched every weight, less kv;"
            f" {mapped} of it are pages of the weight files, which the kernel may drop",
        ),
        "kv": (
            kv,
            found.described.get("kv_how", "computed: the cache that the runtime reserves when it loads, by its shape")
            if found.kv_bytes is not None
            else "computed: 0, since the runtime does not say; contained in weights and activations",
        ),
        "activations": (
            max(0, found.generating.peak - found.touched.total),
            "measured: growth from the pass of one token to the highest of generation",
        ),
        "load_peak": (found.loading.peak, f"measured: highest while loading; {found.loading.how}"),
        "steady": (found.steady.total, "measured: resident after the last run"),
        "generation_peak": (
            found.generating.peak,
            f"measured: highest from the warm-up to the last run; {found.generating.how}",
        ),
    }
    return {name: Measurement(name, value, "bytes", 1, None, device, how) for name, (value, how) in rows.items()}


def _roofline(
    decode: Measurement, settings: PerformanceSettings, bandwidth: Bandwidth, entry: Path, device: str
) -> Measurement:
    """decode_tps x bytes of weights a token / bandwidth: 1 means that decoding does nothing but read weights."""
    if settings.weight_bytes is None:
        weight_bytes = sum(file.stat().st_size for file in weight_files(entry))
        what = f"the artifact's files, {weight_bytes} bytes (an upper bound of the weights read a token)"
    else:
        weight_bytes = settings.weight_bytes
        what = f"{weight_bytes} bytes of weights read a token"
    cached = "; the weights fit the cache, so it may exceed 1" if weight_bytes <= last_level_cache_bytes() else ""
    return Measurement(
        "roofline_fraction",
        decode.value * weight_bytes / bandwidth.bytes_per_s,
        "1",
        decode.runs,
        decode.spread,
        device,
        f"computed: decode_tps x {what} / measured bandwidth ({bandwidth}){cached}",
    )
