"""Grids of ggml's block types: scales with a minimum, and scales of two levels, whole multiples of an fp16 number.

First each group on its own gets the scale and minimum, any real numbers, that come closest over many ranges of codes,
each judged as if refitted (weighted least squares). Then a super-block's ``d`` and ``dmin`` are searched around the
largest of its scales and minima, rounded to fp16, and all scales and minima to multiples of them. In turn each group
tries the multiples next to its own, and ``d`` and ``dmin`` are refitted to the whole numbers and codes; what comes out
best, computed as files hold it, is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.levels import (
    FP16_MAX,
    Grid,
    constant_zero,
    half,
    nearest_codes,
    usable_scale,
    values_of,
    whole_minima,
    whole_scales,
)
from compress.scheme import SUPER_BLOCK, BlockType, QuantScheme

LEAST_WEIGHT = 1e-6
"""Of a column, relative to the mean: even columns that do not count keep the fits well-posed."""
FLAT = 1e-5
"""Share below which the spread of a group's codes is too small to fit a scale and a minimum to."""
TRIED = {2: (0.50, 1.05, 6), 3: (0.50, 1.05, 20), 4: (0.75, 1.03, 8), 5: (0.80, 1.03, 10), 6: (0.80, 1.03, 20)}
"""Bits -> the least, the greatest and the number of multiples of the min/max scale that the search tries; with minima,
of either end of the range, each with each."""
SHARED = {4: (0.70, 1.15, 10), 6: (0.90, 1.06, 5), 8: (0.98, 1.02, 3)}
"""Bits of a scale -> the least, the greatest and the number of multiples of ``d`` (and of ``dmin``) that are tried."""
ROUNDS = 3


@dataclass(frozen=True)
class _Sums:
    """Of each group, weighted: sums of units, of their squares, and of units times weights."""

    units: Tensor
    squares: Tensor
    along: Tensor


class _Groups:
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

    def sums(self, codes: Tensor) -> _Sums:
        """Of units: codes, counted from the midpoint where there are no minima."""
        units = codes if self.scheme.has_minima else codes - self.scheme.midpoint
        weighted = units * self.weight
        return _Sums(weighted.sum(-1), (weighted * units).sum(-1), (weighted * self.groups).sum(-1))

    def fitted(self, sums: _Sums, tried: Tensor) -> tuple[Tensor, Tensor]:
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

    def minimum(self, sums: _Sums, scale: Tensor) -> Tensor:
        """The best minimum for given codes and scale."""
        if not self.scheme.has_minima:
            return torch.zeros_like(scale)
        minimum = (scale * sums.units - self.sum) / self.total
        return minimum if self.scheme.two_level is None else minimum.clamp(min=0)

    def gain(self, sums: _Sums, scale: Tensor, minimum: Tensor) -> Tensor:
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


def fit_blocks(groups: Tensor, scheme: QuantScheme, weight: Tensor | None, search: bool) -> Grid:
    """The grid for ``groups`` [rows, groups, width] of a scheme with a ``block_type``; ``weight`` [groups, width].

    Two levels need whole super-blocks.
    """
    work = _Groups(groups, scheme, weight)
    starts = [_widest(groups, scheme)]
    if search:
        starts.append(_free(work))
    if (blocks := scheme.two_level) is None:
        return _one_level(work, starts)
    return _SuperBlocks(work, blocks).fit(starts, search)


def refit_blocks(group: Tensor, scheme: QuantScheme, weight: Tensor | None, grid: Grid) -> Grid:
    """Another scale and minimum for ``group`` [rows, 1, width], multiples of the ``d`` and ``dmin`` in ``grid``.

    ``grid`` [rows, 1] has what they are now; never a higher weighted error than that.
    """
    work = _Groups(group, scheme, weight)
    assert scheme.two_level is not None
    assert grid.d is not None
    assert grid.dmin is not None
    blocks = _SuperBlocks(work, scheme.two_level, per_block=1)
    minimum = grid.zero if scheme.has_minima else torch.zeros_like(grid.zero)
    state = blocks.state(grid.d, grid.dmin, grid.scale, minimum)
    state = blocks.polished(blocks.offered(state, *_free(work)))
    return blocks.grid(state)


