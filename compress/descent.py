"""QuantEase: Behdin et al., "QuantEase: Optimization-based Quantization for Language Models", 2023, algorithm 1.

Coordinate descent on a quantised layer's output error: each weight in turn takes the code that is best while all the
others stay as they are. Here each group's scale is a coordinate too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compress.grid import FP16_MAX, nearest_codes, one_thread, usable_scale, values_of
from compress.scheme import QuantScheme
from compress.tensor import QuantizedTensor, unit_values

COLUMNS_AT_ONCE = 128
CHUNK = 256
"""Columns after which the rest of the layer hears of the changes."""


def descend(weight: Tensor, quantized: QuantizedTensor, hessian: Tensor, sweeps: int) -> QuantizedTensor:
    """``quantized`` after ``sweeps`` over its columns, each of which can only lower ``tr(E H ET)``.

    ``weight`` float32 [out, in]; ``hessian`` H, float32 [in, in], positive definite; E is the error of the weights.
    Zero points stay.
    """
    work = _Descent(weight, quantized, hessian)
    for _ in range(sweeps):
        work.sweep()
    return work.result()


class _Descent:
    """The state of the descent, column-major: each step touches few, contiguous columns.

    ``pull`` [in, out] is H times the error that is left: minus half the gradient by the quantised weights.
    """

    def __init__(self, weight: Tensor, quantized: QuantizedTensor, hessian: Tensor) -> None:
        scheme = quantized.scheme
        self.scheme, self.hessian = scheme, hessian
        self.codes = quantized.codes.T.to(torch.float32).contiguous()
        self.scale = quantized.scale.T.contiguous()
        zero = torch.full_like(quantized.scale, scheme.midpoint) if quantized.zero is None else quantized.zero
        self.zero = zero.T.to(torch.float32).contiguous()
        self.has_zero = quantized.zero is not None
        self.pull = hessian @ (weight - quantized.dequantize()).T

    def result(self) -> QuantizedTensor:
        """As it stands."""
        zero = self.zero.T.to(torch.uint8).contiguous() if self.has_zero else None
        codes = self.codes.T.to(torch.uint8).contiguous()
        return QuantizedTensor(self.scheme, codes, self.scale.T.contiguous(), zero)

    def sweep(self) -> None:
        """Every scale and every code once, in the order of the columns."""
        columns = len(self.codes)
        for groups in _chunks(columns, self.scheme):
            chunk = slice(groups[0].start, groups[-1].stop)
            change = torch.zeros(chunk.stop - chunk.start, self.codes.shape[1])
            for group in groups:
                self._move(group, self._better_scale(group), chunk, change)
                for start in range(group.start, group.stop, COLUMNS_AT_ONCE):
                    here = slice(start, min(start + COLUMNS_AT_ONCE, group.stop))
                    self._move(here, self._better_codes(here), chunk, change)
            for outside in (slice(0, chunk.start), slice(chunk.stop, columns)):
                self.pull[outside].addmm_(self.hessian[outside, chunk], change, alpha=-1)

    def _move(self, columns: slice, step: Tensor, chunk: slice, change: Tensor) -> None:
        """Let the chunk feel that the weights of ``columns`` changed by ``step`` [columns, out]."""
        change[columns.start - chunk.start : columns.stop - chunk.start] += step
        self.pull[chunk].addmm_(self.hessian[chunk, columns], step, alpha=-1)

    def _better_scale(self, group: slice) -> Tensor:
        """Give the group the best scale for its codes; how its weights change."""
        place = group.start // self.scheme.width(len(self.codes))
        scale, zero = self.scale[place], self.zero[place]
        units = unit_values(self.codes[group], zero, self.scheme)
        slope = (units * self.pull[group]).sum(0)
        curvature = (units * (self.hessian[group, group] @ units)).sum(0)
        wanted = scale + torch.where(curvature > 0, slope / curvature, 0.0)
        better = usable_scale(wanted, scale, self.scheme)
        # Rounded to what files hold, it must still be better: within twice the way to the best.
        better = torch.where((better - wanted).abs() < (scale - wanted).abs(), better, scale)
        better = torch.where((better * zero).abs() <= FP16_MAX, better, scale)
        units.mul_(better - scale)
        self.scale[place] = better
        return units

    def _better_codes(self, columns: slice) -> Tensor:
        """Round each of ``columns`` in turn to where the others want it; how their weights change."""
        place = columns.start // self.scheme.width(len(self.codes))
        scale, zero = self.scale[place], self.zero[place]
        block = self.hessian[columns, columns]
        pull = self.pull[columns].clone()
        change = torch.empty_like(pull)
        with one_thread():
            for index, (column, curvature) in enumerate(
                zip(range(columns.start, columns.stop), block.diagonal().tolist(), strict=True)
            ):
                now = values_of(self.codes[column], scale, zero, self.scheme)
                self.codes[column] = nearest_codes(now + pull[index] / curvature, scale, zero, self.scheme)
                change[index] = values_of(self.codes[column], scale, zero, self.scheme) - now
                pull[index + 1 :].addr_(block[index + 1 :, index], change[index], alpha=-1)
        return change


def _chunks(columns: int, scheme: QuantScheme) -> Iterator[list[slice]]:
    """Runs of whole groups of up to CHUNK columns, or of one larger group."""
    width = scheme.width(columns)
    groups = [slice(start, min(start + width, columns)) for start in range(0, columns, width)]
    together = max(1, CHUNK // width)
    for first in range(0, len(groups), together):
        yield groups[first : first + together]
