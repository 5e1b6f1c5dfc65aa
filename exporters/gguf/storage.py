"""Which GGUF type stores a scheme exactly, as a table, and why another cannot be stored. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from compress.scheme import FLOAT, SUPER_BLOCK, QuantScheme


@dataclass(frozen=True)
class Layout:
    """A GGUF type: ``block`` inputs lie in ``size`` bytes, with their scales, and never span two rows."""

    type: str
    block: int
    size: int
    file_type: str
    """What llama.cpp calls a file in which most weights are of this type."""


_ROWS = (
    Layout("Q4_0", 32, 18, "Q4_0"),
    Layout("Q4_1", 32, 20, "Q4_1"),
    Layout("Q5_0", 32, 22, "Q5_0"),
    Layout("Q5_1", 32, 24, "Q5_1"),
    Layout("Q8_0", 32, 34, "Q8_0"),
    Layout("IQ4_NL", 32, 18, "IQ4_NL"),
    Layout("MXFP4", 32, 17, "MXFP4_MOE"),
    Layout("TQ1_0", SUPER_BLOCK, 54, "TQ1_0"),
    Layout("TQ2_0", SUPER_BLOCK, 66, "TQ2_0"),
    Layout("Q2_K", SUPER_BLOCK, 84, "Q2_K"),
    Layout("Q3_K", SUPER_BLOCK, 110, "Q3_K_M"),
    Layout("Q4_K", SUPER_BLOCK, 144, "Q4_K_M"),
    Layout("Q5_K", SUPER_BLOCK, 176, "Q5_K_M"),
    Layout("Q6_K", SUPER_BLOCK, 210, "Q6_K"),
    Layout("F16", 1, 2, "F16"),
    Layout("F32", 1, 4, "ALL_F32"),
    Layout("BF16", 1, 2, "BF16"),
)
LAYOUTS: Mapping[str, Layout] = MappingProxyType({row.type: row for row in _ROWS})

QUANTIZED: Mapping[str, str] = MappingProxyType(
    {
        "int4": "Q4_0",
        "int4-asym": "Q4_1",
        "int5": "Q5_0",
        "int5-asym": "Q5_1",
        "int8": "Q8_0",
        "q4_1": "Q4_1",
        "q5_1": "Q5_1",
        "iq4_nl": "IQ4_NL",
        "mxfp4": "MXFP4",
        "ternary": "TQ2_0",
        "q2_k": "Q2_K",
        "q3_k": "Q3_K",
        "q4_k": "Q4_K",
        "q5_k": "Q5_K",
        "q6_k": "Q6_K",
    }
)
"""Kind of a scheme -> GGUF type whose decoding is ours. No type has the values of nf4."""

TERNARY: Mapping[str, str] = MappingProxyType({"tq2_0": "TQ2_0", "tq1_0": "TQ1_0"})
"""The exporter's ``ternary`` -> GGUF type: the same numbers in 2.0625 bits, quick to decode, or in 1.6875."""
FLOATS: Mapping[str, str] = MappingProxyType({"f16": "F16", "f32": "F32", "bf16": "BF16"})
"""The exporter's ``float_type`` -> GGUF type of layers that stay in floating point."""

_NARROW: Mapping[str, str] = MappingProxyType(
    {
        "q2_k": "iq4_nl",
        "q3_k": "iq4_nl",
        "q4_k": "iq4_nl",
        "q5_k": "int5-g32",
        "q6_k": "int8-g32",
        "ternary": "int4-g32",
    }
)
"""Kinds with blocks of 256 -> what a width that they don't divide may take: the next size up with blocks of 32."""


@dataclass(frozen=True)
class TypeChoices:
    """How a file stores what schemes leave open: layers in floating point, and ternary ones."""

    float_type: str = "f16"
    ternary: str = "tq2_0"

    def layout(self, scheme: QuantScheme | None) -> Layout:
        """GGUF type of a layer; None is a layer in floating point. KeyError for a kind that has none."""
        if scheme is None:
            return LAYOUTS[FLOATS[self.float_type]]
        return LAYOUTS[TERNARY[self.ternary] if scheme.codebook == "ternary" else QUANTIZED[scheme.kind]]

    def stored_bits(self, scheme: QuantScheme | None, shape: tuple[int, int]) -> int:
        """Bits of a layer [out, in] in the file; what a compact file holds where :func:`complaint` refuses."""
        rows, columns = shape
        if scheme is not None and _reasons(columns, scheme)[0]:
            return scheme.stored_bits(shape)
        layout = self.layout(scheme)
        return rows * columns // layout.block * layout.size * 8


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
    layout = LAYOUTS[QUANTIZED.get(scheme.kind, "Q4_0")]
    if columns % 32:
        return [f"its blocks hold {layout.block} inputs and {columns} is no multiple of {layout.block}"], [FLOAT]
    reasons = []
    remedies = ["int4-g32", "q4_1", "int8-g32"]
    if scheme.kind not in QUANTIZED:
        what = f"with the values of {scheme.codebook}"
        if scheme.codebook is None:
            what = f"for {scheme.bits} bits {'symmetric' if scheme.symmetric else 'asymmetric'}"
        reasons.append(f"it has no type {what}")
    if columns % layout.block:
        reasons.append(f"its blocks hold {layout.block} inputs and {columns} is no multiple of {layout.block}")
        remedies = [_NARROW[scheme.kind]]
    elif scheme.groups(columns) > 1 and scheme.two_level is None and scheme.width(columns) % layout.block:
        reasons.append(f"groups of {scheme.group_size} end inside a block of {layout.block}")
        remedies = [f"ternary-g{SUPER_BLOCK}"] if scheme.codebook == "ternary" else remedies
    return reasons, remedies
