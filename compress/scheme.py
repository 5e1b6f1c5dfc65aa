"""How a weight is stored: bits, group, symmetry. Numbers only."""

from __future__ import annotations

import re
from dataclasses import dataclass

SCALE_BITS = 16
"""Every artifact stores one fp16 scale per group."""

_PATTERN = re.compile(r"int(?P<bits>\d+)-(?:g(?P<group>\d+)|channel)(?P<asym>-asym)?")
_BITS = (2, 3, 4, 8)
FLOAT = "float"
"""The word that a recipe writes where a layer stays in floating point."""


@dataclass(frozen=True)
class QuantScheme:
    """Integer codes with one scale (and, asymmetric, one integer zero point) per group of consecutive inputs.

    A weight is ``(code - zero) * scale``; symmetric schemes have ``zero = 2**(bits - 1)`` everywhere.
    ``group_size=None`` is one group per output row. The last group of a row may be narrower.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True

    @classmethod
    def parse(cls, text: str) -> QuantScheme:
        """Read ``int4-g32``, ``int4-g32-asym``, ``int8-channel``; ValueError says what is wrong with another text."""
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"'{text}' is not a scheme: write int4-g32, int4-g32-asym, int8-g32 or int4-channel")
        bits, group = int(match["bits"]), match["group"]
        if bits not in _BITS:
            raise ValueError(f"'{text}': {bits} bits are not supported, only {', '.join(map(str, _BITS))}")
        if group is not None and int(group) < 1:
            raise ValueError(
                f"'{text}': the group size must be at least 1; one group per row is written int{bits}-channel"
            )
        return cls(bits, None if group is None else int(group), match["asym"] is None)

    def __str__(self) -> str:
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"int{self.bits}-{group}{'' if self.symmetric else '-asym'}"

    @property
    def levels(self) -> int:
        """How many codes there are: ``2**bits``."""
        return 1 << self.bits

    @property
    def midpoint(self) -> int:
        """The code that stands for 0 in a symmetric scheme."""
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


INT8_G32 = QuantScheme(8, 32)
