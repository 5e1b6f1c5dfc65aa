"""SignRound as the paper writes it: one fake-quantised weight, differentiated by autograd, every parameter by its sign.

Cheng et al. 2023, eq. 3 to 5 with the straight-through estimator. Group by group, in float64 but for the scales, which
are rounded to what files store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.levels import Grid, storable
from compress.rounding import LearnedRounding
from compress.scheme import CODEBOOKS, QuantScheme


@dataclass
class Learned:
    """The parameters of one weight [out, in]: an offset a weight, a gain and a shift a group."""

    weight: Tensor
    scheme: QuantScheme
    start: Grid
    offset: Tensor
    gain: Tensor
    shift: Tensor

    @classmethod
    def of(cls, rounding: LearnedRounding, weight: Tensor) -> Learned:
        """With the parameters that ``rounding`` has now."""
        offset = rounding.offset.reshape(len(weight), -1)[:, : weight.shape[1]]
        parameters = [item.double().clone() for item in (offset, rounding.gain, rounding.shift)]
        leaves = [item.requires_grad_() for item in parameters]
        return cls(weight.double(), rounding.scheme, rounding.start, *leaves)

    def parameters(self) -> list[Tensor]:
        return [self.offset, self.gain, self.shift]


def straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    """The value of ``rounded``, the gradient of ``exact``."""
    return exact + (rounded - exact).detach()


def fake_quantised(learned: Learned) -> Tensor:
    """The weight as it would be stored, float64 [out, in], differentiable by the parameters."""
    scheme, width, columns = learned.scheme, learned.scheme.width(learned.weight.shape[1]), learned.weight.shape[1]
    parts = []
    for group in range(learned.start.scale.shape[1]):
        here = slice(group * width, min((group + 1) * width, columns))
        wished = learned.start.scale[:, group].double() * (1 + learned.gain[:, group])
        scale = straight_through(wished, storable(wished.float(), scheme).double())[:, None]
        steps = learned.weight[:, here] / scale
        if scheme.codebook is not None:
            parts.append(_from_codebook(steps, learned.offset[:, here], scheme.codebook) * scale)
            continue
        zero = learned.start.zero[:, group].double()
        if not scheme.symmetric:
            shifted = (zero + learned.shift[:, group]).clamp(0, scheme.levels - 1)
            zero = straight_through(shifted, torch.round(shifted))
        position = steps + zero[:, None] + learned.offset[:, here]
        code = straight_through(position, torch.round(position)).clamp(0, scheme.levels - 1)
        parts.append((code - zero[:, None]) * scale)
    return torch.cat(parts, 1)


def _from_codebook(steps: Tensor, offset: Tensor, name: str) -> Tensor:
    """The value nearest to each number, pushed by ``offset`` times the mean distance of two values."""
    table = torch.tensor(CODEBOOKS[name], dtype=torch.float64)
    position = (steps + offset * float(table[-1] - table[0]) / (len(table) - 1)).clamp(table[0], table[-1])
    nearest = (position.detach()[..., None] - table).abs().argmin(-1)
    return straight_through(position, table[nearest])


def step(learned: Sequence[Learned], loss: Callable[[Sequence[Tensor]], Tensor], rate: float) -> None:
    """One step down ``loss`` of the weights, with the product's spans: offset, gain and shift."""
    parameters = [parameter for item in learned for parameter in item.parameters()]
    found = torch.autograd.grad(loss([fake_quantised(item) for item in learned]), parameters, allow_unused=True)
    with torch.no_grad():
        for number, gradient in enumerate(found):
            span = (0.5, 0.5, 1.0)[number % 3]
            if gradient is not None:
                parameters[number].sub_(2 * span * rate * gradient.sign()).clamp_(-span, span)
