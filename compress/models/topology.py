"""A decoder in numbers and names, the same for every family: what its ``config.json`` and the family's row say.

Configuration names are made family-neutral by optimum's ``NormalizedConfigManager``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compress.errors import InputError, nearest
from compress.models.families import FAMILIES, Family, Scaling

__all__ = [
    "Attention",
    "DecoderSpec",
    "Experts",
    "FAMILIES",
    "Family",
    "Scaling",
    "describe",
    "explain_config",
    "rope_frequencies",
]


STREAM_ROTATION = "stream_rotation_seed"
"""Key of a rewritten configuration (``rotate: {keep_tied: true}``); no checkpoint has it."""


@dataclass(frozen=True)
class Attention:
    """How one block attends.

    ``window``: a token sees itself and the ``window - 1`` before it; None: all before it. ``rope``: parameters of its
    rotary positions (rope_theta, rope_type and what that type needs); None: it has no positions.
    """

    window: int | None
    rope: Mapping[str, Any] | None


@dataclass(frozen=True)
class Experts:
    """Routed experts: each token passes the ``per_token`` of ``count`` experts with the highest router probability.

    ``normalised``: the probabilities of the chosen ones are scaled to a sum of 1. ``blocks`` are those with experts.
    """

    count: int
    per_token: int
    normalised: bool
    blocks: frozenset[int]


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
    """``rope_parameters`` of the checkpoint; where blocks differ in them, one entry for each type of layer."""
    tied: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    scaling: Scaling
    attentions: tuple[Attention, ...]
    """One for each block."""
    experts: Experts | None
    stream_rotation: int | None = None
    """Seed of the rotation (:func:`compress.rotation.make_rotation`) that every weight of the stream is turned by, and
    the embedding, which is the head too; but not the final norm's gains. None: there is none."""

    def linear(self, index: int, role: str) -> str:
        """Layer name of a role in block ``index``: ``model.layers.0.self_attn.q_proj``."""
        return self._under(index, self.family.linears[role])

    def norm(self, index: int, role: str) -> str:
        """Name of a norm in block ``index``: ``model.layers.0.input_layernorm``."""
        return self._under(index, self.family.norms[role])

    def has_experts(self, index: int) -> bool:
        """Whether block ``index`` has routed experts in the place of a feed-forward layer."""
        return self.experts is not None and index in self.experts.blocks

    def expert_linears(self, index: int) -> list[dict[str, str]]:
        """For each expert of block ``index``: role (gate, up, down) -> layer name. Empty where it has none."""
        if self.experts is None or self.family.experts is None or index not in self.experts.blocks:
            return []
        names = self.family.experts.linears
        return [
            {role: self._under(index, name.format(expert=expert)) for role, name in names.items()}
            for expert in range(self.experts.count)
        ]

    def shared_inputs(self, index: int) -> list[list[str]]:
        """Layers of block ``index`` that every token passes, those with the same input together."""
        names = self._common(index)
        groups = [[role for role in roles if role in names] for roles in self.family.shared_inputs]
        return [[names[role] for role in roles] for roles in groups if roles]

    def block_linears(self, index: int) -> list[str]:
        """Every linear layer of block ``index`` that may be quantised, in the family's order."""
        routed = [name for expert in self.expert_linears(index) for name in expert.values()]
        return [*self._common(index).values(), *routed]

    def all_linears(self) -> Iterator[str]:
        """Every linear layer of every block that may be quantised."""
        for index in range(self.layers):
            yield from self.block_linears(index)

    def float_linears(self) -> Iterator[str]:
        """Small matrices that always stay in floating point: they decide which expert computes, and how much."""
        names = self.family.experts
        if self.experts is None or names is None:
            return
        for index in sorted(self.experts.blocks):
            yield self._under(index, names.router)
            if names.shared_gate is not None:
                yield self._under(index, names.shared_gate)

    def _common(self, index: int) -> dict[str, str]:
        """Role -> layer name of the linears that every token passes."""
        names = dict(self.family.linears)
        if self.family.experts is not None and self.has_experts(index):
            names = {role: name for role, name in names.items() if role not in self.family.experts.linears}
            names |= self.family.experts.shared
        return {role: self._under(index, name) for role, name in names.items()}

    def _under(self, index: int, name: str) -> str:
        return f"{self.family.block.format(index=index)}.{name}"

    @property
    def ends(self) -> list[str]:
        """The layers outside the blocks: the embedding and, untied, the head."""
        return [self.family.embedding] if self.tied else [self.family.embedding, self.family.head]


