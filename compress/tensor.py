"""A quantised weight: codes and what turns them back into numbers. No I/O, no packing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.scheme import QuantScheme


def expand_groups(per_group: Tensor, scheme: QuantScheme, columns: int) -> Tensor:
    """Repeat ``[out, groups]`` along the row to ``[out, columns]``."""
    return per_group.repeat_interleave(scheme.width(columns), dim=1)[:, :columns]


@dataclass(frozen=True)
class QuantizedTensor:
    """``weight[o, i] = (codes[o, i] - zero[o, g(i)]) * scale[o, g(i)]``.

    ``codes`` uint8 [out, in]; ``scale`` float32 [out, groups], already rounded to what files store;
    ``zero`` uint8 [out, groups], or None for the midpoint.
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
        """float32 [out, in]. Exact: a code has at most 8 bits and a scale 11, so the product needs no rounding."""
        columns = self.codes.shape[1]
        centred = self.codes.to(torch.float32)
        if self.zero is None:
            centred -= self.scheme.midpoint
        else:
            centred -= expand_groups(self.zero.to(torch.float32), self.scheme, columns)
        return centred * expand_groups(self.scale, self.scheme, columns)
