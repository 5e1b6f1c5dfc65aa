"""Choosing scales and zero points for groups of weights, and rounding weights to codes.

A group's scale is searched for the least importance-weighted squared rounding error, around the min/max scale, and
then refitted by least squares to the codes it gave (the closed form for ``w ~ scale * (code - zero)``).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from compress.blockgrid import fit_blocks, refit_blocks
from compress.errors import InputError
from compress.levels import (
    FP16_MAX,
    Grid,
    assemble,
    asymmetric_mantissa,
    codes_of,
    constant_zero,
    nearest_codes,
    storable,
    usable_scale,
    values_of,
)
from compress.scheme import CODEBOOKS, POWERS_OF_TWO, SUPER_BLOCK, QuantScheme
from compress.tensor import QuantizedTensor, unit_values

MAX_WEIGHT = 2.0**15
"""The largest weight taken: half of what fp16 holds, so that the minima of all groups are fp16 numbers."""
NARROWEST, WIDEST = 0.60, 1.04
"""The least and the greatest multiple of the min/max scale that the search tries."""
STEPS = {2: 12, 3: 12, 4: 12, 5: 15, 8: 24}
"""Bits -> how many multiples are tried; of an asymmetric group each end of the range has its own, a third as many."""
FEW_LEVELS = 3
"""With so few codes the best scale leaves most of the range outside: the search starts at ``NARROWEST_OF_FEW``."""
NARROWEST_OF_FEW = 0.15
REFITS = 2
ROW_CHUNK = 1 << 18
"""Weights searched at a time: keeps the temporaries in cache-sized pieces."""


def fit_groups(
    groups: Tensor,
    scheme: QuantScheme,
    importance: Tensor | None = None,
    search: bool = True,
    within: Grid | None = None,
) -> Grid:
    """The grid for ``groups [rows, groups, width]``; ``importance [groups, width]`` (or [width]) weighs columns.

    Without ``search``, the min/max grid. With it, never a higher weighted error than the min/max grid. ``within`` is
    the present grid of one group, whose ``d`` and ``dmin`` are to stay.
    """
    # The order of summation follows the layout in memory.
    groups = groups.contiguous()
    importance = None if importance is None else importance.contiguous()
    rows = max(1, ROW_CHUNK // max(1, groups[0].numel()))
    chunks = [slice(start, start + rows) for start in range(0, len(groups), rows)]

    def fit(chunk: slice) -> Grid:
        return _fit(groups[chunk], scheme, importance, search, within and within.each(lambda part: part[chunk]))

    with one_thread() as threads, ThreadPoolExecutor(min(threads, len(chunks))) as pool:
        parts = list(pool.map(fit, chunks))
    d = torch.cat([p.d for p in parts if p.d is not None]) if scheme.two_level else None
    dmin = torch.cat([p.dmin for p in parts if p.dmin is not None]) if scheme.two_level else None
    return Grid(torch.cat([p.scale for p in parts]), torch.cat([p.zero for p in parts]), d, dmin)


@contextmanager
def one_thread() -> Iterator[int]:
    """Each operation on one thread while the context lasts; yields how many there were.

    For many small operations one after another: waking a second thread costs more than it gives.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _fit(
    groups: Tensor, scheme: QuantScheme, importance: Tensor | None, search: bool, within: Grid | None = None
) -> Grid:
    weight = None if importance is None else importance.clamp(min=0)
    if within is not None:
        return refit_blocks(groups, scheme, weight, within)
    if scheme.block_type is not None:
        return fit_blocks(groups, scheme, weight, search)
    low, high = groups.amin(-1), groups.amax(-1)
    best = _Best(groups, scheme, weight)
    for scale, zero in _min_max(low, high, scheme, others=search):
        best.offer(Grid(storable(scale, scheme), zero))
    if search and scheme.codebook not in POWERS_OF_TWO:
        for grid in _search(groups, low, high, scheme, weight):
            best.offer(grid)
        for _ in range(REFITS):
            best.offer(best.refitted())
            if not scheme.symmetric:
                best.offer_neighbours()
    return Grid(best.scale, best.zero)


