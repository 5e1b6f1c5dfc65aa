"""A quantised weight: codes and what turns them back into numbers. No I/O, no packing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from compress.codebook import code_values
from compress.scheme import QuantScheme, lowrank_bits


def expand_groups(per_group: Tensor, scheme: QuantScheme, columns: int) -> Tensor:
    """Repeat ``[out, groups]`` along the row to ``[out, columns]``."""
    return per_group.repeat_interleave(scheme.width(columns), dim=1)[:, :columns]


def unit_values(codes: Tensor, zero: Tensor | float, scheme: QuantScheme) -> Tensor:
    """What ``codes`` (of any dtype, whole numbers) stand for before scaling, float32.

    A codebook reads no ``zero``; with minima it comes off after scaling.
    """
    if scheme.codebook is not None:
        return code_values(codes, scheme.codebook)
    return codes.to(torch.float32, copy=True) if scheme.has_minima else codes.to(torch.float32) - zero


@dataclass(frozen=True)
class LowRank:
    """A product beside a quantised weight that makes up for part of its error: ``u @ v``.

    ``u`` float32 [out, rank] and ``v`` float32 [rank, in], numbers that fp16 holds: files store them so.
    """

    u: Tensor
    v: Tensor

    @property
    def rank(self) -> int:
        """Columns of ``u``."""
        return self.u.shape[1]

    @property
    def bits(self) -> int:
        """Bits that both take in a file."""
        return lowrank_bits((self.u.shape[0], self.v.shape[1]), self.rank)


@dataclass(frozen=True)
class QuantizedTensor:
    """``weight[o, i] = (codes[o, i] - zero[o, g(i)]) * scale[o, g(i)]``, or ``table[codes[o, i]] * scale[o, g(i)]``.

    ``codes`` uint8 [out, in]; ``scale`` float32 [out, groups], already rounded to what files store;
    ``zero`` uint8 [out, groups], or None for the midpoint. ``table`` is the scheme's codebook, where it has one.

    A scheme with minima has ``minimum`` float32 [out, groups]: ``codes * scale - minimum``. Where scales have two
    levels, ``d`` (and ``dmin``, with minima) float32 [out, super-blocks] are the fp16 numbers of which scales (and
    minima) are whole multiples, without rounding. What it stands for is its own values and those of the ``residual``.
    """

    scheme: QuantScheme
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    minimum: Tensor | None = None
    d: Tensor | None = None
    dmin: Tensor | None = None
    residual: LowRank | None = None

    @classmethod
    def of(cls, scheme: QuantScheme, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """What :meth:`tensors` took apart."""
        own = {name: value for name, value in tensors.items() if name not in ("u", "v")}
        return cls(scheme, **own, residual=LowRank(tensors["u"], tensors["v"]) if "u" in tensors else None)

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.codes.shape[0], self.codes.shape[1]

    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> each tensor that there is."""
        found = [(item.name, getattr(self, item.name)) for item in fields(self)]
        if self.residual is not None:
            found += [("u", self.residual.u), ("v", self.residual.v)]
        return {name: value for name, value in found if isinstance(value, Tensor)}

    def rows(self, chosen: Any) -> QuantizedTensor:
        """The rows that an index, or a slice, picks."""
        tensors = {name: value if name == "v" else value[chosen] for name, value in self.tensors().items()}
        return QuantizedTensor.of(self.scheme, tensors)

    @classmethod
    def joined(cls, parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """The rows of ``parts`` of one scheme, one after another; none of them has a residual."""
        assert all(part.residual is None for part in parts)
        if len(parts) == 1:
            return parts[0]
        tensors = [part.tensors() for part in parts]
        return cls.of(parts[0].scheme, {name: torch.cat([each[name] for each in tensors]) for name in tensors[0]})

    def dequantize(self) -> Tensor:
        """float32 [out, in]: :meth:`base` and the residual, whose product rounds as the matrices are multiplied."""
        return self.base() if self.residual is None else self.base().addmm_(self.residual.u, self.residual.v)

    def base(self) -> Tensor:
        """float32 [out, in] without the residual, the same to the bit wherever it is computed.

        A whole number of at most 8 bits times a scale of 11 needs no rounding; a codebook's value times a scale is
        one float32 product, rounded to nearest. A code of at most 6 bits times a scale of two levels (11 and 8 bits)
        needs no rounding either, so that taking off the minimum rounds once.
        """
        columns = self.codes.shape[1]
        zero: Tensor | float = self.scheme.midpoint
        if self.zero is not None:
            zero = expand_groups(self.zero.to(torch.float32), self.scheme, columns)
        product = unit_values(self.codes, zero, self.scheme) * expand_groups(self.scale, self.scheme, columns)
        return product if self.minimum is None else product - expand_groups(self.minimum, self.scheme, columns)
