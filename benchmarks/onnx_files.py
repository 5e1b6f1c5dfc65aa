"""Our ONNX artifacts against onnxruntime-genai's own 4-bit models of one checkpoint: bytes, divergence, decode speed.

    python -m benchmarks.onnx_files --model DIR --calibration calib.txt --evaluation heldout.txt --out FOLDER \
        --builder /venvs/genai/bin/python

The same ONNX Runtime runs everybody's files, through the same runner: KLD in nats over every position of the first
evaluation windows, from the float32 model; and the time of a token, with all files in turns (:mod:`benchmarks.turns`).
Bytes are those of the graph and its data, without tokenizers. What FOLDER has is not built again.
``--builder`` is the Python of an environment with onnxruntime-genai, onnx-ir, torch and transformers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import compress
from benchmarks.quality import options as options_for
from benchmarks.quality import spread
from benchmarks.turns import against, in_turns
from compress.artifacts import bench
from compress.models.decoder import Decoder
from compress.models.sources import open_model
from compress.proof import write_logits
from compress.recipe import Evaluate, Measure
from compress.runner import quality
from compress.runner.artifact import find_artifact, weight_files
from compress.session import no_progress
from compress.texts import token_windows

RECIPE = """
model: {model}
calibration:
  {{source: text, path: {calibration}, samples: {samples}, sequence_length: {length}, precision: {precision}}}
passes: [{{rotate: {{keep_tied: true}}}}, {{{mixed}}}, guided, gptq]
export: [{{onnx: {{join_projections: true, padding: false}}}}]
measure: {{threads: {threads}, prompt_tokens: 16, generate_tokens: 8, repeats: 1}}
evaluate: false
"""
OURS: Mapping[str, str] = {
    "within 72MB": "mixed: {target_size: 72MB, choices: [int4-g32, int4-g64]}",
    "within 109.5MB": "mixed: {target_size: 109.5MB, choices: [int4-g32, int4-g64, int8-g32, int8-g64]}",
}
"""Name -> how the scheme of each matrix, embedding included, is chosen: of schemes that every processor is quick at."""
BUILDER: Mapping[str, Sequence[str]] = {
    "int4": (),
    "int4 k_quant": ("algo_config=k_quant",),
    "int4 k_quant_mixed": ("algo_config=k_quant_mixed",),
}
"""Name -> the builder's extra options."""


@dataclass
class Found:
    """What was measured of one artifact."""

    name: str
    entry: Path
    kld: float = 0.0
    top1: float = 0.0
    peak_rss: float = 0.0

    @property
    def bytes(self) -> int:
        """Of the graph and its data."""
        return sum(file.stat().st_size for file in weight_files(self.entry))


def build_ours(name: str, options: argparse.Namespace) -> Path:
    """Compress once; the artifact's folder."""
    out = options.out / f"ours {name}".replace(" ", "-")
    if not out.exists():
        recipe = options.out / "recipe.yaml"
        recipe.write_text(RECIPE.format(mixed=OURS[name], **vars(options)))
        compress.run(recipe, out, resume=True)
    return Path(out / "onnx")


def build_genai(name: str, options: argparse.Namespace) -> Path:
    """Run the builder once; its output folder."""
    out = Path(options.out / f"genai {name}".replace(" ", "-"))
    if not out.exists():
        partial = out.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [options.builder, "-m", "onnxruntime_genai.models.builder", "-i", options.model, "-o", partial]
        command += ["-p", "int4", "-e", "cpu", "-c", options.out / "cache"]
        extra = [*BUILDER[name], "accuracy_level=4"]
        with (options.out / "builder.log").open("a") as log:
            subprocess.run([*map(str, command), "--extra_options", *extra], check=True, stdout=log, stderr=log)
        partial.rename(out)
    return out


def score(found: Sequence[Found], options: argparse.Namespace) -> None:
    """Fill in the divergence of each from the checkpoint in float32."""
    checkpoint = open_model(str(options.model))
    settings = Evaluate("text", path=options.evaluation, windows=options.windows, sequence_length=options.length)
    tokens, logits = options.out / "tokens.npy", options.out / "reference.npy"
    windows = token_windows(checkpoint, settings, "evaluation").tokens
    np.save(tokens, windows.numpy())
    if not logits.exists():
        partial = logits.with_name("partial.npy")
        write_logits(Decoder(checkpoint), windows, partial, "reference logits", no_progress)
        partial.rename(logits)
    for one in found:
        seen = quality.evaluate(find_artifact(one.entry), tokens, threads=options.threads, reference=logits).quality
        assert seen is not None
        one.kld, one.top1 = seen.kld_mean, seen.top1_agreement
        print(one.name, f"{one.bytes / 1e6:.1f} MB", f"{one.kld:.4f}", file=sys.stderr, flush=True)


def table(found: Sequence[Found], seconds: NDArray[np.float64]) -> str:
    """Markdown, by size; time of a token as a share of each builder model's in the same round."""
    bases = [(place, one) for place, one in enumerate(found) if one.name.startswith("genai")]
    heads = [*("artifact", "MB", "KLD", "top-1", "tokens/s"), *(f"time / {one.name}" for _, one in bases), "RSS, MB"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for place, one in sorted(enumerate(found), key=lambda pair: pair[1].bytes):
        speed = spread((1 / seconds[:, place]).tolist()) if len(seconds) else ""
        shares = [against(seconds, base, place) if len(seconds) else "" for base, _ in bases]
        cells = [one.name, f"{one.bytes / 1e6:.1f}", f"{one.kld:.4f}", f"{one.top1:.1%}", speed, *shares]
        lines.append(f"| {' | '.join(cells)} | {one.peak_rss / 1e6:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Build, score, time, print."""
    parser = options_for(__doc__)
    parser.set_defaults(threads=len(os.sched_getaffinity(0)))
    parser.add_argument("--builder", help="Python with onnxruntime-genai's model builder; without it ours alone")
    parser.add_argument("--only", action="append", help="of ours, those whose name has this in it; default all")
    parser.add_argument("--precision", default="float32", help="of our calibration; give each a FOLDER of its own")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in OURS if options.only is None or any(part in name for part in options.only)]
    built = {f"genai {name}": build_genai(name, options) for name in (BUILDER if options.builder else ())}
    built |= {f"ours {name}": build_ours(name, options) for name in wanted}
    found = [Found(name, find_artifact(path).path / find_artifact(path).entry) for name, path in built.items()]
    score(found, options)
    settings = Measure(prompt_tokens=128, generate_tokens=64, threads=options.threads, repeats=1)
    for one in found:
        one.peak_rss = bench(one.entry, settings).peak_rss_bytes.value
    seconds = in_turns([one.entry for one in found], options.threads, options.rounds)
    print("$", *sys.argv)
    print(*(f"{name} {version(name)}" for name in ("edgepress", "onnxruntime", "torch")), sep=", ")
    print(table(found, seconds))


if __name__ == "__main__":
    main()
