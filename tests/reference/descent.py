"""Coordinate descent as Behdin et al. 2023 (QuantEase, algorithm 1) has it: one weight at a time, one row at a time.

float64, the gradient computed anew for every step. The scale of each group is moved before its codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.levels import nearest_codes, usable_scale, values_of
from compress.tensor import QuantizedTensor


def descend(weight: Tensor, quantized: QuantizedTensor, hessian: Tensor, sweeps: int) -> QuantizedTensor:
    """``quantized`` after ``sweeps``; see :func:`compress.descent.descend`."""
    scheme, (rows, columns) = quantized.scheme, quantized.shape
    codes, scale = quantized.codes.float(), quantized.scale.clone()
    zero = torch.full_like(scale, scheme.midpoint) if quantized.zero is None else quantized.zero.float()
    width = scheme.width(columns)
    hessian, weight = hessian.double(), weight.double()

    def values(row: int) -> Tensor:
        places = torch.arange(columns) // width
        return values_of(codes[row], scale[row, places], zero[row, places], scheme).double()

    for _ in range(sweeps):
        for row in range(rows):
            for place, start in enumerate(range(0, columns, width)):
                group = slice(start, min(start + width, columns))
                units = values_of(codes[row, group], torch.tensor(1.0), zero[row, place], scheme).double()
                pull = hessian @ (weight[row] - values(row))
                curvature = float(units @ hessian[group, group] @ units)
                wanted = float(scale[row, place])
                if curvature > 0:
                    wanted += float(units @ pull[group]) / curvature
                now = scale[row, place].clone()
                stored = usable_scale(torch.tensor([wanted], dtype=torch.float32), now[None], scheme)[0]
                if abs(float(stored) - wanted) < abs(float(now) - wanted):
                    scale[row, place] = stored
                for column in range(group.start, group.stop):
                    pull_here = float(hessian[column] @ (weight[row] - values(row)))
                    target = float(values(row)[column]) + pull_here / float(hessian[column, column])
                    target_tensor = torch.tensor(target, dtype=torch.float32)
                    codes[row, column] = nearest_codes(target_tensor, scale[row, place], zero[row, place], scheme)
    found = None if quantized.zero is None else quantized.zero
    return QuantizedTensor(scheme, codes.to(torch.uint8), scale, found)
