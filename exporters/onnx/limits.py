"""What ONNX Runtime's operators take, checked from numbers alone: no graph is built and no weight is read."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from compress.scheme import QuantScheme, compact_bits

if TYPE_CHECKING:
    from compress.models.topology import DecoderSpec

BITS = (2, 4, 8)
STANDARD_BITS = (4, 8)
STANDARD = "standard"
DIALECTS = ("onnxruntime", STANDARD)
"""Operators of ONNX Runtime too, or those of the ONNX standard alone."""
DIALECT_REMARKS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        DIALECTS[0]: (),
        STANDARD: (
            "in the standard dialect a runtime decides whether activations are rounded: accuracy_level is not used",
        ),
    }
)
MIN_BLOCK = 16
ROTATED_MULTIPLE = 16
"""GroupQueryAttention itself rotates heads of which all and the rotated part are multiples of this."""
INT8_ACTIVATIONS, FP32_ACTIVATIONS = 4, 0
"""``accuracy_level`` of MatMulNBits that rounds the activations to 8 bits, and the one that leaves them in fp32."""
_QUICK_IN_FP32 = 4
"""The only bits whose kernel with fp32 activations is not many times slower."""

FLOAT_BITS: Mapping[str, int] = MappingProxyType({"f32": 32, "f16": 16})
"""``float_type`` -> bits of a number."""
PARITY_KLD: Mapping[str, float] = MappingProxyType({"f32": 1e-5, "f16": 8e-3})
"""``float_type`` -> highest mean KLD (nats) of a file that computes what it should."""

_CODEBOOK_BLOCKS = (256, 128, 64, 32, 16)
"""What MatMulBnb4 takes. Its blocks run on from row to row: only blocks that divide the width keep rows apart."""
_CHANNEL_BLOCKS = (256, 128, 64, 32)
_MAX_BLOCK_2BIT = 128
"""Above it (and below 32) the 2-bit kernel with 8-bit activations does not exist: fp32 runs instead, silently."""

_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "iq4_nl": "nf4-g64 or int4-g32",
        "mxfp4": "nf4-g64 or int4-g32",
        "ternary": "int2-g32",
        "q4_1": "int4-g32-asym",
        "q5_1": "int8-g32",
        "q2_k": "int2-g32-asym",
        "q3_k": "int4-g32",
        "q4_k": "int4-g32-asym",
        "q5_k": "int8-g32",
        "q6_k": "int8-g32",
    }
)
"""Kinds of schemes whose weights no operator decodes -> what would do."""

_LONGROPE = "longrope"
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", _LONGROPE)
"""Rotary types whose frequencies do not depend on the length of the input up to :func:`context_length`."""

ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
)


def block_size(scheme: QuantScheme, columns: int) -> int:
    """Inputs that share one stored scale in MatMulNBits and GatherBlockQuantized.

    It is the group size, with exceptions that store the same numbers by repeating a scale over several blocks: one
    group per row becomes the block that needs the fewest bytes, and a 2-bit group never exceeds 128. A codebook's
    (MatMulBnb4) is the largest block that divides group and width; ValueError where none does.
    """
    if scheme.codebook is not None:
        divided = math.gcd(columns, min(scheme.width(columns), columns))
        found = next((block for block in _CODEBOOK_BLOCKS if divided % block == 0), None)
        if found is None:
            raise ValueError(f"no block of MatMulBnb4 divides groups of {scheme} in rows of {columns}")
        return found
    if scheme.group_size is None:
        candidates = [block for block in _CHANNEL_BLOCKS if scheme.bits > 2 or block <= _MAX_BLOCK_2BIT]
        return min(candidates, key=lambda block: row_bytes(scheme, columns, block))
    return min(scheme.group_size, _MAX_BLOCK_2BIT) if scheme.bits == 2 else scheme.group_size


def standard_block(scheme: QuantScheme, columns: int) -> int | None:
    """Inputs that share a stored scale in DequantizeLinear, or None where the group does not divide the row.

    One group per row becomes blocks that runtimes are quick with, each with the same scale.
    """
    if scheme.group_size is not None:
        return scheme.group_size if columns % scheme.group_size == 0 else None
    return next((block for block in _CODEBOOK_BLOCKS if columns % block == 0), None)


def standard_complaint(scheme: QuantScheme, columns: int) -> str | None:
    """Why DequantizeLinear of opset 23 cannot hold a layer by this scheme and what would do, or None."""
    if scheme.codebook is not None or scheme.bits not in STANDARD_BITS:
        return "the standard dialect stores 4 or 8 bits; use int4-g32 or int8-g32, or dialect: onnxruntime"
    if standard_block(scheme, columns) is None:
        return f"DequantizeLinear needs groups that divide the {columns} inputs; use another, or dialect: onnxruntime"
    return None


def standard_bits(scheme: QuantScheme, shape: tuple[int, int]) -> int:
    """Bits of a layer in the standard dialect: codes, fp16 scales, zero points, each to whole bytes."""
    rows, columns = shape
    block = standard_block(scheme, columns)
    assert block is not None
    blocks = rows * (columns // block)
    zero_points = 0 if scheme.symmetric else -(-blocks * scheme.bits // 8)
    return 8 * (-(-rows * columns * scheme.bits // 8) + 2 * blocks + zero_points)


def row_bytes(scheme: QuantScheme, columns: int, block: int) -> int:
    """Bytes of one output row: padded codes, fp16 scales, zero points packed to whole bytes."""
    blocks = -(-columns // block)
    zero_points = 0 if scheme.symmetric else -(-blocks * scheme.bits // 8)
    return blocks * block * scheme.bits // 8 + 2 * blocks + zero_points


def layer_complaint(scheme: QuantScheme, columns: int, accuracy_level: int, gathered: bool = False) -> str | None:
    """Why the file cannot hold a layer by this scheme and what would do, or None; ``gathered`` is an embedding."""
    if scheme.kind in _OTHERS:
        return f"ONNX Runtime has no operator for its weights; use {_OTHERS[scheme.kind]}"
    if scheme.codebook is not None:
        return _codebook_complaint(scheme, columns, gathered)
    group = scheme.group_size
    if scheme.bits not in BITS:
        group_text = "channel" if group is None else f"g{group}"
        cell = min(bits for bits in BITS if bits > scheme.bits)
        return (
            f"MatMulNBits stores {', '.join(map(str, BITS[:-1]))} or {BITS[-1]} bits, and {scheme.bits} bits in cells "
            f"of {cell} would take as much as {cell}; use int{cell}-{group_text}, or int{cell // 2}"
        )
    if group is not None and (group < MIN_BLOCK or group & (group - 1)):
        return f"MatMulNBits needs a group that is a power of two >= {MIN_BLOCK}; use g32"
    if scheme.bits == 2 and group == MIN_BLOCK and accuracy_level == INT8_ACTIVATIONS:
        return "there is no 2-bit kernel with 8-bit activations for groups of 16; use int2-g32, or accuracy_level: 0"
    return None


def _gathered_complaint(scheme: QuantScheme, gathered: bool) -> str | None:
    return "no runtime gathers columns of 4-bit numbers; use int8-g32" if gathered and scheme.bits == 4 else None


def _codebook_complaint(scheme: QuantScheme, columns: int, gathered: bool) -> str | None:
    if gathered:
        return f"no operator gathers rows of an embedding in {scheme.codebook}; use int8-g32 or int4-g32"
    try:
        block_size(scheme, columns)
    except ValueError:
        smallest = _CODEBOOK_BLOCKS[-1]
        return f"MatMulBnb4 needs groups and a width of a multiple of {smallest}; use int4-g32, or float"
    return None


def stored_bits(scheme: QuantScheme | None, shape: tuple[int, int], float_type: str, dialect: str) -> int:
    """Bits of a linear layer in the file; of a scheme that cannot be held, what a compact file holds."""
    if scheme is None:
        return shape[0] * shape[1] * FLOAT_BITS[float_type]
    if dialect == STANDARD:
        held = standard_complaint(scheme, shape[1]) is None
        return standard_bits(scheme, shape) if held else compact_bits(scheme, shape)
    if layer_complaint(scheme, shape[1], accuracy_level=0) is not None:
        return compact_bits(scheme, shape)
    return 8 * shape[0] * row_bytes(scheme, shape[1], block_size(scheme, shape[1]))


def plan_remarks(plan: Mapping[str, QuantScheme]) -> list[str]:
    """What a user of a file with such layers should know."""
    found = sorted({scheme.codebook for scheme in plan.values() if scheme.codebook is not None})
    return [
        f"layers in {codebook} run through MatMulBnb4: their inputs stay in fp32, and each use decodes the weights "
        "again, which is several times slower than int4"
        for codebook in found
    ]


def float_activation_remarks(excepted: Sequence[str], plan: Mapping[str, QuantScheme]) -> list[str]:
    """The layers that ``float_activations`` excepts, by name, and those among them that are slow so."""
    if not excepted:
        return []
    told = [f"activations stay in fp32 in {len(excepted)} layers: {', '.join(excepted)}"]
    slow = [layer for layer in excepted if layer in plan and plan[layer].bits != _QUICK_IN_FP32]
    if slow:
        told.append(f"with fp32 activations 2 and 8 bits are many times slower: {', '.join(slow)}")
    return told


def tokenizer_remarks(folder: Path, vocab_size: int) -> list[str]:
    """What a user of the artifact should know about the checkpoint's tokenizer, whose files are copied as they are."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return ["there is no tokenizer.json: onnxruntime-genai cannot turn text into tokens for this artifact"]
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"].get("vocab", {})
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else [*range(len(vocabulary))]
    ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
    outside = sum(token >= vocab_size for token in set(ids))
    if not outside:
        return []
    return [f"{outside} of the tokenizer's tokens lie beyond the {vocab_size} rows of the embedding"]


