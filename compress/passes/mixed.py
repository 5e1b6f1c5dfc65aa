"""Mixed precision: which layers deserve more bits, measured on the model's own loss and solved exactly.

A layer's sensitivity to a scheme is the rise in KL divergence that its rounding errors cause, to second order: half
the sum of Fisher information times squared error, as in Dong et al. 2019 (HAWQ) and Kim et al. 2024 (SqueezeLLM). The
diagonal Fisher information comes from gradients of the loss for tokens drawn from the model's own predictions
(Kunstner et al. 2019, "Limitations of the empirical Fisher approximation", sec. 2). The choice is a knapsack: one
scheme a layer, bits under the target, least total divergence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.protocols import Resource
from compress.report import LayerRecord, PassRecord
from compress.scheme import QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

    from compress.session import Session

FLOAT_BITS = 32
"""What a layer left in floating point counts for: the widest that an artifact stores."""


@dataclass(frozen=True)
class Mixed:
    """Choose one of ``choices`` for each layer, so that the average stays at or under ``target_bits``.

    The average is over the linear layers of the decoder blocks (the embedding and the head are pinned apart): codes,
    fp16 scales and packed zero points, pinned layers with the bits of their scheme, layers in floating point with 32.
    ``samples`` calibration windows are used to measure sensitivity.
    """

    target_bits: float
    choices: tuple[QuantScheme, ...] = (QuantScheme(4, 32), QuantScheme(8, 32))
    samples: int = 6

    scope: ClassVar[Literal["model"]] = "model"
    reads: ClassVar[frozenset[Resource]] = frozenset({"weights"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"plan"})

    def __post_init__(self) -> None:
        if len(set(self.choices)) < 2:
            raise ValueError("choices: give at least two different schemes")
        if self.samples < 1:
            raise ValueError(f"samples: {self.samples} is not at least 1")

    def check(self, session: Session) -> Sequence[str]:
        """Refuse a target below what the cheapest choice needs."""
        fixed, weights = self._fixed_bits(session)
        free = [session.shapes[layer] for layer in self._free(session)]
        least = (fixed + sum(min(c.stored_bits(shape) for c in self.choices) for shape in free)) / max(weights, 1)
        if least <= self.target_bits:
            # A first, cheapest plan: exporters check it before any work.
            for layer in self._free(session):
                session.plan[layer] = min(self.choices, key=lambda c: c.stored_bits(session.shapes[layer]))
            return []
        return [
            f"mixed.target_bits: {self.target_bits:g} bits a weight cannot be reached with "
            f"{', '.join(map(str, self.choices))}: the least is {least:.3f} (codes, scales, zero points, pinned layers)"
        ]

    def apply(self, session: Session) -> PassRecord:
        """Measure, solve, write the plan."""
        started = time.perf_counter()
        layers = self._free(session)
        loss = self._sensitivity(session, layers)
        fixed, weights = self._fixed_bits(session)
        bits = [[choice.stored_bits(session.shapes[layer]) for choice in self.choices] for layer in layers]
        budget = int(self.target_bits * weights) - fixed
        picked = solve([loss[layer] for layer in layers], bits, budget)
        for layer, choice in zip(layers, picked, strict=True):
            session.plan[layer] = self.choices[choice]
        used = fixed + sum(row[choice] for row, choice in zip(bits, picked, strict=True))
        schemes = [str(choice) for choice in self.choices]
        records = tuple(
            LayerRecord(
                layer, schemes[choice], row[choice] // 8, sensitivity=dict(zip(schemes, loss[layer], strict=True))
            )
            for layer, row, choice in zip(layers, bits, picked, strict=True)
        )
        return PassRecord(
            name="mixed",
            arguments={**asdict(self), "choices": [str(choice) for choice in self.choices]},
            seconds=time.perf_counter() - started,
            layers=records,
            summary={
                "target_bits": self.target_bits,
                "achieved_bits": used / weights,
                "layers_per_scheme": {str(c): picked.count(i) for i, c in enumerate(self.choices)},
                "predicted_kld": sum(loss[layer][choice] for layer, choice in zip(layers, picked, strict=True)),
                "predicted_kld_uniform": {
                    str(c): sum(loss[layer][i] for layer in layers) for i, c in enumerate(self.choices)
                },
            },
        )

    def _free(self, session: Session) -> list[str]:
        linears = set(session.decoder.spec.all_linears())
        return [layer for layer in session.free_layers() if layer in linears]

    def _fixed_bits(self, session: Session) -> tuple[int, int]:
        """(bits of the pinned linears, weights of all linears)."""
        fixed = weights = 0
        for layer in session.decoder.spec.all_linears():
            rows, columns = session.shapes[layer]
            weights += rows * columns
            if layer in session.pinned:
                scheme = session.pinned[layer]
                fixed += rows * columns * FLOAT_BITS if scheme is None else scheme.stored_bits((rows, columns))
        return fixed, weights

    def _sensitivity(self, session: Session, layers: Sequence[str]) -> dict[str, list[float]]:
        """layer -> predicted KLD (nats a token) of rounding it by each choice."""
        from compress.grid import round_to_nearest

        wanted, loss = set(layers), {}
        for name, weight, fisher in fisher_information(session, self.samples, wanted):
            loss[name] = [
                0.5 * float((fisher * (round_to_nearest(weight, choice).dequantize() - weight).square()).sum())
                for choice in self.choices
            ]
        return {layer: loss[layer] for layer in layers}


def solve(loss: Sequence[Sequence[float]], bits: Sequence[Sequence[int]], budget: int) -> list[int]:
    """The choice for each layer with the least total loss and total bits <= budget (mixed-integer program, exact)."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    layers, choices = len(loss), len(loss[0])
    cost = np.array(loss, dtype=np.float64).ravel()
    size = np.array(bits, dtype=np.float64).ravel()
    columns = np.arange(layers * choices)
    one_each = coo_array((np.ones(layers * choices), (columns // choices, columns)))
    found = milp(
        cost / max(cost.max(), 1e-300),
        integrality=np.ones(layers * choices),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            # Scaled to the budget: the solver's tolerances are absolute.
            LinearConstraint(size[None] / max(budget, 1), -np.inf, 1.0),
        ],
        options={"mip_rel_gap": 1e-6},
    )
    if found.x is None:
        raise ValueError(f"no choice of schemes fits {budget} bits")
    picked: list[int] = np.argmax(found.x.reshape(layers, choices), axis=1).tolist()
    return picked


def fisher_information(session: Session, samples: int, wanted: set[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(layer, weight, diagonal Fisher information per token), float32 [out, in], last block first.

    One sweep forward keeps each block's inputs; one sweep back turns them into weight gradients, window by window,
    since the information of a window is the square of its whole gradient. One block is in memory at a time.
    """
    import torch

    decoder, tokens = session.decoder, session.tokens[:samples]
    layers = decoder.spec.layers
    with session.progress("sensitivity", 2 * layers) as advance:
        hidden = decoder.embed(tokens)
        entering = []
        for index in range(layers):
            entering.append(hidden)
            with decoder.block(index) as module:
                hidden = decoder.run_block_on_all(index, module, hidden)
            advance(1)
        gradient = head_gradient(session, hidden)
        for index in reversed(range(layers)):
            tensors = decoder.block_tensors(index)
            inputs = entering.pop()
            with decoder.block(index, tensors) as module:
                prefix = decoder.spec.family.block.format(index=index) + "."
                weights = {
                    layer: module.get_parameter(f"{layer.removeprefix(prefix)}.weight").requires_grad_(True)
                    for layer in decoder.spec.block_linears(index)
                    if layer in wanted
                }
                fisher = {layer: torch.zeros_like(weight) for layer, weight in weights.items()}
                for window in range(len(tokens)):
                    entered = inputs[window : window + 1].requires_grad_(True)
                    left = decoder.run_block(index, module, entered)
                    leaves = [entered, *weights.values()]
                    entering_gradient, *found = torch.autograd.grad(left, leaves, gradient[window : window + 1])
                    for layer, part in zip(weights, found, strict=True):
                        fisher[layer].addcmul_(part, part, value=1.0 / tokens.numel())
                    gradient[window : window + 1] = entering_gradient
                for layer, weight in weights.items():
                    yield layer, weight.detach(), fisher[layer]
            advance(1)


def head_gradient(session: Session, hidden: Tensor) -> Tensor:
    """Gradient of -log p(drawn tokens) by the last block's outputs [windows, length, hidden]; drawn with the seed."""
    import torch

    generator = torch.Generator().manual_seed(session.seed)
    gradient = torch.empty_like(hidden)
    with session.decoder.head() as head:
        for window in range(len(hidden)):
            leaving = hidden[window : window + 1].detach().requires_grad_(True)
            log_p = torch.log_softmax(head(leaving)[0], -1)
            drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
            loss = -log_p.gather(1, drawn).sum()
            (gradient[window : window + 1],) = torch.autograd.grad(loss, [leaving])
    return gradient
