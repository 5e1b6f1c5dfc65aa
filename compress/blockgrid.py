"""Grids of ggml's block types: scales with a minimum, and scales of two levels, whole multiples of an fp16 number.

Each group on its own has got a scale and a minimum (:mod:`compress.freegrid`). A super-block's ``d`` and ``dmin`` are
searched around the largest of them, rounded to fp16, and all scales and minima to their multiples. In turn each group
tries the multiples next to its own, and ``d`` and ``dmin`` are refitted to the whole numbers and codes; what comes out
best, computed as files hold it, is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.freegrid import FLAT, Groups, free_grid, widest_grid
from compress.levels import Grid, half, usable_scale, whole_minima, whole_scales
from compress.scheme import SUPER_BLOCK, BlockType, QuantScheme

SHARED = {4: (0.70, 1.15, 10), 6: (0.90, 1.06, 5), 8: (0.98, 1.02, 3)}
"""Bits of a scale -> the least, the greatest and the number of multiples of ``d`` (and of ``dmin``) that are tried."""
REACH = {4: 1, 6: 4, 8: 16}
"""Bits of a scale -> how many multiples on either side are tried: the error is jagged where there are many codes."""
ROUNDS = 3


def fit_blocks(groups: Tensor, scheme: QuantScheme, weight: Tensor | None, search: bool) -> Grid:
    """The grid for ``groups`` [rows, groups, width] of a scheme with a ``block_type``; ``weight`` [groups, width].

    Two levels need whole super-blocks.
    """
    work = Groups(groups, scheme, weight)
    starts = [widest_grid(groups, scheme)]
    if search:
        starts.append(free_grid(work))
    if (blocks := scheme.two_level) is None:
        return _one_level(work, starts)
    return _SuperBlocks(work, blocks).fit(starts, search)


def refit_blocks(group: Tensor, scheme: QuantScheme, weight: Tensor | None, grid: Grid) -> Grid:
    """Another scale and minimum for ``group`` [rows, 1, width], multiples of the ``d`` and ``dmin`` in ``grid``.

    ``grid`` [rows, 1] has what they are now; never a higher weighted error than that.
    """
    work = Groups(group, scheme, weight)
    assert scheme.two_level is not None
    assert grid.d is not None
    assert grid.dmin is not None
    blocks = _SuperBlocks(work, scheme.two_level, per_block=1)
    minimum = grid.zero if scheme.has_minima else torch.zeros_like(grid.zero)
    state = blocks.state(grid.d, grid.dmin, grid.scale, minimum)
    state = blocks.polished(blocks.offered(state, *free_grid(work)), REACH[scheme.two_level.scale_bits])
    return blocks.grid(state)


def _one_level(work: Groups, starts: list[tuple[Tensor, Tensor]]) -> Grid:
    """Scale and minimum as fp16 numbers."""
    best = _as_stored(work, *starts[0])
    for start in starts[1:]:
        best = _nearer(best, _as_stored(work, *start))
    # Without a search there is nothing to refit.
    for _ in range(ROUNDS if len(starts) > 1 else 0):
        scale, minimum, _ = best
        sums = work.sums(work.codes(scale, minimum))
        fitted = usable_scale(work.fitted(sums, scale)[0], scale, work.scheme)
        best = _nearer(best, _as_stored(work, fitted, work.minimum(sums, fitted)))
    return Grid(*best[:2])


_Found = tuple[Tensor, Tensor, Tensor]
"""Scale, minimum and error of each group."""


def _as_stored(work: Groups, scale: Tensor, minimum: Tensor) -> _Found:
    """Rounded to fp16, and the error."""
    scale = usable_scale(scale, torch.ones_like(scale), work.scheme)
    minimum = minimum.to(torch.float16).to(torch.float32)
    return scale, minimum, work.error(scale, minimum)


def _nearer(one: _Found, other: _Found) -> _Found:
    """In each group the one with the lower error."""
    better = other[2] < one[2]
    scale, minimum, error = (torch.where(better, new, old) for new, old in zip(other, one, strict=True))
    return scale, minimum, error


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

    def __init__(self, work: Groups, blocks: BlockType, per_block: int | None = None) -> None:
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
            found = self.polished(found, REACH[self.blocks.scale_bits])
            for _ in range(ROUNDS):
                found = self._better(found, self.polished(self._refitted(found), 1))
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

    def polished(self, state: _State, reach: int) -> _State:
        """With other multiples of the same ``d`` and ``dmin``: refitted ones, and those up to ``reach`` steps away."""
        work, step = self.work, self._spread(state.d)
        state = self.offered(state, *work.fitted(work.sums(work.codes(state.scale, state.minimum)), state.scale))
        start = state.scale
        for away in range(-reach, reach + 1):
            scale = start + away * step
            if work.scheme.has_minima:
                minimum = work.minimum(work.sums(work.codes(scale, state.minimum)), scale)
                state = self.offered(state, scale, minimum)
            else:
                state = self.offered(state, scale, state.minimum)
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
