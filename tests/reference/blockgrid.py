"""The best two-level grid of one super-block, by trying every whole number under many ``d`` and ``dmin``."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from compress.scheme import QuantScheme

FACTORS = [0.80 + 0.02 * step for step in range(16)]


def fp16(value: float) -> float:
    return float(torch.tensor(value).half())


def least_error(groups: Tensor, scheme: QuantScheme, weight: Tensor) -> float:
    """The least weighted squared error of ``groups`` [groups, width] found; ``weight`` [groups, width]."""
    blocks = scheme.two_level
    assert blocks is not None
    least, most = blocks.scale_range
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    if not blocks.minima:
        wholes = torch.tensor([whole for whole in range(least, most + 1) if whole], dtype=torch.float32)
        largest = float(groups.abs().max()) / scheme.midpoint / most
        return min(float(_errors(groups, fp16(f * largest) * wholes, 0.0, scheme, weight).sum()) for f in FACTORS)
    scales = torch.arange(least, most + 1, dtype=torch.float32)
    minima = torch.arange(0, most + 1, dtype=torch.float32)
    pairs = torch.cartesian_prod(scales, minima)
    d = float(((high - low) / (scheme.levels - 1)).max()) / most
    dmin = float(-low.min()) / most
    found = []
    for d_factor, dmin_factor in itertools.product(FACTORS[::3], FACTORS[::3]):
        scale, minimum = fp16(d_factor * d) * pairs[:, 0], fp16(dmin_factor * dmin) * pairs[:, 1]
        found.append(float(_errors(groups, scale, minimum, scheme, weight).sum()))
    return min(found)


def _errors(groups: Tensor, scale: Tensor, minimum: Tensor | float, scheme: QuantScheme, weight: Tensor) -> Tensor:
    """Of each group, with the best of the pairs of ``scale`` and ``minimum``."""
    least = []
    for group, counts in zip(groups, weight, strict=True):
        below = minimum[:, None] if isinstance(minimum, Tensor) else minimum
        middle = 0 if scheme.has_minima else scheme.midpoint
        codes = torch.round((group + below) / scale[:, None] + middle).clamp(0, scheme.levels - 1)
        values = (codes - middle) * scale[:, None] - below
        least.append(((values - group).square() * counts).sum(1).min())
    return torch.stack(least)
