"""SignRound: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", 2023.

A weight is rounded at ``weight / scale + zero + offset``: the offsets choose, within half a step, up or down (of a
codebook, whose steps differ, within half the mean step). They are learned together with a factor on each scale and a
shift of each zero point, by the sign of the loss's gradient (eq. 3 to 5), which passes through the rounding as if it
were not there. Scales and minima of ggml's block types stay as they were searched: what they share leaves no room.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.codebook import nearest_code
from compress.grid import split_groups
from compress.levels import Grid, assemble, positions, storable, values_of
from compress.scheme import CODEBOOKS, QuantScheme
from compress.tensor import QuantizedTensor

OFFSET_SPAN = 0.5
GAIN_SPAN = 0.5
SHIFT_SPAN = 1.0
"""The farthest that an offset, a factor on a scale and a shift of a zero point go from their start, both ways."""


class LearnedRounding:
    """The codes and scales of one weight, float32 [out, in], while they are learned from ``start``, its grid."""

    def __init__(self, weight: Tensor, scheme: QuantScheme, start: Grid) -> None:
        self.scheme, self.start = scheme, start
        self.shape = weight.shape
        self.groups = split_groups(weight, scheme)
        self.offset = torch.zeros_like(self.groups)
        self.gain = torch.zeros_like(start.scale)
        self.shift = torch.zeros_like(start.scale)

    def values(self) -> Tensor:
        """The weight as it would be stored now, float32 [out, in]."""
        codes, _, grid = self._now()
        return self._flat(values_of(codes, grid.scale[..., None], grid.zero[..., None], self.scheme))

    def stored(self) -> QuantizedTensor:
        """The weight as it would be stored now."""
        codes, _, grid = self._now()
        return assemble(self._flat(codes), grid, self.scheme)

    def step(self, gradient: Tensor, rate: float) -> None:
        """Move everything by ``rate`` (of its span, twice) against the sign of ``gradient`` [out, in] of the loss."""
        slope = split_groups(gradient, self.scheme)
        codes, inside, grid = self._now()
        if self.scheme.block_type is None:
            self._move_grid(slope, codes, inside, grid, rate)
        _descend(self.offset, inside.mul_(slope).mul_(grid.scale[..., None]), rate, OFFSET_SPAN)

    def _move_grid(self, slope: Tensor, codes: Tensor, inside: Tensor, grid: Grid, rate: float) -> None:
        scale, zero = grid.scale[..., None], grid.zero[..., None]
        # d value / d scale: the rounding error in steps, or the whole code where it is clipped.
        by_scale = values_of(codes, torch.ones_like(scale), zero, self.scheme).sub_(inside * (self.groups / scale))
        by_scale = by_scale.mul_(slope).sum(-1) * self.start.scale
        _descend(self.gain, by_scale, rate, GAIN_SPAN)
        if not self.scheme.symmetric:
            # A shift moves the ends of the grid: only what is clipped feels it.
            by_zero = (slope * (inside - 1)).sum(-1) * grid.scale
            _descend(self.shift, by_zero, rate, SHIFT_SPAN)

    def _now(self) -> tuple[Tensor, Tensor, Grid]:
        """Codes, 1 where they were not clipped and else 0 (both float32 [out, groups, width]), and the grid."""
        grid = self._grid()
        if self.scheme.codebook is None:
            position = positions(self.groups, grid.scale[..., None], grid.zero[..., None], self.scheme)
            rounded = position.add_(self.offset).round_()
            codes = rounded.clamp(0, self.scheme.levels - 1)
            return codes, (codes == rounded).to(torch.float32), grid
        low, *_, high = CODEBOOKS[self.scheme.codebook]
        position = self.groups / grid.scale[..., None]
        position.add_(self.offset, alpha=(high - low) / (self.scheme.levels - 1))
        inside = (position >= low) & (position <= high)
        return nearest_code(position, self.scheme.codebook), inside.to(torch.float32), grid

    def _grid(self) -> Grid:
        if self.scheme.block_type is not None:
            return self.start
        scale = storable(self.start.scale * (1 + self.gain), self.scheme)
        if self.scheme.symmetric:
            return Grid(scale, self.start.zero)
        return Grid(scale, torch.round(self.start.zero + self.shift).clamp_(0, self.scheme.levels - 1))

    def _flat(self, groups: Tensor) -> Tensor:
        return groups.reshape(self.shape[0], -1)[:, : self.shape[1]]


def _descend(parameter: Tensor, gradient: Tensor, rate: float, span: float) -> None:
    parameter.sub_(gradient.sign(), alpha=2 * span * rate).clamp_(-span, span)
