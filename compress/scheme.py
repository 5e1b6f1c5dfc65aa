"""How a weight is stored: bits, group, symmetry, or a codebook. Numbers only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SCALE_BITS = 16
"""Every artifact stores one fp16 scale per group."""

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
        )
    }
)
"""Name -> the value of each code, ascending, each a float32 number.

``nf4``: quantiles of a normal distribution (Dettmers et al. 2023, "QLoRA", appendix E).
"""

_PATTERN = re.compile(r"(?:int(?P<bits>\d+)|(?P<codebook>nf4))-(?:g(?P<group>\d+)|channel)(?P<asym>-asym)?")
_BITS = (2, 3, 4, 8)
FLOAT = "float"
"""The word that a recipe writes where a layer stays in floating point."""
FLOAT_BITS = 32
"""What a weight in floating point takes where nothing else is said: the widest that an artifact stores."""


@dataclass(frozen=True)
class QuantScheme:
    """Integer codes with one scale (and, asymmetric, one integer zero point) per group of consecutive inputs.

    A weight is ``(code - zero) * scale``; symmetric schemes have ``zero = 2**(bits - 1)`` everywhere. With a
    ``codebook`` (a name in :data:`CODEBOOKS`) it is ``codebook[code] * scale``, and there is no zero point.
    ``group_size=None`` is one group per output row. The last group of a row may be narrower.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True
    codebook: str | None = None

    @classmethod
    def parse(cls, text: str) -> QuantScheme:
        """Read ``int4-g32``, ``int4-g32-asym``, ``int8-channel``, ``nf4-g64``; ValueError says what is wrong."""
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"'{text}' is not a scheme: write int4-g32, int4-g32-asym, int8-g32, int4-channel or nf4-g64"
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
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"{self.codebook or f'int{self.bits}'}-{group}{'' if self.symmetric else '-asym'}"

    @property
    def levels(self) -> int:
        """How many codes there are: ``2**bits``."""
        return 1 << self.bits

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
        """Bits that a compact file holds for a weight ``[out, in]``: codes, fp16 scales, packed zero points."""
        rows, columns = shape
        zero_bits = 0 if self.symmetric else self.bits
        return rows * (columns * self.bits + self.groups(columns) * (SCALE_BITS + zero_bits))


def compact_bits(scheme: QuantScheme | None, shape: tuple[int, int]) -> int:
    """:meth:`QuantScheme.stored_bits`, and ``FLOAT_BITS`` a weight for None, a layer in floating point."""
    return shape[0] * shape[1] * FLOAT_BITS if scheme is None else scheme.stored_bits(shape)


INT8_G32 = QuantScheme(8, 32)
