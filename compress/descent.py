"""QuantEase: Behdin et al., "QuantEase: Optimization-based Quantization for Language Models", 2023, algorithm 1.

Coordinate descent on a quantised layer's output error: each weight in turn takes the code that is best while all the
others stay as they are. Here each group's scale is a coordinate too, and so is whatever else its grid is made of.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compress.grid import one_thread
from compress.levels import (
    FP16_MAX,
    Grid,
    assemble,
    grid_in,
    half,
    nearest_codes,
    usable_scale,
    values_of,
    whole_minima,
    whole_scales,
)
from compress.scheme import SUPER_BLOCK, QuantScheme
from compress.tensor import QuantizedTensor, unit_values

COLUMNS_AT_ONCE = 128
CHUNK = SUPER_BLOCK
"""Columns after which the rest of the layer hears of the changes."""


def descend(weight: Tensor, quantized: QuantizedTensor, hessian: Tensor, sweeps: int) -> QuantizedTensor:
    """``quantized`` after ``sweeps`` over its columns, each of which can only lower ``tr(E H ET)``.

    ``weight`` float32 [out, in]; ``hessian`` H, float32 [in, in], positive definite; E is the error of the weights.
    Zero points stay. Scales and minima of two levels stay whole multiples of ``d`` and ``dmin``, which move too.
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
        self.scheme, self.hessian = quantized.scheme, hessian
        self.codes = quantized.codes.T.to(torch.float32).contiguous()
        # Copies: a single group lies the same way transposed, and what is moved here is not the caller's.
        grid = grid_in(quantized).each(lambda part: part.T.clone(memory_format=torch.contiguous_format))
        self.scale, self.zero, self.d, self.dmin = grid.scale, grid.zero, grid.d, grid.dmin
        self.pull = hessian @ (weight - quantized.dequantize()).T

    def result(self) -> QuantizedTensor:
        """As it stands."""
        grid = Grid(self.scale, self.zero, self.d, self.dmin).each(lambda part: part.T.contiguous())
        return assemble(self.codes.T.contiguous(), grid, self.scheme)

    def sweep(self) -> None:
        """Every scale and every code once, in the order of the columns."""
        columns = len(self.codes)
        for groups in _chunks(columns, self.scheme):
            chunk = slice(groups[0].start, groups[-1].stop)
            change = torch.zeros(chunk.stop - chunk.start, self.codes.shape[1])
            if self.d is not None:
                self._move(chunk, self._better_shared(chunk, self.d, self.scale, self._units(chunk)), chunk, change)
            if self.dmin is not None:
                lower = torch.full((1, 1), -1.0).expand(change.shape)
                self._move(chunk, self._better_shared(chunk, self.dmin, self.zero, lower), chunk, change)
            for group in groups:
                self._move(group, self._better_scale(group), chunk, change)
                if self.scheme.has_minima:
                    self._move(group, self._better_minimum(group), chunk, change)
                for start in range(group.start, group.stop, COLUMNS_AT_ONCE):
                    here = slice(start, min(start + COLUMNS_AT_ONCE, group.stop))
                    self._move(here, self._better_codes(here), chunk, change)
            for outside in (slice(0, chunk.start), slice(chunk.stop, columns)):
                self.pull[outside].addmm_(self.hessian[outside, chunk], change, alpha=-1)

    def _move(self, columns: slice, step: Tensor, chunk: slice, change: Tensor) -> None:
        """Let the chunk feel that the weights of ``columns`` changed by ``step`` [columns, out]."""
        change[columns.start - chunk.start : columns.stop - chunk.start] += step
        self.pull[chunk].addmm_(self.hessian[chunk, columns], step, alpha=-1)

    def _place(self, columns: slice) -> int:
        """The group of ``columns``."""
        first: int = columns.start // self.scheme.width(len(self.codes))
        return first

    def _units(self, columns: slice) -> Tensor:
        """What the scales of ``columns`` are multiplied by, [columns, out]."""
        return unit_values(self.codes[columns], self._spread(self.zero, columns), self.scheme)

    def _spread(self, each: Tensor, columns: slice) -> Tensor:
        """[groups, out] to [columns, out]; one row does for a single group."""
        first, last = self._place(columns), self._place(slice(columns.stop - 1, None))
        found = each[first : last + 1]
        return found if first == last else found.repeat_interleave(self.scheme.width(len(self.codes)), dim=0)

    def _wanted(self, columns: slice, units: Tensor, now: Tensor) -> Tensor:
        """The best factor [out] for ``units`` [columns, out], which ``now`` multiplies."""
        slope = (units * self.pull[columns]).sum(0)
        curvature = (units * (self.hessian[columns, columns] @ units)).sum(0)
        return now + torch.where(curvature > 0, slope / curvature, 0.0)

    def _better_scale(self, group: slice) -> Tensor:
        """Give the group the best scale for its codes; how its weights change."""
        place, units = self._place(group), self._units(group)
        scale, zero = self.scale[place], self.zero[place]
        wanted = self._wanted(group, units, scale)
        if (blocks := self.scheme.two_level) is not None:
            assert self.d is not None
            d = self.d[group.start // SUPER_BLOCK]
            better = _nearer(whole_scales(wanted, d, blocks) * d, scale, wanted)
        else:
            better = _nearer(usable_scale(wanted, scale, self.scheme), scale, wanted)
            if not self.scheme.has_minima:
                better = torch.where((better * zero).abs() <= FP16_MAX, better, scale)
        units.mul_(better - scale)
        self.scale[place] = better
        return units

    def _better_minimum(self, group: slice) -> Tensor:
        """Give the group the best minimum for its codes; how its weights change."""
        place = self._place(group)
        minimum = self.zero[place]
        lower = torch.full((1, 1), -1.0).expand(group.stop - group.start, len(minimum))
        wanted = self._wanted(group, lower, minimum)
        if (blocks := self.scheme.two_level) is not None:
            assert self.dmin is not None
            dmin = self.dmin[group.start // SUPER_BLOCK]
            better = whole_minima(wanted, dmin, blocks) * dmin
        else:
            better = wanted.clamp(-FP16_MAX, FP16_MAX).to(torch.float16).to(torch.float32)
        better = _nearer(better, minimum, wanted)
        change = lower * (better - minimum)
        self.zero[place] = better
        return change

    def _better_shared(self, block: slice, shared: Tensor, multiples: Tensor, units: Tensor) -> Tensor:
        """Give a super-block the best ``shared`` number for the whole numbers of its ``multiples`` (scales or minima).

        How its weights change.
        """
        place = block.start // SUPER_BLOCK
        groups = slice(self._place(block), self._place(slice(block.stop - 1, None)) + 1)
        now = shared[place]
        whole = torch.round(multiples[groups] / now)
        units = units * whole.repeat_interleave(self.scheme.width(len(self.codes)), dim=0)
        wanted = self._wanted(block, units, now)
        better = _nearer(half(wanted), now, wanted)
        # The other sign would be as good, but for the whole numbers' range.
        better = torch.where(better * now > 0, better, now)
        units.mul_(better - now)
        shared[place] = better
        multiples[groups] = whole * better
        return units

    def _better_codes(self, columns: slice) -> Tensor:
        """Round each of ``columns`` in turn to where the others want it; how their weights change."""
        place = self._place(columns)
        scale, zero = self.scale[place], self.zero[place]
        block = self.hessian[columns, columns]
        pull = self.pull[columns].clone()
        change = torch.empty_like(pull)
        before = values_of(self.codes[columns], scale, zero, self.scheme)
        with one_thread():
            for index, (now, curvature) in enumerate(zip(before, block.diagonal().tolist(), strict=True)):
                code = nearest_codes(now + pull[index] / curvature, scale, zero, self.scheme)
                self.codes[columns.start + index] = code
                change[index] = values_of(code, scale, zero, self.scheme) - now
                pull[index + 1 :].addr_(block[index + 1 :, index], change[index], alpha=-1)
        return change


def _nearer(stored: Tensor, now: Tensor, wanted: Tensor) -> Tensor:
    """``stored`` where it is nearer than ``now`` to what is wanted: then it is better, though it was rounded."""
    return torch.where((stored - wanted).abs() < (now - wanted).abs(), stored, now)


def _chunks(columns: int, scheme: QuantScheme) -> Iterator[list[slice]]:
    """Runs of whole groups of up to CHUNK columns, or of one larger group."""
    width = scheme.width(columns)
    groups = [slice(start, min(start + width, columns)) for start in range(0, columns, width)]
    together = max(1, CHUNK // width)
    for first in range(0, len(groups), together):
        yield groups[first : first + together]
