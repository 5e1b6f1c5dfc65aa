"""What llama.cpp computes for each model family, where families differ in it: rows of a table. Imports nothing heavy.

Names of tensors are not here: gguf-py knows them (:mod:`exporters.gguf.tensors`). What a row says was tried against
the torch decoder, with llama.cpp of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from compress.models.families import Scaling
from compress.models.topology import DecoderSpec

OfBlocks = Callable[[DecoderSpec], Sequence[bool]]
"""Something that llama.cpp does, or not, in each block."""


def _everywhere(spec: DecoderSpec) -> Sequence[bool]:
    return [True] * spec.layers


def _three_of_four(spec: DecoderSpec) -> Sequence[bool]:
    return [(index + 1) % 4 != 0 for index in range(spec.layers)]


def _plain(spec: DecoderSpec) -> Scaling:
    return Scaling(attention=spec.head_dim**-0.5)


def _gemma(spec: DecoderSpec) -> Scaling:
    return Scaling(embedding=spec.hidden_size**0.5, attention=spec.head_dim**-0.5)


def _by_depth(largest: int) -> Callable[[DecoderSpec], Scaling]:
    """llama.cpp tells the largest model of a family, whose scale is another, by its number of blocks."""

    def computed(spec: DecoderSpec) -> Scaling:
        width = spec.hidden_size / spec.heads if spec.layers == largest else spec.head_dim
        return replace(_gemma(spec), attention=width**-0.5)

    return computed


def _gemma2(spec: DecoderSpec) -> Scaling:
    return replace(_by_depth(46)(spec), attention_cap=50.0, logits_cap=30.0)


@dataclass(frozen=True)
class GgufFamily:
    """One row: the architecture's name, and what its graph computes.

    ``interleaved``: rows of q and k have rotary pairs side by side, where the checkpoint has the two halves of a head.
    ``scaling_keys`` are the fields of :class:`Scaling` that the file states, with their keys; the others, and what the
    model has none of, are as ``computed``. ``windows``: it heeds sliding windows, in the blocks that the file names.
    ``positions``: the blocks whose heads it rotates. ``local_rope``: blocks with a window have a rotary base of their
    own. ``rope_types`` are those whose keys or tensors it heeds, ``partial``: heads may be rotated in part.
    ``normalised``: the probabilities of the chosen experts are scaled to a sum of 1. ``tied``: where a file has no
    head, the embedding is one. ``biases`` are the roles of layers whose biases it reads.
    """

    architecture: str
    interleaved: bool = False
    activation: str = "silu"
    scaling_keys: Mapping[str, str] = field(default_factory=dict)
    computed: Callable[[DecoderSpec], Scaling] = _plain
    windows: bool = False
    positions: OfBlocks = _everywhere
    local_rope: bool = False
    rope_types: Sequence[str] = ("default", "linear", "yarn")
    partial: bool = False
    normalised: bool = True
    tied: bool = True
    biases: Collection[str] = ()


_LLAMA_ROPE = ("default", "linear", "yarn", "llama3", "longrope")
_ATTENTION_INPUTS = ("q", "k", "v")
_ALL_LINEARS = (*_ATTENTION_INPUTS, "o", "gate", "up", "down")
_LLAMA = GgufFamily("llama", interleaved=True, rope_types=_LLAMA_ROPE, biases=_ALL_LINEARS)
_GEMMA = GgufFamily("gemma", activation="gelu_pytorch_tanh", computed=_gemma)
_CAPS = {"attention_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping"}

GGUF_FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "mixtral": _LLAMA,
        "qwen2": GgufFamily("qwen2", biases=_ATTENTION_INPUTS),
        "qwen3": GgufFamily("qwen3"),
        "qwen2_moe": GgufFamily("qwen2moe", normalised=False, tied=False, biases=_ATTENTION_INPUTS),
        "qwen3_moe": GgufFamily("qwen3moe"),
        "gemma": _GEMMA,
        "gemma2": replace(_GEMMA, architecture="gemma2", scaling_keys=_CAPS, computed=_gemma2, windows=True),
        "gemma3_text": replace(
            _GEMMA,
            architecture="gemma3",
            scaling_keys={"logits_cap": _CAPS["logits_cap"]},
            computed=_by_depth(62),
            windows=True,
            local_rope=True,
        ),
        "phi3": GgufFamily("phi3", rope_types=("default", "longrope"), partial=True),
        "smollm3": GgufFamily("smollm3", interleaved=True, positions=_three_of_four),
        "olmo2": GgufFamily("olmo2", tied=False),
        "granite": GgufFamily(
            "granite",
            interleaved=True,
            rope_types=_LLAMA_ROPE,
            biases=_ALL_LINEARS,
            scaling_keys={
                "embedding": "embedding_scale",
                "attention": "attention.scale",
                "residual": "residual_scale",
                "logits": "logit_scale",
            },
        ),
    }
)
