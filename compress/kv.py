"""How a key/value cache is stored: whole numbers of few bits times static scales. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_PATTERN = re.compile(r"int(?P<bits>\d+)-(?P<shared>channel|tensor)")
BITS = (4, 8)


@dataclass(frozen=True)
class KVScheme:
    """Keys (after rotary positions) and values as signed whole numbers of ``bits`` bits, zero at 0.

    One static scale for each channel of each key/value head, or one for all keys and one for all values of a block.
    """

    bits: int
    per_channel: bool

    @classmethod
    def parse(cls, text: str) -> KVScheme:
        """Read ``int8-channel``, ``int4-tensor``; ValueError says what is wrong."""
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None or int(match["bits"]) not in BITS:
            raise ValueError(
                f"'{text}' is no scheme of a cache: write int8-channel, int8-tensor, int4-channel, int4-tensor"
            )
        return cls(int(match["bits"]), match["shared"] == "channel")

    def __str__(self) -> str:
        return f"int{self.bits}-{'channel' if self.per_channel else 'tensor'}"

    @property
    def low(self) -> int:
        """The least number, as two's complement has it."""
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        """The greatest number."""
        return (1 << (self.bits - 1)) - 1

    def rounded(self, found: Tensor, scale: Tensor) -> Tensor:
        """Keys or values [..., kv heads, length, head size] as a cache with ``scale`` [kv heads, head size] holds them.

        What ONNX Runtime's GroupQueryAttention stores and then reads, to the bit: ``clip(round(x * (1 / scale))) *
        scale`` in float32, halves to even.
        """
        step = scale[:, None, :]
        return (found * step.reciprocal()).round_().clamp_(self.low, self.high).mul_(step)


@dataclass(frozen=True)
class KVScales:
    """Scales of one block's cache, float32: [kv heads, head size] each, or [1, 1] where one serves all."""

    scheme: KVScheme
    key: Tensor
    value: Tensor

    def rounded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., kv heads, length, head size] as the cache holds them, float32."""
        return self.scheme.rounded(keys, self.key), self.scheme.rounded(values, self.value)
