"""Choosing scales and zero points for groups of weights, and rounding weights to codes.

A group's scale is searched for the least importance-weighted squared rounding error, around the min/max scale, and
then refitted by least squares to the codes it gave (the closed form for ``w ~ scale * (code - zero)``).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.codebook import nearest_code
from compress.errors import InputError
from compress.scheme import QuantScheme
from compress.tensor import QuantizedTensor, unit_values

FP16_STEP = 2.0**-24
"""The smallest positive fp16 number: every fp16 number is a multiple of it."""
FP16_MAX = 65504.0
MAX_WEIGHT = 2.0**15
"""The largest weight taken: half of what fp16 holds, so that the minima of all groups are fp16 numbers."""
ASYMMETRIC_MANTISSA = 7
SEARCH_STEPS = 24
SEARCH_SPAN = (0.60, 1.05)
REFITS = 2
ROW_CHUNK = 1 << 18
"""Weights searched at a time: keeps the temporaries in cache-sized pieces."""


@dataclass(frozen=True)
class Grid:
    """``scale`` and ``zero`` float32 [rows, groups]; ``zero`` holds integers, the midpoint where symmetric.

    A codebook has no zero points: there ``zero`` is 0 and nobody reads it.
    """

    scale: Tensor
    zero: Tensor


def storable(scale: Tensor, scheme: QuantScheme) -> Tensor:
    """The nearest scales that files hold exactly; zero (an all-zero group) becomes 1, too large becomes infinity.

    Symmetric: fp16. Asymmetric: 7 significant bits and a multiple of 2^-24, so that ``zero * scale`` is exact in
    fp16 as well, as formats that store the minimum need (docs/decisions/gguf-asymmetric-scales.md).
    """
    if scheme.symmetric:
        rounded = scale.to(torch.float16).to(torch.float32)
    else:
        _, exponent = torch.frexp(scale)
        step = torch.exp2((exponent - ASYMMETRIC_MANTISSA).to(torch.float32)).clamp(min=FP16_STEP)
        rounded = torch.round(scale / step) * step
        rounded = torch.where(rounded <= FP16_MAX, rounded, torch.inf)
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


def codes_of(groups: Tensor, grid: Grid, scheme: QuantScheme) -> Tensor:
    """Nearest codes, float32, of ``groups [rows, groups, width]``."""
    return nearest_codes(groups, grid.scale[..., None], grid.zero[..., None], scheme)


def nearest_codes(values: Tensor, scale: Tensor, zero: Tensor, scheme: QuantScheme) -> Tensor:
    """Nearest codes, float32, of ``values`` under a ``scale`` and ``zero`` that broadcast to them."""
    if scheme.codebook is None:
        return torch.round(values / scale + zero).clamp_(0, scheme.levels - 1)
    return nearest_code(values / scale, scheme.codebook)


def values_of(codes: Tensor, scale: Tensor, zero: Tensor, scheme: QuantScheme) -> Tensor:
    """What float ``codes`` stand for, float32: the inverse of :func:`nearest_codes` up to rounding."""
    return unit_values(codes, zero, scheme).mul_(scale)


def fit_groups(groups: Tensor, scheme: QuantScheme, importance: Tensor | None = None, search: bool = True) -> Grid:
    """The grid for ``groups [rows, groups, width]``; ``importance [groups, width]`` (or [width]) weighs columns.

    Without ``search``, the min/max grid. With it, never a higher weighted error than the min/max grid.
    """
    # The order of summation follows the layout in memory.
    groups = groups.contiguous()
    importance = None if importance is None else importance.contiguous()
    chunks = torch.split(groups, max(1, ROW_CHUNK // max(1, groups[0].numel())))
    with one_thread() as threads, ThreadPoolExecutor(min(threads, len(chunks))) as pool:
        parts = list(pool.map(lambda part: _fit(part, scheme, importance, search), chunks))
    return Grid(torch.cat([p.scale for p in parts]), torch.cat([p.zero for p in parts]))


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


def _fit(groups: Tensor, scheme: QuantScheme, importance: Tensor | None, search: bool) -> Grid:
    low, high = groups.amin(-1), groups.amax(-1)
    if scheme.codebook is not None:
        # Its sides differ: with a negative scale they change places.
        largest = torch.maximum(high, -low)
        starts = [largest, -largest] if search else [largest]
    elif scheme.symmetric:
        # The lowest code reaches one step further than the highest: give it to the larger side, by the scale's sign.
        largest = torch.where(high > -low, high, low)
        starts = [-largest / scheme.midpoint]
        if search:
            starts.append(largest / scheme.midpoint)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        starts = [(high - low) / (scheme.levels - 1)]
    best = _Best(groups, scheme, importance)
    for start in starts:
        best.offer(_grid_of(start, low, scheme))
    if search:
        for start in starts:
            for factor in torch.linspace(*SEARCH_SPAN, SEARCH_STEPS).tolist():
                best.offer(_grid_of(start * factor, low * factor, scheme))
        for _ in range(REFITS):
            best.offer(best.refitted())
    return Grid(best.scale, best.zero)


def _grid_of(scale: Tensor, low: Tensor, scheme: QuantScheme) -> Grid:
    scale = storable(scale, scheme)
    if scheme.symmetric:
        return Grid(scale, torch.full_like(scale, constant_zero(scheme)))
    return Grid(scale, torch.round(-low / scale).clamp_(0, scheme.levels - 1))


def constant_zero(scheme: QuantScheme) -> float:
    """The ``zero`` of a symmetric scheme's grid."""
    return 0.0 if scheme.codebook is not None else float(scheme.midpoint)