@contextmanager
def explain_config(where: Path | str) -> Iterator[None]:
    """Turn what transformers says about a ``config.json`` that it cannot use into an InputError."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(f"{'unknown name ' if isinstance(error, KeyError) else ''}{error}".split())
        raise InputError(
            f"transformers cannot use this configuration: {reason}",
            where=str(where),
            fix="copy config.json again from the saved model",
        ) from error


def describe(config: Mapping[str, Any], where: Path | str = "config.json") -> DecoderSpec:
    """The spec of a checkpoint's ``config.json``; InputError for a family that no row describes."""
    from transformers import AutoConfig

    model_type = str(config.get("model_type", ""))
    family = FAMILIES.get(model_type)
    if family is None:
        raise InputError(
            f"model family '{model_type}' is not supported{nearest(model_type, FAMILIES)}",
            where=str(where),
            fix=f"supported families: {', '.join(FAMILIES)}",
        )
    with explain_config(where):
        full = AutoConfig.for_model(**config)
        if full.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers is {full.num_hidden_layers}")
    plain = _normalised(model_type)(full)
    head_dim = getattr(full, "head_dim", None) or plain.hidden_size // plain.num_attention_heads
    scaling, eos = family.scaling(full), full.eos_token_id
    return DecoderSpec(
        family=family,
        hidden_size=plain.hidden_size,
        intermediate_size=full.intermediate_size,
        layers=plain.num_layers,
        heads=plain.num_attention_heads,
        kv_heads=plain.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=plain.vocab_size,
        max_positions=full.max_position_embeddings,
        norm_eps=full.rms_norm_eps,
        activation=getattr(full, family.activation),
        rope=dict(full.rope_parameters),
        tied=full.tie_word_embeddings,
        bos_token_id=full.bos_token_id,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        pad_token_id=full.pad_token_id,
        scaling=scaling if scaling.attention is not None else replace(scaling, attention=head_dim**-0.5),
        attentions=tuple(_attention(family, full, index) for index in range(plain.num_layers)),
        experts=_experts(family, full),
        stream_rotation=config.get(STREAM_ROTATION),
    )


def _normalised(model_type: str) -> Any:
    """optimum's names for this family; those of its text models with grouped heads where it has no entry."""
    from optimum.utils import NormalizedConfigManager, NormalizedTextConfigWithGQA

    try:
        return NormalizedConfigManager.get_normalized_config_class(model_type)
    except KeyError:
        return NormalizedTextConfigWithGQA


def _experts(family: Family, full: Any) -> Experts | None:
    if family.experts is None:
        return None
    dense, step = getattr(full, "mlp_only_layers", None) or (), getattr(full, "decoder_sparse_step", 1)
    count = getattr(full, family.experts.count)
    sparse = [i for i in range(full.num_hidden_layers) if count and i not in dense and (i + 1) % step == 0]
    # Mixtral has no such setting: it always scales them.
    normalised = getattr(full, "norm_topk_prob", True)
    return Experts(count, full.num_experts_per_tok, normalised, frozenset(sparse))


def _attention(family: Family, full: Any, index: int) -> Attention:
    kind = _layer_type(full, index)
    slides = family.window == "all" or (family.window == "typed" and kind == "sliding_attention")
    rope: Mapping[str, Any] | None = full.rope_parameters
    if rope is not None and kind is not None:
        rope = rope.get(kind, rope)
    if not (getattr(full, "no_rope_layers", None) or [1] * full.num_hidden_layers)[index]:
        rope = None
    return Attention(full.sliding_window if slides else None, rope)


def _layer_type(full: Any, index: int) -> str | None:
    kinds = getattr(full, "layer_types", None)
    return None if kinds is None else kinds[index]


def rope_frequencies(config: Mapping[str, Any], index: int = 0) -> tuple[list[float], float]:
    """(inverse frequencies, one for each rotated pair of a head; factor on cos and sin) of block ``index``.

    As transformers computes them for this config. Heads may be rotated in part (``partial_rotary_factor``).
    """
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    full = AutoConfig.for_model(**config)
    kind, rope = _layer_type(full, index), full.rope_parameters
    # A type names its parameters only where types differ in them.
    typed = {"layer_type": kind} if kind in rope else {}
    if typed:
        rope = rope[kind]
    rope_type = rope.get("rope_type", "default")
    if rope_type == "default":
        import torch

        dim = getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads
        dim = int(dim * rope.get("partial_rotary_factor", 1.0))
        steps = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype=torch.float)
        return (1.0 / (rope["rope_theta"] ** (steps / dim))).tolist(), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](full, device="cpu", **typed)
    return frequencies.tolist(), factor
