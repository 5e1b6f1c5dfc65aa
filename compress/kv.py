"""How a key/value cache is stored: by static scales that a file holds, or as llama.cpp is told when it runs. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

_PATTERN = re.compile(r"int(?P<bits>\d+)-(?P<shared>channel|tensor)")
BITS = (4, 8)

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
"""Types that llama.cpp takes for a cache."""


@dataclass(frozen=True)
class Stored:
    """A type of ggml: its number, and blocks of so many values in so many bytes (ggml.h, ggml-common.h)."""

    number: int
    block: int
    bytes: int


CACHE_TYPES: Mapping[CacheType, Stored] = MappingProxyType(
    {
        "f32": Stored(0, 1, 4),
        "f16": Stored(1, 1, 2),
        "bf16": Stored(30, 1, 2),
        "q8_0": Stored(8, 32, 34),
        "q5_1": Stored(7, 32, 24),
        "q5_0": Stored(6, 32, 22),
        "q4_1": Stored(3, 32, 20),
        "q4_0": Stored(2, 32, 18),
        "iq4_nl": Stored(20, 32, 18),
    }
)


@dataclass(frozen=True)
class CacheTypes:
    """What keys and values are in llama.cpp's cache: chosen when it runs, whatever the file."""

    keys: CacheType = "f16"
    values: CacheType = "f16"

    def __str__(self) -> str:
        return self.keys if self.keys == self.values else f"keys {self.keys}, values {self.values}"

    def complaints(self, key_width: int, value_width: int) -> list[str]:
        """Why a head of such widths cannot be stored so; llama.cpp stores each head in whole blocks."""
        parts = (("keys", self.keys, key_width), ("values", self.values, value_width))
        found = [
            f"{what}: {kind} holds {CACHE_TYPES[kind].block} numbers in a block, and heads of {width} are no multiple"
            for what, kind, width in parts
            if width % CACHE_TYPES[kind].block
        ]
        if self.keys == "f32" and self.flash:
            found.append(f"keys: f32 is rounded to f16 where values are quantised ({self.values}): choose f16")
        return found

    @property
    def flash(self) -> bool | None:
        """Whether flash attention is needed (quantised values) or must not be (it rounds f32 to f16); None: either."""
        if CACHE_TYPES[self.values].block > 1:
            return True
        return False if "f32" in (self.keys, self.values) else None

    def bytes_per_token(self, key_width: int, value_width: int) -> int:
        """Bytes of one head's key and value; widths are multiples of the blocks."""
        parts = ((self.keys, key_width), (self.values, value_width))
        return sum(width // CACHE_TYPES[kind].block * CACHE_TYPES[kind].bytes for kind, width in parts)


FLOAT_CACHE = CacheTypes()
"""llama.cpp's own choice."""


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
