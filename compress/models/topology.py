"""Which tensors a model family has and what they are for: rows of a table, not branches.

Configuration names are made family-neutral by optimum's ``NormalizedConfigManager``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compress.errors import InputError, nearest


@dataclass(frozen=True)
class Family:
    """One row: names of layers and norms inside a block, and which layers read the same input.

    ``linears`` maps a role (q, k, v, o, gate, up, down) to the layer's name under the block; ``norms`` likewise
    (attention, feed_forward). ``shared_inputs`` groups roles that read the same activation.
    """

    name: str
    linears: Mapping[str, str]
    norms: Mapping[str, str]
    shared_inputs: Sequence[Sequence[str]]
    block: str = "model.layers.{index}"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            Family(
                name="llama",
                linears={
                    "q": "self_attn.q_proj",
                    "k": "self_attn.k_proj",
                    "v": "self_attn.v_proj",
                    "o": "self_attn.o_proj",
                    "gate": "mlp.gate_proj",
                    "up": "mlp.up_proj",
                    "down": "mlp.down_proj",
                },
                norms={"attention": "input_layernorm", "feed_forward": "post_attention_layernorm"},
                shared_inputs=(("q", "k", "v"), ("o",), ("gate", "up"), ("down",)),
            ),
        )
    }
)


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder in numbers and names, the same for every family: what exporters and planners work from."""

    family: Family
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    activation: str
    rope: Mapping[str, Any]
    """``rope_parameters`` of the checkpoint: rope_theta, rope_type and what that type needs."""
    tied: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    def linear(self, index: int, role: str) -> str:
        """Layer name of a role in block ``index``: ``model.layers.0.self_attn.q_proj``."""
        return f"{self.family.block.format(index=index)}.{self.family.linears[role]}"

    def norm(self, index: int, role: str) -> str:
        """Name of a norm in block ``index``: ``model.layers.0.input_layernorm``."""
        return f"{self.family.block.format(index=index)}.{self.family.norms[role]}"

    def block_linears(self, index: int) -> list[str]:
        """Every linear layer of block ``index``, in the family's order."""
        return [self.linear(index, role) for role in self.family.linears]

    def all_linears(self) -> Iterator[str]:
        """Every linear layer of every block."""
        for index in range(self.layers):
            yield from self.block_linears(index)

    @property
    def ends(self) -> list[str]:
        """The layers outside the blocks: the embedding and, untied, the head."""
        return [self.family.embedding] if self.tied else [self.family.embedding, self.family.head]


def describe(config: Mapping[str, Any], where: Path | str = "config.json") -> DecoderSpec:
    """The spec of a checkpoint's ``config.json``; InputError for a family that no row describes."""
    from optimum.utils import NormalizedConfigManager
    from transformers import AutoConfig

    model_type = config.get("model_type", "")
    family = FAMILIES.get(model_type)
    if family is None:
        raise InputError(
            f"model family '{model_type}' is not supported{nearest(model_type, FAMILIES)}",
            where=str(where),
            fix=f"supported families: {', '.join(FAMILIES)}",
        )
    full = AutoConfig.for_model(**config)
    plain = NormalizedConfigManager.get_normalized_config_class(model_type)(full)
    eos = full.eos_token_id
    return DecoderSpec(
        family=family,
        hidden_size=plain.hidden_size,
        intermediate_size=full.intermediate_size,
        layers=plain.num_layers,
        heads=plain.num_attention_heads,
        kv_heads=plain.num_key_value_heads,
        head_dim=getattr(full, "head_dim", None) or plain.hidden_size // plain.num_attention_heads,
        vocab_size=plain.vocab_size,
        max_positions=full.max_position_embeddings,
        norm_eps=full.rms_norm_eps,
        activation=full.hidden_act,
        rope=dict(full.rope_parameters),
        tied=full.tie_word_embeddings,
        bos_token_id=full.bos_token_id,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        pad_token_id=full.pad_token_id,
    )


def rope_frequencies(config: Mapping[str, Any]) -> tuple[list[float], float]:
    """(inverse frequencies [head_dim / 2], factor on cos and sin) as transformers computes them for this config."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    full = AutoConfig.for_model(**config)
    kind = full.rope_parameters.get("rope_type", "default")
    if kind == "default":
        dim = getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads
        theta = full.rope_parameters["rope_theta"]
        import torch

        steps = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype=torch.float)
        return (1.0 / (theta ** (steps / dim))).tolist(), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](full, device="cpu")
    return frequencies.tolist(), factor