class _Best:
    """The best grid seen so far for each group."""

    def __init__(self, groups: Tensor, scheme: QuantScheme, importance: Tensor | None) -> None:
        self.groups, self.scheme = groups, scheme
        self.weight = None if importance is None else importance.clamp(min=0)
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

    def refitted(self) -> Grid:
        """Least-squares scales for the codes that the best grid gives."""
        best = Grid(self.scale, self.zero)
        centred = unit_values(codes_of(self.groups, best, self.scheme), self.zero[..., None], self.scheme)
        weighted = centred if self.weight is None else centred * self.weight
        top, bottom = (weighted * self.groups).sum(-1), (weighted * centred).sum(-1)
        fitted = torch.where(bottom > 0, top / bottom, self.scale)
        usable = (fitted.abs() >= FP16_STEP) & ((fitted > 0) | torch.tensor(self.scheme.symmetric))
        return Grid(storable(torch.where(usable, fitted, self.scale), self.scheme), self.zero)


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

    InputError, naming ``layer``, for weights that are not finite or too large for fp16 scales.
    """
    largest = float(torch.linalg.vector_norm(weight, torch.inf))
    if not largest <= MAX_WEIGHT:
        raise InputError(
            f"weights up to {largest:g}; scales are fp16 numbers, which serve weights up to {MAX_WEIGHT:g}",
            where=layer,
            fix="leave the layer in floating point with ignore: [...]",
        )
    if importance is not None:
        importance = split_groups(importance[None], scheme)[0]
    return fit_groups(split_groups(weight, scheme), scheme, importance, search)


def assemble(codes: Tensor, grid: Grid, scheme: QuantScheme) -> QuantizedTensor:
    """A :class:`QuantizedTensor` from float codes [out, in] and a grid [out, groups]."""
    zero = None if scheme.symmetric else grid.zero.to(torch.uint8)
    return QuantizedTensor(scheme, codes.to(torch.uint8), grid.scale, zero)


def output_error(weight: Tensor, quantized: Tensor, gram: Tensor) -> float:
    """Squared error of the layer's output over its calibration inputs, relative to the output's power.

    ``tr(E G ET) / tr(W G WT)`` for the error ``E = quantized - weight`` and the Gram matrix ``G`` of the inputs.
    """
    error = quantized - weight
    power = float(((weight @ gram) * weight).sum())
    return float(((error @ gram) * error).sum()) / power if power > 0 else 0.0
