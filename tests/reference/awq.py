"""AWQ as the paper's text has it: outputs of real inputs, one channel after the other, float64.

Lin et al. 2024, eq. 4 (the loss ``|Q(W diag(s)) diag(s)^-1 X - W X|``) and eq. 5 (the grid of exponents). Only the
rounding itself is the product's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.grid import round_to_nearest
from compress.scheme import QuantScheme


def channel_scales(
    inputs: Tensor, weights: Sequence[Tensor], schemes: Sequence[QuantScheme], channel_of: Sequence[int], alpha: float
) -> list[float]:
    """The scale of each channel; ``channel_of[i]`` is the channel that input column ``i`` belongs to."""
    input_sizes, weight_sizes = [], []
    for channel in range(max(channel_of) + 1):
        columns = [column for column, owner in enumerate(channel_of) if owner == channel]
        input_sizes.append(float(inputs[:, columns].double().square().mean().sqrt()))
        sizes = []
        for weight, scheme in zip(weights, schemes, strict=True):
            for column in columns:
                start = column - column % scheme.width(weight.shape[1])
                group = weight[:, start : start + scheme.width(weight.shape[1])].double().abs()
                sizes.append(weight[:, column].double().abs() / group.amax(dim=1))
        weight_sizes.append(float(torch.cat(sizes).mean()))
    raw = [x**alpha / w ** (1 - alpha) for x, w in zip(input_sizes, weight_sizes, strict=True)]
    centre = float(torch.tensor(raw, dtype=torch.float64).log().mean().exp())
    return [scale / centre for scale in raw]


def output_error(inputs: Tensor, weight: Tensor, scheme: QuantScheme, scale: Tensor) -> float:
    """Squared error of the outputs over their power, for inputs divided and weights multiplied by ``scale`` [in]."""
    given = inputs / scale
    rounded = round_to_nearest(weight * scale, scheme, given.square().mean(0)).dequantize()
    wanted = inputs.double() @ weight.double().T
    return float((given.double() @ rounded.double().T - wanted).square().sum() / wanted.square().sum())


def search(
    inputs: Tensor, weights: Sequence[Tensor], schemes: Sequence[QuantScheme], channel_of: Sequence[int], steps: int
) -> list[float]:
    """Sum of the layers' output errors without scales, and then for each of ``steps`` exponents from 0 to 1."""
    errors = [_total(inputs, weights, schemes, torch.ones(len(channel_of)))]
    for step in range(steps):
        scales = channel_scales(inputs, weights, schemes, channel_of, step / (steps - 1))
        errors.append(_total(inputs, weights, schemes, torch.tensor([scales[channel] for channel in channel_of])))
    return errors


def _total(inputs: Tensor, weights: Sequence[Tensor], schemes: Sequence[QuantScheme], scale: Tensor) -> float:
    return sum(output_error(inputs, w, scheme, scale) for w, scheme in zip(weights, schemes, strict=True))
