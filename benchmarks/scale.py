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
    """One step of a run: wall seconds, when each part of it was done, and the largest resident memory within."""

    name: str
    seconds: float = 0.0
    marks: list[float] = field(default_factory=list)
    peak_bytes: int = 0


class Watch:
    """Progress of a run that keeps times and peaks."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    @contextmanager
    def __call__(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        phase, started = Phase(label), time.perf_counter()
        self.phases.append(phase)
        # Writing 5 sets the peak back to what is resident now (proc(5), clear_refs).
        Path("/proc/self/clear_refs").write_text("5")

        def advance(_: int) -> None:
            phase.marks.append(time.perf_counter() - started)

        try:
            yield advance
        finally:
            phase.seconds, phase.peak_bytes = time.perf_counter() - started, _peak_bytes()


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
    return [Phase(**phase) for phase in json.loads(done.stdout.splitlines()[-1])]


def show(found: dict[int, list[Phase]], options: argparse.Namespace) -> None:
    """The table, and what follows from it for the whole model."""
    print(f"\n{options.passes}; {options.samples} x {options.length} tokens; {options.threads} threads\n")
    print("| blocks | step | seconds | peak memory, GB |\n|---|---|---|---|")
    for blocks, phases in found.items():
        for phase in phases:
            print(f"| {blocks} | {phase.name} | {phase.seconds:.1f} | {phase.peak_bytes / 1e9:.2f} |")
    print("\n| blocks | seconds a block | ns a weight | peak memory, GB |\n|---|---|---|---|")
    for blocks, phases in found.items():
        walk = next(phase for phase in phases if phase.name == "compressing blocks")
        # The first mark is the embedding; each block has one after it; the last is the head.
        a_block = (walk.marks[blocks] - walk.marks[0]) / blocks
        peak = max(phase.peak_bytes for phase in phases)
        print(f"| {blocks} | {a_block:.1f} | {1e9 * a_block / BLOCK_WEIGHTS:.0f} | {peak / 1e9:.2f} |")
    ends = walk.seconds - (walk.marks[blocks] - walk.marks[0])
    total = LAYERS * a_block + ends
    print(f"\nall {LAYERS} blocks at the last line's pace, with embedding and head: {total / 60:.0f} minutes")


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
    found = {blocks: measure(shallow(whole, blocks), options) for blocks in options.blocks or [2, 4]}
    show(found, options)


if __name__ == "__main__":
    main()