def _range(groups: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """The ends of each group; two levels reach 0."""
    low, high = groups.amin(-1), groups.amax(-1)
    return (low, high) if scheme.two_level is None else (low.clamp(max=0), high.clamp(min=0))


def _widest(groups: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
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
        scale, none = _widest(groups, scheme)
        for factor in factors:
            yield scale * factor, none
            yield scale * -factor, none
        return
    middle = (low + high) / 2
    for lower in factors:
        for upper in factors:
            start = middle + (low - middle) * lower
            yield (middle + (high - middle) * upper - start) / (scheme.levels - 1), -start


def _free(work: _Groups) -> tuple[Tensor, Tensor]:
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


def _one_level(work: _Groups, starts: list[tuple[Tensor, Tensor]]) -> Grid:
    """Scale and minimum as fp16 numbers."""
    least = torch.full(work.groups.shape[:-1], torch.inf)
    scale, minimum = torch.ones_like(least), torch.zeros_like(least)
    for start in range(len(starts) + ROUNDS):
        if start < len(starts):
            tried, lowest = starts[start]
        else:
            sums = work.sums(work.codes(scale, minimum))
            tried, lowest = work.fitted(sums, scale)
            tried = usable_scale(tried, scale, work.scheme)
            lowest = work.minimum(sums, tried)
        tried = usable_scale(tried, torch.ones_like(tried), work.scheme)
        lowest = lowest.to(torch.float16).to(torch.float32)
        error = work.error(tried, lowest)
        better = error < least
        least, scale, minimum = (
            torch.where(better, new, old) for new, old in ((error, least), (tried, scale), (lowest, minimum))
        )
    return Grid(scale, minimum)


@dataclass(frozen=True)
class _State:
    """``d`` and ``dmin`` [rows, super-blocks]; multiples of them, and the error, [rows, groups]."""

    d: Tensor
    dmin: Tensor
    scale: Tensor
    minimum: Tensor
    error: Tensor


class _SuperBlocks:
    """Runs of ``per_block`` groups that share ``d`` and ``dmin``."""

    def __init__(self, work: _Groups, blocks: BlockType, per_block: int | None = None) -> None:
        self.work, self.blocks = work, blocks
        self.per_block = SUPER_BLOCK // blocks.width if per_block is None else per_block

    def fit(self, starts: list[tuple[Tensor, Tensor]], search: bool) -> Grid:
        """The best grid found from ``starts``: scales and minima [rows, groups]."""
        found: _State | None = None
        for scale, minimum in starts:
            found = self._better(found, self._shared(scale, minimum, 1.0, 1.0))
        assert found is not None
        if search:
            scale, minimum = starts[-1]
            for d_factor, dmin_factor in self._factors():
                found = self._better(found, self._shared(scale, minimum, d_factor, dmin_factor))
            found = self.polished(found)
            for _ in range(ROUNDS):
                found = self._better(found, self.polished(self._refitted(found)))
        return self.grid(found)

    def grid(self, state: _State) -> Grid:
        """The same as a grid."""
        zero = state.minimum if self.work.scheme.has_minima else self.work.zero
        return Grid(state.scale, zero, state.d, state.dmin)

    def state(self, d: Tensor, dmin: Tensor, scale: Tensor, minimum: Tensor) -> _State:
        """With its error."""
        return _State(d, dmin, scale, minimum, self.work.error(scale, minimum))

    def offered(self, state: _State, scale: Tensor, minimum: Tensor) -> _State:
        """With ``scale`` and ``minimum``, as multiples of ``d`` and ``dmin``, in the groups where they are better."""
        other = self.state(state.d, state.dmin, *self._multiples(state, scale, minimum))
        return self._chosen(other.error < state.error, other, state)

    def polished(self, state: _State) -> _State:
        """With other multiples of the same ``d`` and ``dmin``: refitted ones, and those next to the best."""
        work, step = self.work, self._spread(state.d)
        state = self.offered(state, *work.fitted(work.sums(work.codes(state.scale, state.minimum)), state.scale))
        for sign in (1.0, -1.0):
            sums = work.sums(work.codes(state.scale, state.minimum))
            scale = state.scale + sign * step
            state = self.offered(state, scale, work.minimum(sums, scale))
        if work.scheme.has_minima:
            for sign in (1.0, -1.0):
                state = self.offered(state, state.scale, state.minimum + sign * self._spread(state.dmin))
        return state

    def _factors(self) -> Iterator[tuple[float, float]]:
        low, high, count = SHARED[self.blocks.scale_bits]
        factors = torch.linspace(low, high, count).tolist()
        for factor in factors:
            yield factor, 1.0
            if self.blocks.minima:
                yield 1.0, factor
                yield factor, factor

    def _spread(self, shared: Tensor) -> Tensor:
        """[rows, super-blocks] to [rows, groups]."""
        return shared.repeat_interleave(self.per_block, dim=1)

    def _joined(self, each: Tensor) -> Tensor:
        """[rows, groups] to [rows, super-blocks, groups of one]."""
        return each.view(len(each), -1, self.per_block)

    def _shared(self, scale: Tensor, minimum: Tensor, d_factor: float, dmin_factor: float) -> _State:
        """``d`` and ``dmin`` that just serve the largest scale and minimum, times a factor each."""
        least, most = self.blocks.scale_range
        scales = self._joined(scale)
        high, low = scales.amax(-1), scales.amin(-1)
        top = high / most if self.blocks.minima else torch.where(high > -low, high, low) / least
        d = half(top * d_factor)
        dmin = half(self._joined(minimum).amax(-1) / most * dmin_factor) if self.blocks.minima else torch.ones_like(d)
        bare = _State(d, dmin, scale, minimum, scale)
        return self.state(d, dmin, *self._multiples(bare, scale, minimum))

    def _multiples(self, state: _State, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest multiples of ``d`` and ``dmin`` that there are."""
        d, dmin = self._spread(state.d), self._spread(state.dmin)
        scale = whole_scales(scale, d, self.blocks) * d
        return scale, whole_minima(minimum, dmin, self.blocks) * dmin if self.blocks.minima else minimum

    def _refitted(self, state: _State) -> _State:
        """The best ``d`` and ``dmin``, rounded to fp16, for the whole numbers and the codes as they are."""
        work = self.work
        sums = work.sums(work.codes(state.scale, state.minimum))
        scales = torch.round(state.scale / self._spread(state.d))
        minima = torch.round(state.minimum / self._spread(state.dmin))
        square, along = self._total(scales.square() * sums.squares), self._total(scales * sums.along)
        d, dmin = along / square, state.dmin
        if self.blocks.minima:
            both = self._total(scales * minima * sums.units)
            below, beside = self._total(minima.square() * work.total), self._total(minima * work.sum)
            spread = square * below - both.square()
            fitted = (along * below - both * beside) / spread
            d = half(torch.where((spread > FLAT * square * below) & (fitted > 0), fitted, state.d))
            # What is left for dmin once d is rounded.
            fitted = (d * both - beside) / below
            dmin = half(torch.where((below > 0) & (fitted > 0), fitted, state.dmin))
        else:
            d = half(torch.where(square > 0, d, state.d))
        return self.state(d, dmin, scales * self._spread(d), minima * self._spread(dmin))

    def _total(self, each: Tensor) -> Tensor:
        return self._joined(each).sum(-1)

    def _better(self, one: _State | None, other: _State) -> _State:
        """The better of two in each super-block."""
        if one is None:
            return other
        return self._chosen(self._total(other.error) < self._total(one.error), other, one)

    def _chosen(self, better: Tensor, new: _State, old: _State) -> _State:
        """``new`` where ``better``, by groups or by super-blocks."""
        groups = better if better.shape == new.scale.shape else self._spread(better)
        shared = better if better.shape == new.d.shape else None
        return _State(
            new.d if shared is None else torch.where(shared, new.d, old.d),
            new.dmin if shared is None else torch.where(shared, new.dmin, old.dmin),
            torch.where(groups, new.scale, old.scale),
            torch.where(groups, new.minimum, old.minimum),
            torch.where(groups, new.error, old.error),
        )
