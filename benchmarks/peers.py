"""Quantise a model with another project's tool, so that `compress` can be compared with it on the same tokens.

Runs inside that tool's own environment (llm-compressor or auto-round), never inside ours:

    python peers.py --peer llm-compressor --method gptq-actorder-static --scheme int4-g32 \
        --model DIR --tokens calib.npy --out FOLDER

Only the linears of the decoder blocks are quantised; embedding, head and activations stay float32. FOLDER gets
`weights.safetensors` (float32, the checkpoint's own names: every decoder linear as the peer would run it, and every
other tensor that the peer changed) and `peer.json` (versions, settings, seconds).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 4  # sequences per forward pass; the statistics do not depend on it
SCHEME = re.compile(r"int(?P<bits>[2-8])-g(?P<group>\d+)(?P<asym>-asym)?")


@dataclass(frozen=True)
class Scheme:
    """An integer grid: `bits`, columns per group, with or without a zero point."""

    bits: int
    group_size: int
    symmetric: bool

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Read `int4-g32` or `int4-g32-asym`."""
        match = SCHEME.fullmatch(text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is no scheme; write int4-g32 or int4-g32-asym")
        return cls(int(match["bits"]), int(match["group"]), match["asym"] is None)


@dataclass(frozen=True)
class Outcome:
    """What a peer made: its tensors by checkpoint name, the type it stores scales in, and the quantisation's cost."""

    tensors: dict[str, torch.Tensor]
    scale_dtype: str
    wall_seconds: float
    cpu_seconds: float


class Stopwatch:
    """Wall seconds and CPU seconds of all threads of this process."""

    def __enter__(self) -> Stopwatch:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self._wall
        self.cpu = time.process_time() - self._cpu


# --- llm-compressor -------------------------------------------------------------------------------------------------


def _group(scheme: Scheme, observer: str) -> dict[str, Any]:
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "group",
        "group_size": scheme.group_size,
        "observer": observer,
    }
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


def _round(scheme: Scheme, observer: str = "memoryless_minmax") -> list[Any]:
    from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]

    return [QuantizationModifier(**_group(scheme, observer))]


def _gptq(scheme: Scheme, order: str | None = "static", observer: str = "memoryless_minmax") -> list[Any]:
    from llmcompressor.modifiers.gptq import GPTQModifier  # type: ignore[import-not-found]

    return [GPTQModifier(actorder=order, **_group(scheme, observer))]


def _awq(**options: Any) -> list[Any]:
    from llmcompressor.modifiers.transform.awq import AWQModifier  # type: ignore[import-not-found]

    return [AWQModifier(**options)]


def _smooth() -> list[Any]:
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier  # type: ignore[import-not-found]

    return [SmoothQuantModifier()]


def _rotate(name: str) -> list[Any]:
    from llmcompressor.modifiers import transform  # type: ignore[import-not-found]

    options = {"SpinQuantModifier": {"rotations": ["R1", "R2"]}, "QuIPModifier": {"rotations": ["v"]}}[name]
    return [getattr(transform, name)(transform_type="random-hadamard", **options)]


# A rotation without a quantiser checks that the peer's float model is still the same function.
LLM_COMPRESSOR: dict[str, Callable[[Scheme], list[Any]]] = {
    "rtn": _round,
    "rtn-mse": lambda s: _round(s, "memoryless_mse"),
    "gptq": lambda s: _gptq(s, order=None),
    "gptq-actorder-static": _gptq,
    "gptq-actorder-static-mse": lambda s: _gptq(s, observer="memoryless_mse"),
    "awq": lambda s: [*_awq(), *_round(s)],
    "awq-mse": lambda s: [*_awq(), *_round(s, "memoryless_mse")],
    "awq+gptq": lambda s: [*_awq(), *_gptq(s)],
    "awq+gptq-mse": lambda s: [*_awq(), *_gptq(s, observer="memoryless_mse")],
    "smoothquant+gptq": lambda s: [*_smooth(), *_gptq(s)],
    "spinquant": lambda s: _rotate("SpinQuantModifier"),
    "spinquant+gptq": lambda s: [*_rotate("SpinQuantModifier"), *_gptq(s)],
    "quip": lambda s: _rotate("QuIPModifier"),
    "quip+gptq": lambda s: [*_rotate("QuIPModifier"), *_gptq(s)],
}


def llm_compressor(model: Any, tokenizer: Any, tokens: torch.Tensor, method: str, scheme: Scheme) -> Outcome:
    """Run llm-compressor's `oneshot` with the recipe of `method` on `tokens` int64 [samples, length]."""
    from llmcompressor import oneshot  # type: ignore[import-not-found]

    recipe = LLM_COMPRESSOR[method](scheme)
    rows: Any = [{"input_ids": row} for row in tokens]
    data: DataLoader[Any] = DataLoader(rows, batch_size=BATCH)
    with Stopwatch() as watch:
        oneshot(model=model, processor=tokenizer, dataset=data, recipe=recipe)
    scales = {str(m.weight_scale.dtype) for _, m in block_linears(model) if hasattr(m, "weight_scale")}
    return Outcome(final_tensors(model, effective_weight), " ".join(sorted(scales)), watch.wall, watch.cpu)


