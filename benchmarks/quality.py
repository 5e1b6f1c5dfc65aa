"""Whose 4 bits lose least: our passes and other projects' on the same tokens, scored by the same code.

    python benchmarks/quality.py --model DIR --calibration calib.txt --evaluation heldout.txt --out FOLDER \
        --run "ours rotate,guided,gptq int4-g32" --run "llm-compressor gptq-actorder-static int4-g32" \
        --peer llm-compressor=/venvs/llmc/bin/python --peer auto-round=/venvs/ar/bin/python

Only the linears of the decoder blocks are quantised: embedding, head and activations stay float32. The first windows of
the calibration text are packed without special tokens; the score is the mean KL divergence, in nats over every position
of the first evaluation windows, from the float32 model. FOLDER keeps one JSON line a run, and a run that it has is
not done again. Other projects run in environments of their own, by ``peers.py``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress import registry
from compress.engine import Clock, run_passes
from compress.journal import Journal
from compress.models.decoder import Decoder
from compress.models.sources import open_model
from compress.prepare import prepare
from compress.recipe import loads
from compress.runner.observe import ForeignLoad
from compress.scheme import QuantScheme
from compress.session import no_progress

OURS = "ours"
POSITIONS_AT_ONCE = 32
PEERS = Path(__file__).with_name("peers.py")


@dataclass(frozen=True)
class Run:
    """Who quantises, how, and to what."""

    who: str
    method: str
    scheme: str

    @classmethod
    def parse(cls, text: str) -> Run:
        """Read ``ours rotate,gptq int4-g32``."""
        parts = text.split()
        if len(parts) != 3:
            raise argparse.ArgumentTypeError(f"{text!r}: write who, method and scheme")
        return cls(*parts)


@dataclass(frozen=True)
class Bed:
    """The model and its tokens int64 [windows, length]."""

    model: Path
    calibration: Tensor
    evaluation: Tensor
    folder: Path

    def reference(self) -> Any:
        """The float model's log-probabilities, float32 [windows, length, vocabulary], computed once and mapped."""
        path = self.folder / "reference.npy"
        if not path.exists():
            decoder = Decoder(open_model(str(self.model)))
            shape, partial = (*self.evaluation.shape, decoder.spec.vocab_size), path.with_suffix(".partial")
            table = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
            for row, logits in zip(table, decoder.logits(self.evaluation), strict=True):
                row[:] = torch.log_softmax(logits, -1).numpy()
            table.flush()
            partial.rename(path)
        return np.load(path, mmap_mode="r")

    def score(self, logits: Iterator[Tensor]) -> dict[str, float]:
        """Mean KLD in nats, and its standard error over windows."""
        values = []
        for known, found in zip(self.reference(), logits, strict=True):
            # A few positions at a time: a window's 100 MB of temporaries are new pages each time.
            parts = []
            for here in range(0, len(found), POSITIONS_AT_ONCE):
                p = torch.from_numpy(np.array(known[here : here + POSITIONS_AT_ONCE]))
                q = torch.log_softmax(found[here : here + POSITIONS_AT_ONCE], -1)
                parts.append(((p - q) * p.exp()).sum(-1).double())
            values.append(float(torch.cat(parts).mean()))
        return {"kld": float(np.mean(values)), "error": float(np.std(values, ddof=1) / len(values) ** 0.5)}


def ours(bed: Bed, run: Run, threads: int, precision: str) -> dict[str, Any]:
    """Run our passes, comma-separated; those that take a scheme get the run's."""
    samples, length = bed.calibration.shape
    recipe = {
        "model": str(bed.model),
        "calibration": {"samples": samples, "sequence_length": length, "precision": precision},
        "passes": run.method.split(","),
        "export": ["onnx"],
        "measure": {"threads": threads},
        "evaluate": False,
    }
    prepared, _, _ = prepare(loads(yaml.safe_dump(recipe), registry.load))
    # The scheme comes last: nothing is written here, so no exporter needs to be able to store it.
    scheme = QuantScheme.parse(run.scheme)
    steps = tuple(replace(step, value=_with_scheme(step.value, scheme)) for step in prepared.passes)
    prepared = replace(prepared, passes=steps, pinned=dict.fromkeys(prepared.spec.ends))
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        session = prepared.session(Path(folder), bed.calibration, no_progress, scratch=Path(folder))
        with Stopwatch() as watch:
            run_passes(prepared, session, Journal(), Clock())
        decoder = Decoder(prepared.checkpoint, prepared.compressed(session.store).parameter)
        found = bed.score(decoder.logits(bed.evaluation))
    return {**found, **watch.record(), "versions": {name: version(name) for name in ("edgepress", "torch")}}


def _with_scheme(step: Any, scheme: QuantScheme) -> Any:
    return replace(step, scheme=scheme) if hasattr(step, "scheme") else step