def _ropes(spec: DecoderSpec) -> list[Mapping[str, Any]]:
    return [kind.rope for kind in spec.attentions if kind.rope is not None]


def context_length(spec: DecoderSpec) -> int:
    """Tokens of the longest sequence that the graph computes.

    Beyond its original positions longrope turns all tokens by other frequencies, those in the cache too: no graph does.
    """
    long = [rope["original_max_position_embeddings"] for rope in _ropes(spec) if rope.get("rope_type") == _LONGROPE]
    return min(spec.max_positions, *map(int, long)) if long else spec.max_positions


def joined_layers(spec: DecoderSpec) -> list[tuple[str, ...]]:
    """Layers that read the same input, so that one product may serve them: q, k and v; gate and up, of experts too."""
    found = []
    for index in range(spec.layers):
        found += [tuple(layers) for layers in spec.shared_inputs(index)]
        found += [(expert["gate"], expert["up"]) for expert in spec.expert_linears(index)]
    return [layers for layers in found if len(layers) > 1]


def joining_remarks(spec: DecoderSpec, plan: Mapping[str, QuantScheme], excepted: Collection[str]) -> list[str]:
    """The layers that read the same input and differ in their schemes, or in being ``excepted`` from the level."""
    groups = joined_layers(spec)
    apart = [layers for layers in groups if len({(plan.get(layer), layer in excepted) for layer in layers}) > 1]
    if not apart:
        return []
    told = ", ".join(" and ".join(layers) for layers in apart)
    return [f"join_projections: layers of one input with a product each, as schemes or activations differ: {told}"]


