"""What each model family is made of: rows of a table, not branches. Imports nothing heavy.

Names are those of checkpoints on disk. A family here is a ``model_type`` of ``config.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

Names = Mapping[str, str]
"""Role -> name under the block."""


@dataclass(frozen=True)
class Scaling:
    """Factors on what flows through the model, and caps: ``x`` becomes ``cap * tanh(x / cap)``.

    ``attention`` multiplies the products of queries and keys; None means ``1 / sqrt(head_dim)``.
    """

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0
    logits: float = 1.0
    attention_cap: float | None = None
    logits_cap: float | None = None


@dataclass(frozen=True)
class ExpertNames:
    """How a family stores routed experts: one matrix for each projection on disk, fused 3-D parameters in memory.

    ``linears`` maps a role to a name with ``{expert}`` in it; ``router`` and ``shared_gate`` are small matrices that
    stay in floating point; ``shared`` are the linears of an expert that every token passes. ``count`` is the attribute
    of transformers' configuration that says how many experts there are.

    ``module`` is transformers' module of the experts. ``fused`` maps its parameters [experts, out, in] to the roles
    whose rows they stack; ``renamed`` maps other parameters of the block to their names on disk.
    """

    linears: Names
    router: str
    count: str
    fused: Mapping[str, Sequence[str]]
    module: str = "mlp.experts"
    renamed: Names = field(default_factory=dict)
    shared: Names = field(default_factory=dict)
    shared_gate: str | None = None


@dataclass(frozen=True)
class Family:
    """One row: names of layers and norms inside a block, which layers read the same input, what else is peculiar.

    ``linears`` maps a role (q, k, v, o, gate, up, down, or a fused one) to the layer's name under the block;
    ``fused`` says which roles a fused layer's rows hold, in their order. ``shared_inputs`` groups roles that read the
    same activation. In blocks with ``experts`` these take the place of the linears of the same roles. A layer may have
    a bias; the checkpoint has it then, as ``NAME.bias``.

    ``norms`` are those of hidden states: ``attention`` and ``feed_forward`` before the branch, ``attention_out`` and
    ``feed_forward_out`` after it, each only where the family has it. ``head_norms`` are those of queries and keys:
    over each head, or over all heads at once where ``whole_head_norms``. A norm multiplies by ``norm_offset + weight``.

    ``window`` says which blocks see only ``sliding_window`` tokens: ``none``, ``all``, or those that ``layer_types``
    names. ``activation`` is the configuration's attribute with the feed-forward activation.
    """

    name: str
    linears: Names
    norms: Names
    shared_inputs: Sequence[Sequence[str]]
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    head_norms: Names = field(default_factory=dict)
    whole_head_norms: bool = False
    norm_offset: float = 0.0
    activation: str = "hidden_act"
    window: Literal["none", "all", "typed"] = "none"
    scaling: Callable[[Any], Scaling] = lambda config: Scaling()
    experts: ExpertNames | None = None
    block: str = "model.layers.{index}"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"


_ATTENTION = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_LINEARS = _ATTENTION | {role: f"mlp.{name}" for role, name in _MLP.items()}
_INPUTS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
_BEFORE = {"attention": "input_layernorm", "feed_forward": "post_attention_layernorm"}
_AFTER = {"attention_out": "post_attention_layernorm", "feed_forward_out": "post_feedforward_layernorm"}
_AROUND = _AFTER | {"attention": "input_layernorm", "feed_forward": "pre_feedforward_layernorm"}
_HEAD_NORMS = {"q": "self_attn.q_norm", "k": "self_attn.k_norm"}
_GATE_UP = {"mlp.experts.gate_up_proj": ("gate", "up"), "mlp.experts.down_proj": ("down",)}
_QWEN_EXPERTS = {role: f"mlp.experts.{{expert}}.{name}" for role, name in _MLP.items()}


def _gemma(config: Any) -> Scaling:
    return Scaling(embedding=config.hidden_size**0.5)


def _gemma2(config: Any) -> Scaling:
    return Scaling(
        embedding=config.hidden_size**0.5,
        attention=config.query_pre_attn_scalar**-0.5,
        attention_cap=config.attn_logit_softcapping,
        logits_cap=config.final_logit_softcapping,
    )


def _granite(config: Any) -> Scaling:
    return Scaling(
        embedding=config.embedding_multiplier,
        attention=config.attention_multiplier,
        residual=config.residual_multiplier,
        logits=1 / config.logits_scaling,
    )


_LLAMA = Family("llama", _LINEARS, _BEFORE, _INPUTS)
_GEMMA2 = replace(
    _LLAMA,
    name="gemma2",
    norms=_AROUND,
    norm_offset=1.0,
    activation="hidden_activation",
    window="typed",
    scaling=_gemma2,
)

_ROWS = (
    _LLAMA,
    replace(_LLAMA, name="mistral", window="all"),
    replace(_LLAMA, name="qwen2", window="typed"),
    replace(_LLAMA, name="qwen3", head_norms=_HEAD_NORMS, window="typed"),
    replace(_LLAMA, name="gemma", norm_offset=1.0, scaling=_gemma),
    _GEMMA2,
    replace(_GEMMA2, name="gemma3_text", head_norms=_HEAD_NORMS),
    replace(
        _LLAMA,
        name="phi3",
        linears={
            "qkv": "self_attn.qkv_proj",
            "o": "self_attn.o_proj",
            "gate_up": "mlp.gate_up_proj",
            "down": "mlp.down_proj",
        },
        shared_inputs=(("qkv",), ("o",), ("gate_up",), ("down",)),
        fused={"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")},
        window="all",
    ),
    replace(_LLAMA, name="smollm3", window="typed"),
    replace(
        _LLAMA,
        name="olmo2",
        norms=_AFTER,
        head_norms=_HEAD_NORMS,
        whole_head_norms=True,
    ),
    replace(_LLAMA, name="granite", scaling=_granite),
    replace(
        _LLAMA,
        name="mixtral",
        window="all",
        experts=ExpertNames(
            linears={
                "gate": "block_sparse_moe.experts.{expert}.w1",
                "up": "block_sparse_moe.experts.{expert}.w3",
                "down": "block_sparse_moe.experts.{expert}.w2",
            },
            router="block_sparse_moe.gate",
            count="num_local_experts",
            fused=_GATE_UP,
            renamed={"mlp.gate.weight": "block_sparse_moe.gate.weight"},
        ),
    ),
    replace(
        _LLAMA,
        name="qwen2_moe",
        window="typed",
        experts=ExpertNames(
            linears=_QWEN_EXPERTS,
            router="mlp.gate",
            count="num_experts",
            fused=_GATE_UP,
            shared={role: f"mlp.shared_expert.{name}" for role, name in _MLP.items()},
            shared_gate="mlp.shared_expert_gate",
        ),
    ),
    replace(
        _LLAMA,
        name="qwen3_moe",
        head_norms=_HEAD_NORMS,
        window="all",
        experts=ExpertNames(linears=_QWEN_EXPERTS, router="mlp.gate", count="num_experts", fused=_GATE_UP),
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ROWS})
