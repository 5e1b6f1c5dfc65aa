"""Our GGUF files against llama.cpp's own of the same types: bytes, and decode speed in turns.

    python -m benchmarks.gguf_speed --model DIR --out FOLDER --type Q4_0 --type IQ4_NL

Both start from the same checkpoint: ours rounds it, llama.cpp quantises the f16 file that we export from it, every
matrix to one type (``llama-quantize --pure``). llama.cpp's kernels decode both, in turns, a fresh process each time:
what differs beyond noise would be a wrong layout. ``planned`` is what a plan of the recipe says of the matrices, before
the run. What FOLDER has is not built again.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import llama_cpp

import compress
from benchmarks.quality import spread
from compress import engine, registry
from compress.artifacts import bench
from compress.recipe import Measure, load
from compress.runner.artifact import find_artifact
from exporters.gguf.reader import stored_tensors

RECIPE = """
model: {model}
calibration: {{source: builtin, samples: 1, sequence_length: 64}}
passes: [rtn: {{scheme: {scheme}}}]
export: [gguf: {{float_type: f16}}]
{ends}
measure: false
evaluate: false
"""
SCHEMES = {"F16": None, "Q4_0": "int4-g32", "Q4_1": "int4-g32-asym", "IQ4_NL": "iq4_nl", "Q5_0": "int5-g32"}
SCHEMES |= {"Q5_1": "q5_1", "Q8_0": "int8-g32", "Q4_K": "q4_k", "Q6_K": "q6_k"}
"""llama.cpp's name of a type -> the scheme that is stored as it."""


def ours(options: argparse.Namespace, type_: str) -> tuple[Path, int]:
    """A file with every matrix of one type, and the bytes of matrices that its plan announced."""
    out, recipe = options.out / f"ours-{type_}", options.out / "recipe.yaml"
    scheme = SCHEMES[type_]
    ends = 'ignore: ["*"]' if scheme is None else f"pin: {{'re:.*(embed_tokens|lm_head)': {scheme}}}"
    recipe.write_text(RECIPE.format(model=options.model, scheme=scheme or "int8-g32", ends=ends))
    loaded = load(recipe, registry.load)
    planned = sum(layer["bytes"] for layer in engine.plan(loaded).layers)
    if not out.exists():
        compress.run(recipe, out, resume=True)
    found = find_artifact(out / "gguf")
    return Path(found.path / found.entry), planned


def theirs(options: argparse.Namespace, type_: str) -> Path:
    """What llama.cpp itself makes of our f16 file."""
    source, _ = ours(options, "F16")
    out = Path(options.out / f"llama.cpp-{type_}.gguf")
    if not out.exists():
        quantize(source, out, type_, options.threads)
    return out


def quantize(source: Path, out: Path, type_: str, threads: int) -> None:
    """``llama-quantize --pure``: every matrix of ``source`` becomes of one type."""
    names = {f"MOSTLY_{type_}", f"MOSTLY_{type_}_S"}
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = next(int(kind) for kind in gguf.LlamaFileType if kind.name in names)
    parameters.token_embedding_type = parameters.output_tensor_type = int(gguf.GGMLQuantizationType[type_])
    parameters.pure, parameters.nthread = True, threads
    partial = out.with_suffix(".partial")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(parameters)):
        sys.exit(f"llama.cpp could not quantise {source} to {type_}")
    partial.rename(out)


def matrix_bytes(file: Path) -> int:
    """Of the layers, as the file holds them."""
    return sum(tensor.bytes for tensor in stored_tensors(file) if tensor.layer is not None)


def compare(options: argparse.Namespace, type_: str) -> str:
    """A row of the table."""
    (mine, planned), other = ours(options, type_), theirs(options, type_)
    settings = Measure(prompt_tokens=128, generate_tokens=64, threads=options.threads, repeats=1)
    speeds: tuple[list[float], list[float]] = ([], [])
    for _ in range(options.rounds):
        for file, found in zip((mine, other), speeds, strict=True):
            found.append(bench(file, settings).decode_tps.value)
    ratios = [first / second for first, second in zip(*speeds, strict=True)]
    cells = [
        type_,
        f"{planned / 1e6:.2f}",
        f"{matrix_bytes(mine) / 1e6:.2f}",
        f"{matrix_bytes(other) / 1e6:.2f}",
        f"{mine.stat().st_size / 1e6:.2f}",
        f"{other.stat().st_size / 1e6:.2f}",
        *map(spread, speeds),
        spread(ratios, 3),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Build, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--type", action="append", required=True, choices=[name for name in SCHEMES if name != "F16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [compare(options, type_) for type_ in options.type]
    print("$", *sys.argv)
    print(*(f"{name} {version(name)}" for name in ("edgepress", "llama-cpp-python")), sep=", ")
    titles = ["type", "planned, MB", "matrices, MB", "its matrices", "file, MB", "its file", "decode, tokens/s"]
    print(f"| {' | '.join([*titles, 'its decode', 'ratio'])} |")
    print("|---" * (len(titles) + 2) + "|")
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
