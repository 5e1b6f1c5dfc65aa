"""The scale and minimum of each group alone, any real numbers, for ggml's block types.

Many ranges of codes are tried; each is judged as if scale and minimum were then refitted to its codes (weighted least
squares).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.levels import FP16_MAX, constant_zero, nearest_codes, values_of
from compress.scheme import QuantScheme

LEAST_WEIGHT = 1e-6
"""Of a column, relative to the mean: even columns that do not count keep the fits well-posed."""
FLAT = 1e-5
"""Share below which the spread of a group's codes is too small to fit a scale and a minimum to."""
TRIED = {2: (0.50, 1.05, 6), 3: (0.50, 1.05, 20), 4: (0.75, 1.03, 8), 5: (0.80, 1.03, 10), 6: (0.80, 1.03, 20)}
"""Bits -> the least, the greatest and the number of multiples of the min/max scale that the search tries; with minima,
of either end of the range, each with each."""


@dataclass(frozen=True)
class Sums:
    """Of each group, weighted: sums of units, of their squares, and of units times weights."""

    units: Tensor
    squares: Tensor
    along: Tensor


class Groups:
    """``groups`` float32 [rows, groups, width] and what their columns count, [groups, width]."""

    def __init__(self, groups: Tensor, scheme: QuantScheme, weight: Tensor | None) -> None:
        self.groups, self.scheme = groups, scheme
        self.weight = _positive(torch.ones(groups.shape[1:]) if weight is None else weight)
        self.total = self.weight.sum(-1)
        self.sum = (groups * self.weight).sum(-1)
        self.zero = torch.full(groups.shape[:-1], constant_zero(scheme))

    def codes(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """The nearest codes on a grid [rows, groups]."""
        return nearest_codes(self.groups, scale[..., None], self._offset(minimum)[..., None], self.scheme)

    def error(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """Weighted squared error [rows, groups] of the nearest codes; infinite beyond fp16."""
        values = values_of(self.codes(scale, minimum), scale[..., None], self._offset(minimum)[..., None], self.scheme)
        error = values.sub_(self.groups).square_().mul_(self.weight).sum(-1)
        return torch.where((scale.abs() <= FP16_MAX) & (minimum.abs() <= FP16_MAX), error, torch.inf)

    def sums(self, codes: Tensor) -> Sums:
        """Of units: codes, counted from the midpoint where there are no minima."""
        units = codes if self.scheme.has_minima else codes - self.scheme.midpoint
        weighted = units * self.weight
        return Sums(weighted.sum(-1), (weighted * units).sum(-1), (weighted * self.groups).sum(-1))

    def fitted(self, sums: Sums, tried: Tensor) -> tuple[Tensor, Tensor]:
        """The scale and minimum that come closest with given codes; ``tried`` where they say nothing of a scale."""
        if not self.scheme.has_minima:
            return torch.where(sums.squares > 0, sums.along / sums.squares, tried), torch.zeros_like(tried)
        spread = self.total * sums.squares - sums.units.square()
        scale = (self.total * sums.along - sums.units * self.sum) / spread
        scale = torch.where((spread > FLAT * self.total * sums.squares) & (scale > 0), scale, tried)
        minimum = self.minimum(sums, scale)
        if self.scheme.two_level is not None:
            # Whole numbers of minima have no sign: without one, the scale is fitted alone.
            alone = sums.along / sums.squares
            scale = torch.where((minimum > 0) | ~(alone > 0), scale, alone)
        return scale, minimum

    def minimum(self, sums: Sums, scale: Tensor) -> Tensor:
        """The best minimum for given codes and scale."""
        if not self.scheme.has_minima:
            return torch.zeros_like(scale)
        minimum = (scale * sums.units - self.sum) / self.total
        return minimum if self.scheme.two_level is None else minimum.clamp(min=0)

    def gain(self, sums: Sums, scale: Tensor, minimum: Tensor) -> Tensor:
        """By how much a grid's squared error, codes given, is below that of zeros."""
        scaled = scale * sums.units
        return scale * (2 * sums.along - scale * sums.squares) - minimum * (
            minimum * self.total + 2 * self.sum - 2 * scaled
        )

    def _offset(self, minimum: Tensor) -> Tensor:
        return minimum if self.scheme.has_minima else self.zero


def _positive(weight: Tensor) -> Tensor:
    """``weight``, but not negative, relative to its mean, and nowhere 0; ones if it is 0 everywhere."""
    weight = weight.clamp(min=0)
    mean = weight.mean()
    return weight / mean + LEAST_WEIGHT if float(mean) > 0 else torch.ones_like(weight)


def _range(groups: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """The ends of each group; two levels reach 0."""
    low, high = groups.amin(-1), groups.amax(-1)
    return (low, high) if scheme.two_level is None else (low.clamp(max=0), high.clamp(min=0))


def widest_grid(groups: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """The min/max scale and minimum; 0 for a group of zeros."""
    low, high = _range(groups, scheme)
    if scheme.has_minima:
        return (high - low) / (scheme.levels - 1), -low
    return torch.where(high > -low, high, low) / -scheme.midpoint, torch.zeros_like(low)


def _candidates(groups: Tensor, scheme: QuantScheme) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales and minima around min/max, most of them cutting off the ends of the range."""
    low, high = _range(groups, scheme)
    narrowest, widest, count = TRIED[scheme.bits]
    factors = torch.linspace(narrowest, widest, count).tolist()
    if not scheme.has_minima:
        scale, none = widest_grid(groups, scheme)
        for factor in factors:
            yield scale * factor, none
            yield scale * -factor, none
        return
    middle = (low + high) / 2
    for lower in factors:
        for upper in factors:
            start = middle + (low - middle) * lower
            yield (middle + (high - middle) * upper - start) / (scheme.levels - 1), -start


def free_grid(work: Groups) -> tuple[Tensor, Tensor]:
    """The best scale and minimum of each group that any candidate's codes lead to, not rounded."""
    scheme, groups = work.scheme, work.groups
    scale, minimum = torch.zeros(groups.shape[:-1]), torch.zeros(groups.shape[:-1])
    best = torch.full_like(scale, -torch.inf)
    offset = constant_zero(scheme)
    for step, below in _candidates(groups, scheme):
        tried = torch.where(step == 0, 1.0, step)
        inverse = tried.reciprocal()
        codes = (groups * inverse[..., None]).add_((below * inverse + offset)[..., None])
        sums = work.sums(codes.round_().clamp_(0, scheme.levels - 1))
        fitted, lowest = work.fitted(sums, tried)
        gain = work.gain(sums, fitted, lowest)
        better = gain > best
        best, scale, minimum = (
            torch.where(better, new, old) for new, old in ((gain, best), (fitted, scale), (lowest, minimum))
        )
    return scale, minimum
