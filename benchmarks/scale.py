"""Does memory stay flat, and how long does a 7B model take: GPTQ on the first blocks of a random one, on disk.

    python benchmarks/scale.py --folder /some/disk/scale --blocks 2 --blocks 4

The checkpoint has the shape of LLaMA-7B (Touvron et al. 2023, table 2) in bfloat16, 13.5 GB in shards. A shallower
model is a folder with links to the same shards and a config.json with fewer layers, compressed by the same
``compress.run`` as any other. Each depth has its own process; memory is the kernel's own peak (VmHWM), set back before
each step.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, MIDDLE, LAYERS, HEADS, VOCAB = 4096, 11008, 32, 32, 32000
BLOCK_WEIGHTS = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * MIDDLE
BLOCKS_A_SHARD = 4
ENDS = "ends.safetensors"
RECIPE = """
model: {model}
calibration: {{samples: {samples}, sequence_length: {length}}}
passes: [{passes}]
export: [gguf]
measure: {{threads: {threads}}}
evaluate: false
"""


def write_checkpoint(folder: Path) -> None:
    """The whole model, one shard in memory at a time; what is there already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    needed = 2 * (LAYERS * BLOCK_WEIGHTS + 2 * VOCAB * HIDDEN)
    missing = [first for first in range(0, LAYERS, BLOCKS_A_SHARD) if not (folder / _shard(first)).exists()]
    if missing and shutil.disk_usage(folder).free < 2 * needed:
        sys.exit(f"{folder}: {needed / 1e9:.1f} GB for the model and as much for its work are not free")
    for first in missing:
        tensors: dict[str, Tensor] = {}
        for index in range(first, first + BLOCKS_A_SHARD):
            tensors |= _block(index)
        _save(tensors, folder / _shard(first))
    if not (folder / ENDS).exists():
        names = ("model.embed_tokens.weight", "lm_head.weight")
        tensors = {name: _random(VOCAB, HIDDEN, seed=number) for number, name in enumerate(names)}
        _save(tensors | {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}, folder / ENDS)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def _block(index: int) -> dict[str, Tensor]:
    prefix, seed = f"model.layers.{index}.", 100 * index
    shapes = {f"self_attn.{role}_proj": (HIDDEN, HIDDEN) for role in "qkvo"}
    shapes |= {"mlp.gate_proj": (MIDDLE, HIDDEN), "mlp.up_proj": (MIDDLE, HIDDEN), "mlp.down_proj": (HIDDEN, MIDDLE)}
    found = {f"{prefix}{n}.weight": _random(*shape, seed=seed + i) for i, (n, shape) in enumerate(shapes.items(), 10)}
    norms = ("input_layernorm", "post_attention_layernorm")
    return found | {f"{prefix}{norm}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for norm in norms}


def _shard(index: int) -> str:
    first = index - index % BLOCKS_A_SHARD
    return f"blocks-{first:02}.safetensors"


def shallow(whole: Path, blocks: int) -> Path:
    """A model of the first ``blocks`` blocks: links to the shards of ``whole``, and its own config and index."""
    folder = whole.parent / f"{whole.name}-{blocks}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    held = dict.fromkeys(("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"), ENDS)
    for index in range(blocks):
        prefix = f"model.layers.{index}."
        roles = [*(f"self_attn.{r}_proj" for r in "qkvo"), *(f"mlp.{r}_proj" for r in ("gate", "up", "down"))]
        roles += ["input_layernorm", "post_attention_layernorm"]
        held |= {f"{prefix}{role}.weight": _shard(index) for role in roles}
    for name in sorted(set(held.values())):
        (folder / name).symlink_to(whole / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": held}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": blocks,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """Byte-level, of a few hundred tokens: the text only has to be different from token to token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["def main(self): return the list of all values in it"] * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)


@dataclass
class Phase:
    """One step of a run, or one part of a step: wall and CPU seconds, and the largest resident memory within."""

    name: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    parts: list[Phase] = field(default_factory=list)


class Watch:
    """Progress of a run that keeps times and peaks."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    @contextmanager
    def __call__(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        parts: list[Phase] = []
        taken = _meter(label)

        def advance(_: int) -> None:
            parts.append(taken())

        try:
            yield advance
        finally:
            parts.append(taken())
            sums = (sum(part.seconds for part in parts), sum(part.cpu_seconds for part in parts))
            self.phases.append(Phase(label, *sums, max(part.peak_bytes for part in parts), parts))


def _meter(label: str) -> Callable[[], Phase]:
    """What was taken since the last call."""
    wall, cpu = time.perf_counter(), time.process_time()
    # Writing 5 sets the peak back to what is resident now (proc(5), clear_refs).
    Path("/proc/self/clear_refs").write_text("5")

    def taken() -> Phase:
        nonlocal wall, cpu
        found = Phase(label, time.perf_counter() - wall, time.process_time() - cpu, _peak_bytes())
        wall, cpu = time.perf_counter(), time.process_time()
        Path("/proc/self/clear_refs").write_text("5")
        return found

    return taken


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def work(model: Path, options: argparse.Namespace) -> None:
    """Compress one shallow model here, and print what was seen as JSON."""
    import compress

    shutil.rmtree(model / "out", ignore_errors=True)
    recipe = model / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=model, **vars(options)))
    watch = Watch()
    compress.run(recipe, model / "out", overwrite=True, progress=watch)
    shutil.rmtree(model / "out")
    print(json.dumps([asdict(phase) for phase in watch.phases]))


def measure(model: Path, options: argparse.Namespace) -> list[Phase]:
    """:func:`work` in a process of its own."""
    command = [sys.executable, __file__, "--folder", str(options.folder), "--work", str(model)]
    for name in ("samples", "length", "threads", "passes"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [_phase(found) for found in json.loads(done.stdout.splitlines()[-1])]


def _phase(found: dict[str, Any]) -> Phase:
    return Phase(**{**found, "parts": [_phase(part) for part in found["parts"]]})


def show(blocks: int, phases: Sequence[Phase]) -> Sequence[Phase]:
    """One depth's steps and blocks; the parts of its walk: the embedding, the blocks, the head."""
    walk = next(phase for phase in phases if phase.name == "compressing blocks").parts[: blocks + 2]
    print(f"\n{blocks} blocks\n\n| step | seconds | CPU seconds | peak memory, GB |\n|---|---|---|---|")
    for phase in phases:
        print(f"| {phase.name} | {_row(phase)} |")
    names = ["embedding", *(f"block {number}" for number in range(1, blocks + 1)), "head"]
    print("\n| part | seconds | CPU seconds | peak memory, GB |\n|---|---|---|---|")
    for name, part in zip(names, walk, strict=True):
        print(f"| {name} | {_row(part)} |", flush=True)
    return walk


def project(walk: Sequence[Phase], threads: int) -> None:
    """What the parts of a walk mean for the whole model."""
    embedding, *blocks, head = walk
    seconds, cpu = (sum(getattr(part, name) for part in blocks) / len(blocks) for name in ("seconds", "cpu_seconds"))
    per_weight = 1e9 * cpu / BLOCK_WEIGHTS
    print(f"\na block of {BLOCK_WEIGHTS / 1e6:.0f} million weights: {cpu:.0f} CPU s, {per_weight:.0f} ns a weight")
    wall = LAYERS * seconds + embedding.seconds + head.seconds
    least = (LAYERS * cpu + embedding.cpu_seconds + head.cpu_seconds) / threads
    print(f"all {LAYERS} blocks and both ends: {wall / 60:.0f} minutes as here, {least / 60:.0f} with the CPUs alone")


def _row(phase: Phase) -> str:
    return f"{phase.seconds:.1f} | {phase.cpu_seconds:.1f} | {phase.peak_bytes / 1e9:.2f}"


def machine() -> str:
    """Versions, CPU, memory and what else runs."""
    names = ("torch", "transformers", "safetensors")
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    memory = psutil.virtual_memory()
    return (
        f"python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in names)}\n"
        f"{psutil.cpu_count()} CPUs, {cpu.partition(':')[2].strip()}; {memory.total / 1e9:.0f} GB, "
        f"{memory.available / 1e9:.0f} available; load {psutil.getloadavg()[0]:.1f} before the start"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, make the checkpoint, compress its first blocks, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for 13.5 GB of checkpoint; it stays there")
    parser.add_argument("--blocks", type=int, action="append", help="depths to compress; default 2 and 4")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count() or 1)
    parser.add_argument("--passes", default="gptq: {scheme: int4-g32}", help="as in a recipe")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work is not None:
        work(options.work, options)
        return
    print(f"$ {' '.join(['python', *sys.argv])}\n{machine()}")
    whole = options.folder.resolve() / "llama-7b-random"
    write_checkpoint(whole)
    print(f"{options.passes}; {options.samples} x {options.length} tokens; {options.threads} threads")
    for blocks in options.blocks or [2, 4]:
        walk = show(blocks, measure(shallow(whole, blocks), options))
    project(walk, options.threads)


if __name__ == "__main__":
    main()
