"""How a weight is stored: bits, group, symmetry, or a codebook. Numbers only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SCALE_BITS = 16
"""Every artifact stores one fp16 scale per group, but for powers of two."""
EXPONENT_BITS = 8
SUPER_BLOCK = 256
"""Inputs that share the fp16 numbers ``d`` and ``dmin`` where scales have two levels."""

CODEBOOKS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "nf4": (
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
            0.44070982933044434,
            0.5626170039176941,
            0.7229568362236023,
            1.0,
        ),
        "iq4_nl": (
            *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
            *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
        ),
        "mxfp4": (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
        "ternary": (-1.0, 0.0, 1.0),
    }
)
"""Name -> the value of each code, ascending, each a float32 number.

``nf4``: quantiles of a normal distribution (Dettmers et al. 2023, "QLoRA", appendix E). ``iq4_nl``: the values of
ggml's type of that name (``ggml-common.h``). ``mxfp4``: E2M1 of the OCP Microscaling Formats 1.0, table 5.
"""

POWERS_OF_TWO = frozenset({"mxfp4"})
"""Codebooks whose scales are powers of two (E8M0, sec. 5.4.1 of the same specification), positive."""


@dataclass(frozen=True)
class BlockType:
    """How one of ggml's types that are no plain integers with a zero point lays out its numbers (``ggml-common.h``).

    ``bits`` of a code; ``width`` of a block with a scale of its own. Where ``scale_bits`` is not 0 that scale is a
    whole number of so many bits times an fp16 ``d``, which a super-block shares; else it is fp16 itself. With
    ``minima`` a weight is ``scale * code - minimum``, the minimum stored as the scale is (times ``dmin``); without,
    it is ``scale * (code - 2**(bits - 1))``, and the whole numbers have a sign.
    """

    bits: int
    width: int
    scale_bits: int
    minima: bool

    @property
    def scale_range(self) -> tuple[int, int]:
        """The least and the greatest whole number of a scale. Unsigned ones leave out 0: code 0 says as much."""
        half = 1 << (self.scale_bits - 1)
        return (1, 2 * half - 1) if self.minima else (-half, half - 1)


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "q4_1": BlockType(4, 32, 0, minima=True),
        "q5_1": BlockType(5, 32, 0, minima=True),
        "q2_k": BlockType(2, 16, 4, minima=True),
        "q3_k": BlockType(3, 16, 6, minima=False),
        "q4_k": BlockType(4, 32, 6, minima=True),
        "q5_k": BlockType(5, 32, 6, minima=True),
        "q6_k": BlockType(6, 16, 8, minima=False),
    }
)

_PATTERN = re.compile(r"(?:int(?P<bits>\d+)|(?P<codebook>nf4|ternary))-(?:g(?P<group>\d+)|channel)(?P<asym>-asym)?")
_BITS = (2, 3, 4, 5, 8)
FLOAT = "float"
"""The word that a recipe writes where a layer stays in floating point."""
FLOAT_BITS = 32
"""What a weight in floating point takes where nothing else is said: the widest that an artifact stores."""


@dataclass(frozen=True)
class QuantScheme:
    """Integer codes with one scale (and, asymmetric, one integer zero point) per group of consecutive inputs.

    A weight is ``(code - zero) * scale``; symmetric schemes have ``zero = 2**(bits - 1)`` everywhere. With a
    ``codebook`` (a name in :data:`CODEBOOKS`) it is ``codebook[code] * scale``, and there is no zero point. With a
    ``block_type`` (a name in :data:`BLOCK_TYPES`) it is what that says; asymmetric, it has minima and no zero point.
    ``group_size=None`` is one group per output row. The last group of a row may be narrower.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True
    codebook: str | None = None
    block_type: str | None = None

    @classmethod
    def parse(cls, text: str) -> QuantScheme:
        """Read ``int4-g32``, ``int4-g32-asym``, ``nf4-channel``, ``q4_k``; ValueError says what is wrong."""
        if isinstance(text, str) and text in NAMED:
            return NAMED[text]
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"'{text}' is not a scheme: write int4-g32, int4-g32-asym, int8-g32, int4-channel, nf4-g64, "
                f"ternary-g256 or one of {', '.join(NAMED)}"
            )
        codebook, group = match["codebook"], match["group"]
        bits = int(match["bits"]) if codebook is None else (len(CODEBOOKS[codebook]) - 1).bit_length()
        if bits not in _BITS:
            raise ValueError(f"'{text}': {bits} bits are not supported, only {', '.join(map(str, _BITS))}")
        if group is not None and int(group) < 1:
            kind = codebook or f"int{bits}"
            raise ValueError(
                f"'{text}': the group size must be at least 1; one group per row is written {kind}-channel"
            )
        if codebook is not None and match["asym"]:
            raise ValueError(f"'{text}': {codebook} has no zero points; write {text.removesuffix('-asym')}")
        return cls(bits, None if group is None else int(group), match["asym"] is None, codebook)

    def __str__(self) -> str:
        if self.kind in NAMED:
            return self.kind
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"{self.kind.removesuffix('-asym')}-{group}{'' if self.symmetric else '-asym'}"

    @property
    def kind(self) -> str:
        """The name without the group: ``int4``, ``int4-asym``, ``nf4``, ``q4_k``."""
        return self.block_type or self.codebook or f"int{self.bits}{'' if self.symmetric else '-asym'}"

    @property
    def is_integer(self) -> bool:
        """Whether a weight is ``(code - zero) * scale``, and nothing else."""
        return self.codebook is None and self.block_type is None

    @property
    def has_minima(self) -> bool:
        """Whether a weight is ``code * scale - minimum``."""
        return self.block_type is not None and not self.symmetric

    @property
    def two_level(self) -> BlockType | None:
        """The type of block whose scales are whole numbers times an fp16 number of a super-block, if it is one."""
        found = None if self.block_type is None else BLOCK_TYPES[self.block_type]
        return found if found is not None and found.scale_bits else None

    @property
    def levels(self) -> int:
        """How many codes there are: ``2**bits``, or as many as the codebook has."""
        return 1 << self.bits if self.codebook is None else len(CODEBOOKS[self.codebook])

    @property
    def midpoint(self) -> int:
        """The code that stands for 0 in a symmetric scheme without a codebook."""
        return 1 << (self.bits - 1)

    def width(self, columns: int) -> int:
        """Columns in one group of a row with ``columns`` inputs."""
        return columns if self.group_size is None else self.group_size

    def groups(self, columns: int) -> int:
        """Groups in one row; the last may be narrower than ``group_size``."""
        return -(-columns // self.width(columns))

    def stored_bits(self, shape: tuple[int, int]) -> int:
        """Bits that a compact file holds for a weight ``[out, in]``: codes, scales, packed zero points or minima."""
        rows, columns = shape
        per_group = SCALE_BITS if self.codebook not in POWERS_OF_TWO else EXPONENT_BITS
        shared = 0
        if (blocks := self.two_level) is not None:
            per_group = blocks.scale_bits
            shared = -(-columns // SUPER_BLOCK) * SCALE_BITS * (1 + self.has_minima)
        if self.has_minima:
            per_group *= 2
        elif not self.symmetric:
            per_group += self.bits
        return rows * (columns * self.bits + self.groups(columns) * per_group + shared)


def compact_bits(scheme: QuantScheme | None, shape: tuple[int, int]) -> int:
    """:meth:`QuantScheme.stored_bits`, and ``FLOAT_BITS`` a weight for None, a layer in floating point."""
    return shape[0] * shape[1] * FLOAT_BITS if scheme is None else scheme.stored_bits(shape)


def lowrank_bits(shape: tuple[int, int], rank: int) -> int:
    """Bits of two fp16 matrices of ``rank`` beside a weight ``shape``."""
    return SCALE_BITS * rank * sum(shape)


INT8_G32 = QuantScheme(8, 32)
NAMED: Mapping[str, QuantScheme] = MappingProxyType(
    {name: QuantScheme(4, 32, codebook=name) for name in ("iq4_nl", "mxfp4")}
    | {name: QuantScheme(row.bits, row.width, not row.minima, None, name) for name, row in BLOCK_TYPES.items()}
)
"""Schemes known by one word: ggml's types, whose groups have one size."""
