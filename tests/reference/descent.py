"""Coordinate descent as Behdin et al. 2023 (QuantEase, algorithm 1) has it: one weight at a time, one row at a time.

float64, the gradient computed anew for every step. What a super-block shares is moved before the scale and the minimum
of each group, and these before its codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.levels import Grid, assemble, grid_in, half, nearest_codes, usable_scale, values_of
from compress.scheme import SUPER_BLOCK
from compress.tensor import QuantizedTensor


def descend(weight: Tensor, quantized: QuantizedTensor, hessian: Tensor, sweeps: int) -> QuantizedTensor:
    """``quantized`` after ``sweeps``; see :func:`compress.descent.descend`."""
    rows = [
        _Row(weight[row].double(), quantized.rows(slice(row, row + 1)), hessian.double()) for row in range(len(weight))
    ]
    for _ in range(sweeps):
        for row in rows:
            row.sweep()
    parts = [row.grid for row in rows]
    shared = [
        None if getattr(parts[0], name) is None else torch.stack([getattr(part, name) for part in parts])
        for name in ("d", "dmin")
    ]
    grid = Grid(torch.stack([part.scale for part in parts]), torch.stack([part.zero for part in parts]), *shared)
    return assemble(torch.stack([row.codes for row in rows]), grid, quantized.scheme)


class _Row:
    def __init__(self, weight: Tensor, quantized: QuantizedTensor, hessian: Tensor) -> None:
        self.weight, self.hessian, self.scheme = weight, hessian, quantized.scheme
        self.codes = quantized.codes[0].float()
        self.grid = grid_in(quantized).each(lambda part: part[0].clone())
        self.width = self.scheme.width(len(weight))

    def values(self) -> Tensor:
        places = torch.arange(len(self.codes)) // self.width
        return values_of(self.codes, self.grid.scale[places], self.grid.zero[places], self.scheme).double()

    def pull(self) -> Tensor:
        """Minus half the gradient by the weights."""
        return self.hessian @ (self.weight - self.values())

    def best(self, now: float, units: Tensor) -> float:
        """The best factor for ``units`` [in], float64, in the place of ``now``."""
        curvature = float(units @ self.hessian @ units)
        return now + (float(units @ self.pull()) / curvature if curvature > 0 else 0.0)

    def sweep(self) -> None:
        for place, start in enumerate(range(0, len(self.codes), self.width)):
            group = slice(start, min(start + self.width, len(self.codes)))
            if self.scheme.two_level and start % SUPER_BLOCK == 0:
                self.move_shared(start // SUPER_BLOCK)
            self.move_scale(place, group)
            if self.scheme.has_minima:
                self.move_minimum(place, group)
            for column in range(group.start, group.stop):
                target = float(self.values()[column]) + float(self.pull()[column]) / float(self.hessian[column, column])
                scale, zero = self.grid.scale[place], self.grid.zero[place]
                self.codes[column] = nearest_codes(torch.tensor(target).float(), scale, zero, self.scheme)

    def move_shared(self, block: int) -> None:
        per_block = SUPER_BLOCK // self.width
        groups = slice(block * per_block, (block + 1) * per_block)
        columns = torch.arange(groups.start * self.width, groups.stop * self.width)
        pairs = [(self.grid.d, self.grid.scale, True)]
        if self.scheme.has_minima:
            pairs.append((self.grid.dmin, self.grid.zero, False))
        for shared, multiples, of_codes in pairs:
            assert shared is not None
            now = float(shared[block])
            whole = torch.round(multiples[groups] / now)
            units = torch.zeros(len(self.codes), dtype=torch.float64)
            middle = 0 if self.scheme.has_minima else self.scheme.midpoint
            each = self.codes[columns].double() - middle if of_codes else torch.tensor(-1.0).double()
            units[columns] = each * whole.double().repeat_interleave(self.width)
            wanted = self.best(now, units)
            stored = float(half(torch.tensor([wanted]).float())[0])
            if abs(stored - wanted) < abs(now - wanted) and stored * now > 0:
                shared[block] = stored
                multiples[groups] = whole * stored

    def move_scale(self, place: int, group: slice) -> None:
        now, zero = self.grid.scale[place].clone(), self.grid.zero[place]
        units = torch.zeros(len(self.codes), dtype=torch.float64)
        one = torch.tensor(1.0)
        none = torch.tensor(0.0)
        codes = self.codes[group]
        units[group] = values_of(codes, one, none if self.scheme.has_minima else zero, self.scheme).double()
        wanted = self.best(float(now), units)
        if self.scheme.two_level:
            stored = self.multiple(wanted, self.grid.d, group, *self.scheme.two_level.scale_range)
        else:
            stored = float(usable_scale(torch.tensor([wanted]).float(), now[None], self.scheme)[0])
        if abs(stored - wanted) < abs(float(now) - wanted):
            self.grid.scale[place] = stored

    def move_minimum(self, place: int, group: slice) -> None:
        now = float(self.grid.zero[place])
        units = torch.zeros(len(self.codes), dtype=torch.float64)
        units[group] = -1.0
        wanted = self.best(now, units)
        if self.scheme.two_level:
            stored = self.multiple(wanted, self.grid.dmin, group, 0, self.scheme.two_level.scale_range[1])
        else:
            stored = float(torch.tensor(wanted).half())
        if abs(stored - wanted) < abs(now - wanted):
            self.grid.zero[place] = stored

    def multiple(self, wanted: float, shared: Tensor | None, group: slice, least: int, most: int) -> float:
        assert shared is not None
        unit = float(shared[group.start // SUPER_BLOCK])
        whole = min(max(round(wanted / unit), least), most)
        return unit * (1 if whole == 0 and least < 0 else whole)
