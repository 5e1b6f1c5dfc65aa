"""Which GGUF type stores a scheme exactly, as a table, and why another cannot be stored. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from compress.scheme import FLOAT, QuantScheme

BLOCK = 32
"""Inputs in one block of every type below; a block has its own scale and never spans two rows."""

QUANTIZED: Mapping[tuple[int, bool], str] = MappingProxyType({(4, True): "Q4_0", (4, False): "Q4_1", (8, True): "Q8_0"})
"""(bits, symmetric) -> GGUF type whose decoding is ours: d*(q-8), d*q+m, d*q. No type has the values of nf4."""

_BLOCK_BYTES: Mapping[str, int] = MappingProxyType({"Q4_0": 18, "Q4_1": 20, "Q8_0": 34})
"""Codes of 32 inputs with their fp16 scale, and fp16 minimum (Q4_1)."""
_FLOAT_BITS: Mapping[str, int] = MappingProxyType({"F16": 16, "F32": 32, "BF16": 16})

FLOATS: Mapping[str, str] = MappingProxyType({"f16": "F16", "f32": "F32", "bf16": "BF16"})
"""The exporter's ``float_type`` -> GGUF type of layers that stay in floating point."""


def storage_type(scheme: QuantScheme | None, float_type: str) -> str:
    """GGUF type of a layer; None is a layer in floating point. KeyError for a scheme that :func:`complaint` refuses."""
    return FLOATS[float_type] if scheme is None else QUANTIZED[scheme.bits, scheme.symmetric]


def stored_bits(scheme: QuantScheme | None, shape: tuple[int, int], float_type: str) -> int:
    """Bits of a layer [out, in] in the file; of a scheme that :func:`complaint` refuses, what a compact file holds."""
    rows, columns = shape
    if scheme is None:
        return rows * columns * _FLOAT_BITS[FLOATS[float_type]]
    if _reasons(columns, scheme)[0]:
        return scheme.stored_bits(shape)
    return rows * columns // BLOCK * _BLOCK_BYTES[storage_type(scheme, float_type)] * 8


def complaint(layer: str, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
    """Why ``layer`` cannot be stored by ``scheme``, and what would do; None when it can.

    A group that spans several blocks is stored by repeating its scale; one that ends inside a block cannot be.
    """
    columns = shape[1]
    reasons, remedies = _reasons(columns, scheme)
    if not reasons:
        return None
    where = f"{layer} [{shape[0]}, {columns}]"
    return f"{where}: GGUF cannot store {scheme}: {' and '.join(reasons)}; use {' or '.join(remedies)} for this layer"


def _reasons(columns: int, scheme: QuantScheme) -> tuple[Sequence[str], Sequence[str]]:
    if columns % BLOCK:
        return [f"its blocks hold {BLOCK} inputs and {columns} is no multiple of {BLOCK}"], [FLOAT]
    reasons = []
    if scheme.codebook is not None:
        reasons.append(f"it has no type with the values of {scheme.codebook}")
    elif (scheme.bits, scheme.symmetric) not in QUANTIZED:
        kind = "symmetric" if scheme.symmetric else "asymmetric"
        reasons.append(f"it has no type for {scheme.bits} bits {kind}")
    if scheme.groups(columns) > 1 and scheme.width(columns) % BLOCK:
        reasons.append(f"groups of {scheme.group_size} end inside a block of {BLOCK}")
    return reasons, ["int4-g32", "int4-g32-asym", "int8-g32"]