def _min_max(low: Tensor, high: Tensor, scheme: QuantScheme, others: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales, not rounded yet, and zero points that just hold numbers from ``low`` to ``high``.

    ``others``: the same with the other sign too, or, where scales are powers of two, the next on either side.
    """
    if not scheme.symmetric:
        yield _asymmetric(low.clamp(max=0), high.clamp(min=0), scheme)
        return
    if scheme.codebook is not None:
        # Its sides differ: with a negative scale they change places.
        least, *_, greatest = CODEBOOKS[scheme.codebook]
        scale = torch.maximum(high / greatest, low / least)
    else:
        # The lowest code reaches one step further than the highest: give it to the larger side, by the scale's sign.
        scale = torch.where(high > -low, high, low) / -scheme.midpoint
    zero = torch.full_like(scale, constant_zero(scheme))
    yield scale, zero
    if others:
        for factor in (0.5, 2.0) if scheme.codebook in POWERS_OF_TWO else (-1.0,):
            yield scale * factor, zero


def _asymmetric(low: Tensor, high: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    scale = (high - low) / (scheme.levels - 1)
    scale = torch.where(scale == 0, 1.0, scale)
    return scale, torch.round(-low / scale).clamp_(0, scheme.levels - 1)


def _candidates(low: Tensor, high: Tensor, scheme: QuantScheme) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales and zero points around min/max, most of them cutting off the ends of the range."""
    if scheme.symmetric:
        narrowest, steps = NARROWEST, STEPS[scheme.bits]
        if scheme.levels <= FEW_LEVELS:
            narrowest, steps = NARROWEST_OF_FEW, 2 * steps
        for factor in torch.linspace(narrowest, WIDEST, steps).tolist():
            for scale, zero in _min_max(low * factor, high * factor, scheme, others=True):
                yield torch.where(scale == 0, 1.0, scale), zero
        return
    low, high = low.clamp(max=0), high.clamp(min=0)
    factors = torch.linspace(NARROWEST, 1.0, STEPS[scheme.bits] // 3).tolist()
    for lower in factors:
        for upper in factors:
            yield _asymmetric(low * lower, high * upper, scheme)


def _search(groups: Tensor, low: Tensor, high: Tensor, scheme: QuantScheme, weight: Tensor | None) -> list[Grid]:
    """The two candidates whose codes, each with the best scale for them, come closest.

    For units ``u`` the best scale is ``<g, u> / <u, u>``, and it leaves ``<g, g> - <g, u>^2 / <u, u>`` of the squared
    error: so each candidate is judged as if refitted, without computing the rounded weights. That difference of two
    large numbers has few digits, too few to tell the best from the next: so the caller compares these two once more.
    """
    weighted = groups if weight is None else groups * weight
    nothing = torch.full_like(low, constant_zero(scheme) if scheme.symmetric else 0.0)
    first = second = torch.stack((torch.full_like(low, -torch.inf), torch.ones_like(low), nothing))
    for tried, offset in _candidates(low, high, scheme):
        units = _nearest_units(groups, tried[..., None], offset[..., None], scheme)
        along = (weighted * units).sum(-1)
        units.square_()
        length = units.sum(-1) if weight is None else (units * weight).sum(-1)
        fitted = torch.where(length > 0, along / length, tried)
        gain = along * fitted
        if not scheme.symmetric:
            gain = torch.where(fitted > 0, gain, -torch.inf)
        found = torch.stack((gain, fitted, offset))
        # The same codes again have the same scale, to the bit, but for its sign.
        second = torch.where((gain > second[0]) & (fitted.abs() != first[1].abs()), found, second)
        second, first = (torch.where(gain > first[0], new, old) for new, old in ((first, second), (found, first)))
    return [Grid(storable(scale, scheme), zero) for _, scale, zero in (first, second)]


def _nearest_units(groups: Tensor, scale: Tensor, zero: Tensor, scheme: QuantScheme) -> Tensor:
    """What the nearest codes stand for before scaling, but for ties: one pass less over the weights than in full."""
    if scheme.codebook is not None:
        return unit_values(nearest_codes(groups, scale, zero, scheme), zero, scheme)
    return (groups * scale.reciprocal()).round_().clamp_(-zero, scheme.levels - 1 - zero)


class _Best:
    """The best grid seen so far for each group, by its squared error as files hold it."""

    def __init__(self, groups: Tensor, scheme: QuantScheme, weight: Tensor | None) -> None:
        self.groups, self.scheme, self.weight = groups, scheme, weight
        self.error = torch.full(groups.shape[:-1], torch.inf)
        self.scale = torch.ones(groups.shape[:-1])
        self.zero = torch.full(groups.shape[:-1], constant_zero(scheme) if scheme.symmetric else 0.0)

    def offer(self, grid: Grid) -> None:
        """Take ``grid`` for the groups where it has the lower error."""
        codes = codes_of(self.groups, grid, self.scheme)
        values = values_of(codes, grid.scale[..., None], grid.zero[..., None], self.scheme)
        square = values.sub_(self.groups).square_()
        error = square.sum(-1) if self.weight is None else (square * self.weight).sum(-1)
        # Never true for a scale or minimum beyond fp16: infinity times 0 is not a number.
        better = (error < self.error) & ((grid.zero * grid.scale).abs() <= FP16_MAX)
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, grid.scale, self.scale)
        self.zero = torch.where(better, grid.zero, self.zero)

    def offer_neighbours(self) -> None:
        """Try the scales and the zero points next to the best."""
        for step in (-1, 1):
            self.offer(Grid(self.scale, (self.zero + step).clamp_(0, self.scheme.levels - 1)))
            self.offer(
                Grid(
                    storable(self.scale * (1 + step * 2.0 ** -asymmetric_mantissa(self.scheme)), self.scheme), self.zero
                )
            )

    def refitted(self) -> Grid:
        """Least-squares scales for the codes that the best grid gives."""
        best = Grid(self.scale, self.zero)
        centred = unit_values(codes_of(self.groups, best, self.scheme), self.zero[..., None], self.scheme)
        weighted = centred if self.weight is None else centred * self.weight
        top, bottom = (weighted * self.groups).sum(-1), (weighted * centred).sum(-1)
        fitted = torch.where(bottom > 0, top / bottom, self.scale)
        return Grid(usable_scale(fitted, self.scale, self.scheme), self.zero)


def split_groups(weight: Tensor, scheme: QuantScheme) -> Tensor:
    """``[rows, columns]`` as ``[rows, groups, width]``, the last group filled up with zeros."""
    rows, columns = weight.shape
    groups, width = scheme.groups(columns), scheme.width(columns)
    padded = torch.nn.functional.pad(weight, (0, groups * width - columns))
    return padded.view(rows, groups, width)


def round_to_nearest(
    weight: Tensor, scheme: QuantScheme, importance: Tensor | None = None, search: bool = True, layer: str = ""
) -> QuantizedTensor:
    """Quantise float32 ``weight [out, in]``, each weight on its own, on the grid of :func:`grid_of`."""
    grid = grid_of(weight, scheme, importance, search, layer)
    codes = codes_of(split_groups(weight, scheme), grid, scheme).view(weight.shape[0], -1)[:, : weight.shape[1]]
    return assemble(codes, grid, scheme)


def grid_of(
    weight: Tensor, scheme: QuantScheme, importance: Tensor | None = None, search: bool = True, layer: str = ""
) -> Grid:
    """The grid for float32 ``weight [out, in]``; ``importance [in]`` weighs the scale search.

    InputError, naming ``layer``, for weights that are not finite or too large for fp16 scales, and for a width that
    super-blocks don't divide.
    """
    largest = float(torch.linalg.vector_norm(weight, torch.inf))
    if not largest <= MAX_WEIGHT:
        raise InputError(
            f"weights up to {largest:g}; scales are fp16 numbers, which serve weights up to {MAX_WEIGHT:g}",
            where=layer,
            fix="leave the layer in floating point with ignore: [...]",
        )
    if scheme.two_level is not None and weight.shape[1] % SUPER_BLOCK:
        raise InputError(
            f"{scheme} shares numbers over {SUPER_BLOCK} inputs, and {weight.shape[1]} is no multiple of them",
            where=layer,
            fix="give the layer a scheme with groups of 32",
        )
    if importance is not None:
        importance = split_groups(importance[None], scheme)[0]
    return fit_groups(split_groups(weight, scheme), scheme, importance, search)


def output_power(weight: Tensor, gram: Tensor) -> float:
    """``tr(W G WT)``: the squared norm of the layer's output over the inputs that the Gram matrix ``G`` sums up."""
    return float(((weight @ gram) * weight).sum())


def output_error(weight: Tensor, quantized: Tensor, gram: Tensor, power: float | None = None) -> float:
    """Squared error of the layer's output over its calibration inputs, relative to the output's power.

    ``tr(E G ET) / tr(W G WT)`` for the error ``E = quantized - weight`` and the Gram matrix ``G`` of the inputs.
    ``power`` is the latter, if known.
    """
    power = output_power(weight, gram) if power is None else power
    return output_power(quantized - weight, gram) / power if power > 0 else 0.0