def peer(bed: Bed, run: Run, python: str, threads: int) -> dict[str, Any]:
    """Run another project in its own environment, and score the tensors that it made in transformers' model."""
    out = bed.folder / "peer"
    shutil.rmtree(out, ignore_errors=True)
    command = [python, str(PEERS), "--peer", run.who, "--method", run.method, "--scheme", run.scheme]
    command += ["--model", str(bed.model), "--tokens", str(bed.folder / "calibration.npy"), "--out", str(out)]
    with Stopwatch() as watch, (bed.folder / "peer.log").open("w") as log:
        subprocess.run([*command, "--threads", str(threads)], check=True, stdout=log, stderr=log)
    record = json.loads((out / "peer.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(bed.model, dtype=torch.float32).eval()
    _replace(model, load_file(out / "weights.safetensors"))
    with torch.no_grad():
        found = bed.score(model(window[None], use_cache=False).logits[0] for window in bed.evaluation)
    shutil.rmtree(out)
    seconds = {"wall_s": record["wall_seconds"], "cpu_s": record["cpu_seconds"], "foreign_load": watch.foreign}
    return {**found, **seconds, "versions": record["versions"]}


def _replace(model: Any, tensors: dict[str, Tensor]) -> None:
    """Put ``tensors``, by checkpoint name, into ``model``; a head of its own is no longer the embedding."""
    head = model.get_output_embeddings()
    if "lm_head.weight" in tensors and head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


class Stopwatch:
    """Wall and CPU seconds of this process, and what other processes took meanwhile."""

    def __enter__(self) -> Stopwatch:
        self._wall, self._cpu, self._load = time.perf_counter(), time.process_time(), ForeignLoad()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self._wall
        self.cpu = time.process_time() - self._cpu
        self.foreign = self._load.cpus()

    def record(self) -> dict[str, float]:
        """For the results."""
        return {"wall_s": self.wall, "cpu_s": self.cpu, "foreign_load": self.foreign}


def windows(model: Path, text: Path, count: int, length: int) -> Tensor:
    """The first ``count`` windows of ``length`` tokens, int64, without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.model_max_length = 1 << 62
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    if len(ids) < count * length:
        sys.exit(f"{text}: {len(ids)} tokens, and {count} windows of {length} are asked for")
    return torch.tensor(ids[: count * length]).view(count, length)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, best first in each scheme."""
    lines = ["| scheme | who | method | KLD | ± | wall s | CPU s | others' load |", "|---|---|---|---|---|---|---|---|"]
    for r in sorted(results, key=lambda r: (r["scheme"], r["kld"])):
        seconds = f"{r['wall_s']:.0f} | {r['cpu_s']:.0f} | {r['foreign_load']:.1f}"
        lines.append(f"| {r['scheme']} | {r['who']} | {r['method']} | {r['kld']:.4f} | {r['error']:.4f} | {seconds} |")
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, and the least and the most."""
    middle, least, most = (f"{found:.{digits}f}" for found in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least}-{most})"


def options(doc: str | None) -> argparse.ArgumentParser:
    """What every benchmark on calibration and evaluation texts is told; ``doc`` is the module's."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "calibration", "evaluation", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, default in (("samples", 64), ("windows", 40), ("length", 512), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def main() -> None:
    """Read the arguments, do what is not done yet, print the table."""
    parser = options(__doc__)
    parser.add_argument("--precision", default="float32", help="of our calibration; give each a FOLDER of its own")
    parser.add_argument("--run", type=Run.parse, action="append", default=[], help="who method scheme")
    parser.add_argument("--peer", action="append", default=[], help="name=its environment's python")
    args = parser.parse_args()
    pythons = dict(text.split("=", 1) for text in args.peer)
    args.out.mkdir(parents=True, exist_ok=True)
    tokens = {
        "calibration": windows(args.model, args.calibration, args.samples, args.length),
        "evaluation": windows(args.model, args.evaluation, args.windows, args.length),
    }
    np.save(args.out / "calibration.npy", tokens["calibration"].numpy())
    bed = Bed(args.model, tokens["calibration"], tokens["evaluation"], args.out)
    kept = args.out / "results.jsonl"
    results = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    for run in args.run:
        if any({name: r[name] for name in asdict(run)} == asdict(run) for r in results):
            continue
        if run.who != OURS and run.who not in pythons:
            sys.exit(f"{run.who}: give --peer {run.who}=PYTHON of its environment")
        if run.who == OURS:
            found = ours(bed, run, args.threads, args.precision)
        else:
            found = peer(bed, run, pythons[run.who], args.threads)
        results.append(asdict(run) | found)
        with kept.open("a") as file:
            file.write(json.dumps(results[-1]) + "\n")
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print("$", *sys.argv)
    print(table(results))


if __name__ == "__main__":
    main()
