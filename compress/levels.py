"""The grid of a weight: what codes stand for under it, the nearest codes to numbers, and which scales files hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.codebook import nearest_code
from compress.scheme import POWERS_OF_TWO, BlockType, QuantScheme
from compress.tensor import QuantizedTensor, unit_values

FP16_STEP = 2.0**-24
"""The smallest positive fp16 number: every fp16 number is a multiple of it."""
FP16_MAX = 65504.0
SMALLEST_EXPONENT = -64
"""Of a power of two: far below any weight that matters, far above where float32 gets coarse."""


@dataclass(frozen=True)
class Grid:
    """``scale`` and ``zero`` float32 [rows, groups]; ``zero`` holds integers, the midpoint where symmetric.

    With minima ``zero`` holds the minimum itself, which is taken off the product. A codebook has no zero points: there
    ``zero`` is 0 and nobody reads it. Where scales have two levels, ``d`` and ``dmin`` float32 [rows, super-blocks]
    are the fp16 numbers of which scales and minima are multiples; ``dmin`` is 1 without minima.
    """

    scale: Tensor
    zero: Tensor
    d: Tensor | None = None
    dmin: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Grid:
        """The same with every part changed."""
        shared = (None if part is None else change(part) for part in (self.d, self.dmin))
        return Grid(change(self.scale), change(self.zero), *shared)


def constant_zero(scheme: QuantScheme) -> float:
    """The ``zero`` of a symmetric scheme's grid, and the first of an asymmetric one."""
    return float(scheme.midpoint) if scheme.symmetric and scheme.codebook is None else 0.0


def positions(values: Tensor, scale: Tensor, zero: Tensor, scheme: QuantScheme) -> Tensor:
    """Codes before rounding, of a scheme that has no codebook."""
    return (values + zero) / scale if scheme.has_minima else values / scale + zero


def nearest_codes(values: Tensor, scale: Tensor, zero: Tensor, scheme: QuantScheme) -> Tensor:
    """Nearest codes, float32, of ``values`` under a ``scale`` and ``zero`` that broadcast to them."""
    if scheme.codebook is not None:
        return nearest_code(values / scale, scheme.codebook)
    return torch.round(positions(values, scale, zero, scheme)).clamp_(0, scheme.levels - 1)


def values_of(codes: Tensor, scale: Tensor, zero: Tensor, scheme: QuantScheme) -> Tensor:
    """What float ``codes`` stand for, float32: the inverse of :func:`nearest_codes` up to rounding."""
    values = unit_values(codes, zero, scheme).mul_(scale)
    return values.sub_(zero) if scheme.has_minima else values


def codes_of(groups: Tensor, grid: Grid, scheme: QuantScheme) -> Tensor:
    """Nearest codes, float32, of ``groups [rows, groups, width]``."""
    return nearest_codes(groups, grid.scale[..., None], grid.zero[..., None], scheme)


def asymmetric_mantissa(scheme: QuantScheme) -> int:
    """Significant bits of a scale that is to be multiplied by an integer zero point, and stay an fp16 number.

    Not with codes of 8 bits, whose minima no file stores.
    """
    return 6 if scheme.bits == 5 else 7


def storable(scale: Tensor, scheme: QuantScheme) -> Tensor:
    """The nearest scales that files hold exactly; zero (an all-zero group) becomes 1, too large becomes infinity.

    Symmetric: fp16. Asymmetric: 7 significant bits (6 for codes of 5 bits) and a multiple of 2^-24, so that
    ``zero * scale`` is exact in fp16 as well, as formats that store the minimum need
    (docs/decisions/gguf-asymmetric-scales.md). Of some codebooks: the power of two nearest by ratio.
    """
    if scheme.codebook in POWERS_OF_TWO:
        return torch.where(scale > 0, torch.exp2(torch.round(torch.log2(scale)).clamp(min=SMALLEST_EXPONENT)), 1.0)
    if scheme.symmetric or scheme.has_minima:
        rounded = scale.to(torch.float16).to(torch.float32)
    else:
        _, exponent = torch.frexp(scale)
        step = torch.exp2((exponent - asymmetric_mantissa(scheme)).to(torch.float32)).clamp(min=FP16_STEP)
        rounded = torch.round(scale / step) * step
        rounded = torch.where(rounded <= FP16_MAX, rounded, torch.inf)
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


def usable_scale(fitted: Tensor, otherwise: Tensor, scheme: QuantScheme) -> Tensor:
    """``fitted`` as files hold it; ``otherwise`` where it is too small for that, too large, or has a sign too many."""
    size = fitted.abs()
    usable = (size >= FP16_STEP) & (size <= FP16_MAX)
    if not scheme.symmetric or scheme.codebook in POWERS_OF_TWO:
        usable &= fitted > 0
    return storable(torch.where(usable, fitted, otherwise), scheme)


def half(values: Tensor) -> Tensor:
    """The nearest fp16 numbers that are neither 0 nor infinite."""
    rounded = values.clamp(-FP16_MAX, FP16_MAX).to(torch.float16).to(torch.float32)
    return torch.where(rounded == 0, FP16_STEP, rounded)


def whole_scales(scale: Tensor, d: Tensor, blocks: BlockType) -> Tensor:
    """The whole numbers, of those that a block holds, whose products with ``d`` are nearest to ``scale``; never 0.

    Under a scale of 0 all codes are alike: the middle code of another says as much, and one can divide by it.
    """
    whole = torch.round(scale / d).clamp_(*blocks.scale_range)
    return torch.where(whole == 0, 1.0, whole)


def whole_minima(minimum: Tensor, dmin: Tensor, blocks: BlockType) -> Tensor:
    """The same for minima, of which 0 is one."""
    return torch.round(minimum / dmin).clamp_(0, blocks.scale_range[1])


def assemble(codes: Tensor, grid: Grid, scheme: QuantScheme) -> QuantizedTensor:
    """A :class:`QuantizedTensor` from float codes [out, in] and a grid [out, groups]."""
    offset = None if scheme.symmetric else grid.zero
    minima = offset if scheme.has_minima else None
    zero = None if offset is None or scheme.has_minima else offset.to(torch.uint8)
    dmin = grid.dmin if scheme.has_minima else None
    return QuantizedTensor(scheme, codes.to(torch.uint8), grid.scale, zero, minima, grid.d, dmin)


def grid_in(quantized: QuantizedTensor) -> Grid:
    """The grid on which ``quantized`` lies."""
    offset = quantized.zero if quantized.minimum is None else quantized.minimum
    if offset is None:
        offset = torch.full_like(quantized.scale, constant_zero(quantized.scheme))
    return Grid(quantized.scale, offset.to(torch.float32), quantized.d, quantized.dmin)