@torch.no_grad()
def effective_weight(module: torch.nn.Module) -> torch.Tensor:
    """The matrix f32 [out, in] that `module` applies, with its own fake quantisation and online rotations."""
    columns = module.in_features
    assert isinstance(columns, int)
    identity, zero = torch.eye(columns), torch.zeros(1, columns)
    return torch.as_tensor(module(identity) - module(zero)).T.contiguous()


# --- auto-round -----------------------------------------------------------------------------------------------------

AUTO_ROUND: dict[str, dict[str, Any]] = {
    "rtn": {"iters": 0, "disable_opt_rtn": True},
    "opt-rtn": {"iters": 0},
    "opt-rtn-neuqi": {"iters": 0, "enable_neuqi": True},
    "awq+opt-rtn": {"alg_configs": "awq"},
    "tuning": {"iters": 200},
    "tuning-bf16": {"iters": 200, "amp": True},  # its own default on a CPU
    "tuning-neuqi": {"iters": 200, "enable_neuqi": True},
}


def auto_round(model: Any, tokenizer: Any, tokens: torch.Tensor, method: str, scheme: Scheme) -> Outcome:
    """Run AutoRound on `tokens` int64 [samples, length], in float32 unless the method says otherwise."""
    from auto_round import AutoRound  # type: ignore[import-not-found]

    data = [{"input_ids": rows, "attention_mask": torch.ones_like(rows)} for rows in torch.split(tokens, BATCH)]
    grid = {"bits": scheme.bits, "group_size": scheme.group_size, "sym": scheme.symmetric}
    size = {"nsamples": tokens.shape[0], "seqlen": tokens.shape[1]}
    options = {"amp": False, **grid, **size, **AUTO_ROUND[method]}
    quantiser = AutoRound(model, tokenizer, dataset=data, device_map="cpu", **options)
    with Stopwatch() as watch:
        made, _ = quantiser.quantize()
    return Outcome(final_tensors(made, stored_weight), "torch.float16", watch.wall, watch.cpu)


@torch.no_grad()
def stored_weight(module: torch.nn.Module) -> torch.Tensor:
    """The fake-quantised weight f32 [out, in] with its scale rounded to float16, as AutoRound's files hold it."""
    weight, scale = torch.as_tensor(module.weight).float(), module.scale
    assert isinstance(scale, torch.Tensor)
    grouped = weight.reshape(*scale.reshape(weight.shape[0], -1).shape, -1)
    scale = scale.float().reshape(*grouped.shape[:2], 1)
    return ((grouped / scale).round() * scale.half().float()).reshape(weight.shape)


# --- both -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """How a tool is run, what its package is called, and its methods by our names."""

    run: Callable[[Any, Any, torch.Tensor, str, Scheme], Outcome]
    package: str
    methods: tuple[str, ...]


PEERS = {
    "llm-compressor": Peer(llm_compressor, "llmcompressor", tuple(LLM_COMPRESSOR)),
    "auto-round": Peer(auto_round, "auto-round", tuple(AUTO_ROUND)),
}


def block_linears(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The linears of the decoder blocks, by checkpoint name."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in n]


def final_tensors(model: torch.nn.Module, read: Callable[[torch.nn.Module], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every decoder linear's weight through `read`, and all other parameters that belong to the checkpoint."""
    weights = {f"{name}.weight": read(module) for name, module in block_linears(model)}
    wanted = ("embed_tokens.weight", "lm_head.weight", "norm.weight", "layernorm.weight", ".bias")
    named = model.named_parameters(remove_duplicate=False)
    return {n: p.detach().float().clone() for n, p in named if n.endswith(wanted)} | weights


def changed_tensors(
    model: torch.nn.Module, outcome: Outcome, before: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The decoder linears and whatever else differs from `before`; the head goes with its embedding, tied or not."""
    blocks = {f"{name}.weight" for name, _ in block_linears(model)}
    changed = {n for n, t in outcome.tensors.items() if n in blocks or not torch.equal(t, before[n])}
    if "model.embed_tokens.weight" in changed:
        changed.add("lm_head.weight")
    return {n: outcome.tensors[n].contiguous() for n in sorted(changed)}


def main() -> None:
    """Read the arguments, run the peer, write its tensors and its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--method", required=True, help="one of the peer's own; a wrong name lists them")
    parser.add_argument("--scheme", type=Scheme.parse, required=True, help="int4-g32, int3-g32-asym, ...")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="npy int64 [samples, length]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    peer = PEERS[args.peer]
    if args.method not in peer.methods:
        parser.error(f"{args.peer} has no method {args.method!r}; choose from {', '.join(peer.methods)}")
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    tokens = torch.from_numpy(np.load(args.tokens))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome = peer.run(model, tokenizer, tokens, args.method, args.scheme)

    changed = changed_tensors(model, outcome, before)
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(changed, args.out / "weights.safetensors")
    record = {
        "peer": args.peer,
        "method": args.method,
        "scheme": asdict(args.scheme),
        "model": str(args.model),
        "tokens": {"file": str(args.tokens), "shape": list(tokens.shape)},
        "model_dtype": "torch.float32",
        "scale_dtype": outcome.scale_dtype,
        "other_changed_tensors": len(changed) - len(block_linears(model)),
        "wall_seconds": round(outcome.wall_seconds, 1),
        "cpu_seconds": round(outcome.cpu_seconds, 1),
        "threads": args.threads,
        "versions": {name: version(name) for name in (peer.package, "torch", "transformers")},
    }
    (args.out / "peer.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
