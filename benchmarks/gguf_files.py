"""Our GGUF types against llama.cpp's own, tensor by tensor of the same type: the bytes are equal by construction.

    python -m benchmarks.gguf_files --model DIR --calibration calib.txt --evaluation heldout.txt --out FOLDER \
        --recipe q4_k_m --recipe iq4_nl

Each recipe's passes run on the first windows of the calibration text. llama.cpp's side gives every layer the type that
the recipe gave it, quantised by ``libgguf`` (byte for byte what llama.cpp writes) with an importance matrix from the
same windows: the mean square of each input of the float32 model, as ``llama-imatrix`` takes it. Both are scored as in
``quality.py``: mean KL divergence from the float32 model, in nats, activations not rounded.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import libgguf
import torch
from torch import Tensor

from benchmarks.quality import Bed, Stopwatch, options, windows
from compress import registry
from compress.engine import Clock, run_passes
from compress.importance import statistics
from compress.journal import Journal
from compress.models.decoder import Decoder
from compress.models.sources import open_model
from compress.prepare import prepare
from compress.recipe import load
from compress.scheme import QuantScheme
from compress.session import CompressedModel, no_progress
from exporters.gguf.storage import TypeChoices


def importance(bed: Bed) -> dict[str, Tensor]:
    """Layer -> mean square of each of its inputs over the calibration tokens that reach it, float32 [in]."""
    found = statistics(Decoder(open_model(str(bed.model))), bed.calibration, None, no_progress)
    return {layer: stats.gram.diagonal() / stats.tokens for layer, stats in found if stats.tokens}


def theirs(weight: Tensor, scheme: QuantScheme, counts: Tensor | None) -> Tensor:
    """``weight`` as llama.cpp quantises it to the type of ``scheme``."""
    qtype = gguf.GGMLQuantizationType[TypeChoices().layout(scheme).type]
    packed = libgguf.quantize_rows(weight.numpy(), qtype, None if counts is None else counts.numpy())
    return torch.from_numpy(libgguf.dequantize_rows(packed, qtype))


def compare(bed: Bed, recipe: str, known: dict[str, Tensor], threads: int) -> dict[str, Any]:
    """Scores of both sides, and the bits that either stores."""
    samples, length = bed.calibration.shape
    overrides = [
        f"calibration.samples={samples}",
        f"calibration.sequence_length={length}",
        f"measure.threads={threads}",
    ]
    prepared, _, _ = prepare(load(recipe, registry.load, [*overrides, "evaluate=false", "gates={}"], str(bed.model)))
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        session = prepared.session(Path(folder), bed.calibration, no_progress, scratch=Path(folder))
        with Stopwatch() as watch:
            run_passes(prepared, session, Journal(), Clock())
        model: CompressedModel = prepared.compressed(session.store)
        ours = bed.score(Decoder(prepared.checkpoint, model.parameter).logits(bed.evaluation))

        def baseline(tensor: str) -> Tensor:
            layer = tensor.removesuffix(".weight")
            if layer not in model.schemes:
                return model.parameter(tensor)
            return theirs(model.dense(tensor).float(), model.schemes[layer], known.get(layer))

        other = bed.score(Decoder(prepared.checkpoint, baseline).logits(bed.evaluation))
        bits = sum(TypeChoices().stored_bits(scheme, model.shapes[name]) for name, scheme in model.schemes.items())
        weights = sum(model.shapes[name][0] * model.shapes[name][1] for name in model.schemes)
    return {
        "recipe": Path(recipe).stem,
        "megabytes": bits / 8e6,
        "bits": bits / weights,
        "ours": ours,
        "llama.cpp": other,
        **watch.record(),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| recipe | matrices, MB | bits a weight | KLD, ours | KLD, llama.cpp's own | ratio | wall s |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        mine, other = r["ours"]["kld"], r["llama.cpp"]["kld"]
        lines.append(
            f"| {r['recipe']} | {r['megabytes']:.1f} | {r['bits']:.3f} | {mine:.4f} ± {r['ours']['error']:.4f} | "
            f"{other:.4f} ± {r['llama.cpp']['error']:.4f} | {mine / other:.2f} | {r['wall_s']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, compare each recipe, print the table."""
    parser = options(__doc__)
    parser.add_argument("--recipe", action="append", required=True, help="a bundled recipe, or a file")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bed = Bed(
        args.model,
        windows(args.model, args.calibration, args.samples, args.length),
        windows(args.model, args.evaluation, args.windows, args.length),
        args.out,
    )
    torch.set_num_threads(args.threads)
    known, results = importance(bed), []
    for recipe in args.recipe:
        results.append(compare(bed, recipe, known, args.threads))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print("$", *sys.argv)
    print(table(results))


if __name__ == "__main__":
    main()
