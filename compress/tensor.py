"""A quantised weight: codes and what turns them back into numbers. No I/O, no packing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.codebook import code_values
from compress.scheme import QuantScheme


def expand_groups(per_group: Tensor, scheme: QuantScheme, columns: int) -> Tensor:
    """Repeat ``[out, groups]`` along the row to ``[out, columns]``."""
    return per_group.repeat_interleave(scheme.width(columns), dim=1)[:, :columns]


def unit_values(codes: Tensor, zero: Tensor | float, scheme: QuantScheme) -> Tensor:
    """What ``codes`` (of any dtype, whole numbers) stand for before scaling, float32; a codebook reads no ``zero``."""
    if scheme.codebook is None:
        return codes.to(torch.float32) - zero
    return code_values(codes, scheme.codebook)


@dataclass(frozen=True)
class QuantizedTensor:
    """``weight[o, i] = (codes[o, i] - zero[o, g(i)]) * scale[o, g(i)]``, or ``table[codes[o, i]] * scale[o, g(i)]``.

    ``codes`` uint8 [out, in]; ``scale`` float32 [out, groups], already rounded to what files store;
    ``zero`` uint8 [out, groups], or None for the midpoint. ``table`` is the scheme's codebook, where it has one.
    """

    scheme: QuantScheme
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Tensor:
        """float32 [out, in], the same to the bit wherever it is computed.

        A whole number of at most 8 bits times a scale of 11 needs no rounding; a codebook's value times a scale is
        one float32 product, rounded to nearest.
        """
        columns = self.codes.shape[1]
        zero: Tensor | float = self.scheme.midpoint
        if self.zero is not None:
            zero = expand_groups(self.zero.to(torch.float32), self.scheme, columns)
        return unit_values(self.codes, zero, self.scheme) * expand_groups(self.scale, self.scheme, columns)
