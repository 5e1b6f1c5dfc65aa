"""What a quantised key/value cache costs in quality and brings in bytes and speed, at long contexts, in both formats.

    python -m benchmarks.kv_cache --model DIR --calibration calib.txt --evaluation heldout.txt --out FOLDER

The model is rounded (``--scheme``) and written as a GGUF file, which llama.cpp runs with each type of cache, and as
ONNX files with a float cache and with those of the pass ``kv``. Divergence is KLD in nats over every position of the
first ``--windows`` windows of ``--length`` tokens, from the same file with a float32 cache: what the cache costs.
Bytes are of the cache for ``--length`` tokens: llama.cpp's by its own log. Speed is of decoding the last 64 of so many
tokens, in turns, a fresh process each time, ``--rounds`` times (0: not at all). What FOLDER has is not built again; it
needs room for the reference logits: windows x length x vocabulary x 8 bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import compress
from benchmarks.quality import options as options_for
from benchmarks.quality import spread
from compress import registry
from compress.kv import CACHE_TYPES, CacheTypes
from compress.models.sources import open_model
from compress.models.topology import DecoderSpec, describe
from compress.protocols import Artifact
from compress.recipe import Evaluate
from compress.runner import measure, quality
from compress.runner.artifact import find_artifact
from compress.runner.process import PerformanceSettings
from compress.texts import token_windows

GENERATED = 64
RECIPE = """
model: {model}
calibration: {{source: text, path: {calibration}, samples: {samples}, sequence_length: 512}}
passes: [rtn: {{scheme: {scheme}}}{passes}]
export: [{export}]
measure: false
evaluate: false
"""
FILES: Mapping[str, tuple[str, str]] = {
    "gguf": ("gguf", ""),
    "onnx float": ("onnx", ""),
    "onnx int8": ("onnx", ", kv: {bits: 8}"),
    "onnx int4": ("onnx", ", kv: {bits: 4}"),
}
"""Name -> (format, what its passes are besides rounding)."""
FLOAT = CacheTypes("f32", "f32")
CACHES = (
    FLOAT,
    CacheTypes("f16", "f16"),
    *(CacheTypes(kind, kind) for kind in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")),
    CacheTypes("q8_0", "f16"),
    CacheTypes("f16", "q8_0"),
    CacheTypes("q8_0", "q4_0"),
    CacheTypes("q4_0", "q8_0"),
)
"""What llama.cpp is given."""


@dataclass
class Row:
    """One file with one cache, and what was found; tokens a second of each round."""

    name: str
    artifact: Artifact
    cache: CacheTypes
    kld: float = 0.0
    worst: float = 0.0
    top1: float = 1.0
    bytes: int = 0
    decode_tps: list[float] = field(default_factory=list)
    prefill_tps: list[float] = field(default_factory=list)


def build(name: str, options: argparse.Namespace) -> Artifact:
    """Compress once."""
    format_, passes = FILES[name]
    out = options.out / name.replace(" ", "-")
    if not out.exists():
        recipe = options.out / "recipe.yaml"
        recipe.write_text(RECIPE.format(passes=passes, export=format_, **vars(options)))
        compress.run(recipe, out, resume=True)
    return find_artifact(out / format_)


def rows_of(options: argparse.Namespace, spec: DecoderSpec) -> list[Row]:
    """Every file with every cache that it can have; the first of each format is what the others are compared with."""
    gguf = build("gguf", options)
    rows = []
    for cache in (FLOAT, *options.cache) if options.cache else CACHES:
        unfit = cache.complaints(spec.head_dim, spec.head_dim)
        if unfit:
            print(f"left out: {cache}: {'; '.join(unfit)}", file=sys.stderr)
        else:
            rows.append(Row(f"gguf, {cache}", gguf, cache))
    return rows + [Row(name, build(name, options), CacheTypes()) for name in FILES if name.startswith("onnx")]


@contextmanager
def opened(row: Row, threads: int, length: int) -> Iterator[Any]:
    """The file's runtime with its cache for ``length`` tokens."""
    runtime = registry.load("runtimes", row.artifact.format)(*([row.cache] if row.artifact.format == "gguf" else []))
    runtime.load(row.artifact.path / row.artifact.entry, threads, length)
    try:
        yield runtime
    finally:
        runtime.close()