def context_remarks(spec: DecoderSpec) -> list[str]:
    """A context that ends before the model's positions do."""
    length = context_length(spec)
    if length == spec.max_positions:
        return []
    return [
        f"the file takes {length} tokens of the model's {spec.max_positions}: beyond its original positions "
        f"{_LONGROPE} turns every token by other frequencies, those in the cache too, which no graph can do"
    ]


def complaints(
    spec: DecoderSpec,
    plan: Mapping[str, QuantScheme],
    shapes: Mapping[str, tuple[int, int]],
    accuracy_level: int,
    dialect: str,
) -> list[str]:
    """Everything in this model and plan that the graph could not compute, one an offender."""
    found = []
    if spec.head_dim % 8:
        found.append(f"head size {spec.head_dim}: GroupQueryAttention needs a multiple of 8")
    if spec.heads % spec.kv_heads:
        found.append(f"{spec.heads} heads share {spec.kv_heads} key/value heads: GroupQueryAttention needs a multiple")
    if spec.activation not in ACTIVATIONS:
        found.append(f"activation '{spec.activation}' is not supported; known: {', '.join(ACTIVATIONS)}")
    for rope_type in sorted({rope.get("rope_type", "default") for rope in _ropes(spec)} - set(ROPE_TYPES)):
        found.append(f"rotary type '{rope_type}' is not supported; known: {', '.join(ROPE_TYPES)}")
    for layer, scheme in plan.items():
        rows, columns = shapes[layer]
        gathered = layer == spec.family.embedding
        if dialect == STANDARD:
            reason = standard_complaint(scheme, columns) or _gathered_complaint(scheme, gathered)
        else:
            reason = layer_complaint(scheme, columns, accuracy_level, gathered)
        if reason is not None:
            found.append(f"{layer} ({rows} x {columns}): {scheme}: {reason}")
    return found
