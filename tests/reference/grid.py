"""The best grid of a group of weights, by trying every one that a file can hold."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.scheme import CODEBOOKS, QuantScheme


def fp16_numbers(low: float, high: float) -> Tensor:
    """Every positive fp16 number from ``low`` to ``high``, float32."""
    every = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    return every[(every >= low) & (every <= high)]


def has_significant_bits(value: float, bits: int) -> bool:
    """Whether ``value`` is an integer of at most ``bits`` bits times a power of two."""
    numerator, _ = value.as_integer_ratio()
    numerator = abs(numerator)
    while numerator and numerator % 2 == 0:
        numerator //= 2
    return bool(numerator < 2**bits)


def storable_scales(scheme: QuantScheme, largest: float) -> Tensor:
    """Scales worth trying for weights up to ``largest``: fp16; asymmetric ones with 7 significant bits."""
    if scheme.codebook is not None:
        scales = fp16_numbers(0.5 * largest, 1.3 * largest)
        return torch.cat([scales, -scales])
    span = largest / (scheme.midpoint if scheme.symmetric else scheme.levels - 1)
    scales = fp16_numbers(0.25 * span, 2.5 * span)
    if scheme.symmetric:
        return torch.cat([scales, -scales])
    return torch.tensor([s for s in scales.tolist() if has_significant_bits(s, 7)])


def least_error(group: Tensor, scheme: QuantScheme, importance: Tensor | None = None) -> float:
    """The least weighted squared rounding error of ``group`` [width] over all storable scales and zero points."""
    weight = torch.ones_like(group) if importance is None else importance
    scales = storable_scales(
        scheme, float(group.max() - group.min()) if not scheme.symmetric else float(group.abs().max())
    )
    best = float("inf")
    if scheme.codebook is not None:
        for scale in scales:
            # Every code's error for every weight, the least of each.
            error = (torch.tensor(CODEBOOKS[scheme.codebook])[:, None] * scale - group).square().amin(0) * weight
            best = min(best, float(error.sum()))
        return best
    zeros = [scheme.midpoint] if scheme.symmetric else range(scheme.levels)
    for zero in zeros:
        codes = torch.round(group / scales[:, None] + zero).clamp(0, scheme.levels - 1)
        error = (((codes - zero) * scales[:, None] - group).square() * weight).sum(-1)
        best = min(best, float(error.min()))
    return best