def write_reference(row: Row, tokens: Path, path: Path, threads: int) -> None:
    """Logits of a file with a float cache, float32 [windows, length, vocabulary], computed once."""
    if path.exists():
        return
    windows, partial = np.load(tokens), path.with_suffix(".partial")
    with opened(row, threads, windows.shape[1]) as runtime, partial.open("wb") as file:
        for number, window in enumerate(windows):
            logits = runtime.prefill(window, all_logits=True)
            if number == 0:
                header = {"descr": "<f4", "fortran_order": False, "shape": (*windows.shape, logits.shape[1])}
                np.lib.format.write_array_header_2_0(file, header)
            file.write(logits.astype("<f4", order="C", copy=False).data)
    partial.rename(path)


def score(rows: Sequence[Row], tokens: Path, options: argparse.Namespace) -> None:
    """Fill in the divergence of each row from the first of its format."""
    first: dict[str, Row] = {}
    for row in rows:
        base = first.setdefault(row.artifact.format, row)
        reference = options.out / f"reference-{row.artifact.format}.npy"
        write_reference(base, tokens, reference, options.threads)
        if row is base:
            continue
        found = quality.evaluate(
            row.artifact, tokens, threads=options.threads, reference=reference, cache=row.cache
        ).quality
        assert found is not None
        row.kld, row.worst, row.top1 = found.kld_mean, found.kld_p99, found.top1_agreement
        print(row.name, f"{row.kld:.5f}", file=sys.stderr, flush=True)


def time_in_turns(rows: Sequence[Row], tokens: Path, options: argparse.Namespace) -> None:
    """Decode with each, round after round, a fresh process each time."""
    settings = PerformanceSettings(options.length - GENERATED, GENERATED, 1, str(tokens))
    for _ in range(options.rounds):
        for row in rows:
            found = measure.bench(row.artifact, settings, options.threads, cache=row.cache)
            row.decode_tps.append(found.decode_tps.value)
            row.prefill_tps.append(found.prefill_tps.value)


def size(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Fill in what each cache takes: what llama.cpp says that it made, what the ONNX file's inputs are."""
    for row in rows:
        with opened(row, options.threads, options.length) as runtime:
            row.bytes = int(runtime.describe().get("kv_bytes") or runtime.kv_bytes(options.length))


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    names = ["file and cache", "cache, MB", "KLD", "KLD, 99th percentile", "top-1"]
    if rows[0].decode_tps:
        names += ["decode, tokens/s", "prefill, tokens/s"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        speeds = [spread(found) for found in (row.decode_tps, row.prefill_tps) if found]
        cells = (row.name, f"{row.bytes / 1e6:.2f}", f"{row.kld:.5f}", f"{row.worst:.4f}", f"{row.top1:.2%}", *speeds)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cache(text: str) -> CacheTypes:
    keys, _, values = text.partition(",")
    for kind in (keys, values or keys):
        if kind not in CACHE_TYPES:
            raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(CACHE_TYPES)}")
    return CacheTypes(keys, values or keys)  # type: ignore[arg-type]


def main() -> None:
    """Build, score, time, print."""
    parser = options_for(__doc__)
    parser.set_defaults(length=4096, windows=2, samples=32, threads=len(os.sched_getaffinity(0)))
    parser.add_argument("--scheme", default="int8-g32", help="of the weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=_cache, action="append", help="of llama.cpp: q8_0, or KEYS,VALUES; default all")
    options = parser.parse_args()
    if options.length <= GENERATED:
        parser.error(f"--length must be above {GENERATED}")
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint = open_model(str(options.model))
    settings = Evaluate("text", path=options.evaluation, windows=options.windows, sequence_length=options.length)
    tokens = options.out / "tokens.npy"
    np.save(tokens, token_windows(checkpoint, settings, "evaluation").tokens.numpy())
    rows = rows_of(options, describe(checkpoint.config))
    score(rows, tokens, options)
    size(rows, options)
    time_in_turns(rows, tokens, options)
    print("$", *sys.argv)
    print(*(f"{name} {version(name)}" for name in ("edgepress", "onnxruntime", "llama-cpp-python")), sep=", ")
    print(table(rows))


if __name__ == "__main__":
    main()
