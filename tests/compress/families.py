"""A tiny random model of every family, saved by transformers, and runs of passes over it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from calibration.stats import InputStats
from compress.activations import Spool
from compress.blocks import Done, compress_blocks
from compress.models.checkpoint import Checkpoint, open_checkpoint
from compress.models.decoder import Decoder
from compress.models.topology import describe
from compress.prepare import layer_shapes
from compress.protocols import Resource
from compress.report import LayerRecord
from compress.scheme import INT8_G32, QuantScheme
from compress.session import Block, CompressedModel, Session
from compress.store import Store

USUAL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
QWEN_MOE = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
LOCAL = {"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 24, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", LOCAL | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3": (
        "gemma3_text",
        LOCAL
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "phi3, heads rotated in part": (
        "phi3",
        {
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "attention_bias": True,
        },
    ),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "output_router_logits": True},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        QWEN_MOE
        | {"num_experts": 8, "shared_expert_intermediate_size": 64, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN_MOE | {"num_experts": 6, "head_dim": 16, "norm_topk_prob": True}),
}
"""What it is -> (family, settings)."""
ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe")


def whole_model(folder: Path) -> Any:
    """The model of transformers, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def random_model(variant: str, **overrides: Any) -> Any:
    """The model of a variant, its weights large enough that every part of it matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, settings = VARIANTS[variant]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(USUAL | settings | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            else:
                parameter.normal_(0, 0.3 if name.endswith("mlp.gate.weight") else 0.1)
    return model


def saved(variant: str, folder: Path, **overrides: Any) -> Path:
    """The model of a variant as save_pretrained writes it."""
    random_model(variant, **overrides).save_pretrained(folder)
    return folder


def tokens_of(windows: int, length: int) -> Tensor:
    return torch.randint(0, 320, (windows, length), generator=torch.Generator().manual_seed(length))


@dataclass(frozen=True)
class Compressed:
    """What passes made of a checkpoint."""

    checkpoint: Checkpoint
    session: Session
    model: CompressedModel
    done: list[Done]

    def replaced(self, folder: Path) -> Any:
        """transformers' model, read from a copy of the checkpoint that has the dequantised weights in it."""
        shutil.copytree(self.checkpoint.folder, folder)
        tensors = load_file(folder / "model.safetensors")
        for layer in self.model.schemes:
            assert f"{layer}.weight" in tensors
            tensors[f"{layer}.weight"] = self.model.quantized(layer).dequantize()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return whole_model(folder)


def compressed(
    folder: Path,
    workdir: Path,
    passes: Sequence[Any],
    tokens: Tensor,
    real: Tensor | None = None,
    spool: Spool | None = None,
    ends: QuantScheme | None = INT8_G32,
    blocks: bool = True,
) -> Compressed:
    """Run ``passes`` (planners first) over the checkpoint in ``folder``; embedding and head become ``ends``.

    ``real``: False where ``tokens`` are padding. ``blocks`` false: the blocks' layers stay in floating point.
    """
    checkpoint = open_checkpoint(folder)
    spec = describe(checkpoint.config)
    shapes, store = layer_shapes(checkpoint, spec), Store(workdir)
    names = tuple(checkpoint.files)
    model = CompressedModel(checkpoint.config, folder, "tiny", spec.tied, shapes, store, checkpoint.tensor, names)
    pinned: dict[str, QuantScheme | None] = dict.fromkeys(spec.ends, ends)
    if not blocks:
        pinned |= dict.fromkeys(spec.all_linears())
    plan = {layer: scheme for layer, scheme in pinned.items() if scheme is not None}
    decoder = Decoder(checkpoint, model.parameter, spool)
    session = Session(decoder, tokens, store, shapes, pinned, plan, real=real)
    assert [text for step in passes for text in step.check(session)] == []
    for step in passes:
        if step.scope == "model":
            step.apply(session)
    done = compress_blocks(session, [step for step in passes if step.scope == "block"])
    return Compressed(checkpoint, session, model, done)


def blockwise(folder: Path, tokens: Tensor) -> Tensor:
    """Logits of a checkpoint run block by block."""
    return torch.stack(list(Decoder(open_checkpoint(folder)).logits(tokens)))


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens).logits
    return found


def largest_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@dataclass(frozen=True)
class Watch:
    """A pass that changes nothing and keeps the statistics that it is given."""

    seen: dict[str, InputStats] = field(default_factory=dict)

    scope: ClassVar[Literal["block"]] = "block"
    reads: ClassVar[frozenset[Resource]] = frozenset({"inputs"})
    writes: ClassVar[frozenset[Resource]] = frozenset()

    def check(self, session: Session) -> list[str]:
        return []

    def apply(self, session: Session, block: Block) -> list[LayerRecord]:
        self.seen.update(block.inputs)
        return []
