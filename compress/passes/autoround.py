"""AutoRound: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", 2023.

Every weight of a block is rounded up or down, and every scale moved a little, so that the block as a whole puts out
what it did in floating point: errors of one layer are made up for by the others. The arithmetic of one weight is in
:mod:`compress.rounding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.protocols import Resource
from compress.report import LayerRecord
from compress.scheme import QuantScheme

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from compress.activations import Activations
    from compress.rounding import LearnedRounding
    from compress.session import Block, Session
    from compress.tensor import QuantizedTensor

CHECKS = 4
"""How often, evenly spread over the iterations, the error over all windows is taken; the best of these is kept."""
TINY = 1e-20


@dataclass(frozen=True)
class Autoround:
    """Learn how to round, block by block, by the sign of the gradient of the block's output error.

    ``scheme`` holds where no planner chose another. Each of ``iterations`` steps looks at ``samples`` calibration
    windows; the learning rate falls linearly to 0 from ``learning_rate``, of which None is 1 / iterations: every
    offset could then just reach the next code. ``search`` starts from searched scales, else from min/max.
    """

    scheme: QuantScheme = QuantScheme(4, 32)
    iterations: int = 100
    samples: int = 1
    learning_rate: float | None = None
    search: bool = True

    scope: ClassVar[Literal["block"]] = "block"
    reads: ClassVar[frozenset[Resource]] = frozenset({"weights", "inputs", "activations", "plan"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"quantized"})

    def __post_init__(self) -> None:
        for name in ("iterations", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not at least 1")
        if self.learning_rate is not None and not 0 < self.learning_rate <= 1:
            raise ValueError(f"learning_rate: {self.learning_rate} is not above 0 and at most 1")

    def check(self, session: Session) -> Sequence[str]:
        """Plan ``scheme`` for every layer that nobody planned."""
        session.plan_rest(self.scheme)
        return []

    def apply(self, session: Session, block: Block) -> list[LayerRecord]:
        """Quantise every planned layer of the block."""
        import torch

        from compress.models.folding import block_index

        roundings = dict(self._start(session, block))
        block.quantized.update({layer: rounding.stored() for layer, rounding in roundings.items()})
        index = block_index(session.decoder.spec, block.name)
        if index is None or not roundings:
            # An embedding or a head: there is no block around it whose output could be kept.
            return [_record(session, block, layer) for layer in roundings]
        # A generator of its own for every block: a block's result does not depend on how many were done before.
        generator = torch.Generator().manual_seed(session.seed * session.decoder.spec.layers + index)
        with closing(session.decoder.room(session.tokens)) as targets:
            search = _Search(block, roundings, generator, targets, session.real)
            before = search.error(block.quantized)
            after = self._learn(search, block, before)
        power = search.power
        return [_record(session, block, layer, before / power, after / power) for layer in roundings]

    def _start(self, session: Session, block: Block) -> Iterator[tuple[str, LearnedRounding]]:
        from compress.grid import grid_of
        from compress.rounding import LearnedRounding

        for layer, weight in block.weights.items():
            if (scheme := session.plan.get(layer)) is not None:
                stats = block.inputs.get(layer)
                importance = None if stats is None or stats.tokens == 0 else stats.importance
                grid = grid_of(weight, scheme, importance, self.search, layer)
                yield layer, LearnedRounding(weight, scheme, grid)

    def _learn(self, search: _Search, block: Block, least: float) -> float:
        """The least error found, below ``least``; what gave it is in ``block.quantized`` then."""
        first = self.learning_rate or 1 / self.iterations
        every = max(1, self.iterations // CHECKS)
        for iteration in range(self.iterations):
            search.step(self.samples, first * (1 - iteration / self.iterations))
            if (iteration + 1) % every == 0 or iteration + 1 == self.iterations:
                found = search.stored()
                error = search.error(found)
                if error < least:
                    least = error
                    block.quantized.update(found)
        return least


class _Search:
    """A block, what it puts out in floating point, and how its weights are rounded now."""

    def __init__(
        self,
        block: Block,
        roundings: Mapping[str, LearnedRounding],
        generator: Generator,
        targets: Activations,
        real: Tensor | None,
    ) -> None:
        import torch

        assert block.forward is not None
        assert block.entering is not None
        self.forward, self.roundings, self.generator = block.forward, roundings, generator
        self.entering, self.targets, self.real = block.entering, targets, real
        self.tensors = block.dense | {f"{layer}.weight": weight for layer, weight in block.weights.items()}
        self.power = 0.0
        """Of what the block adds to the hidden states: errors are reported relative to it."""
        with torch.no_grad():
            for window in range(len(self.entering)):
                here = slice(window, window + 1)
                hidden = self.entering[here]
                targets[here] = self.forward(self.tensors, hidden)
                self.power += float(self._distance(hidden, window))

    def _distance(self, found: Tensor, window: int) -> Tensor:
        """Of what left the block from what should have, over the real tokens of ``window``."""
        target = self.targets[window : window + 1]
        if self.real is not None:
            found, target = found[:, self.real[window]], target[:, self.real[window]]
        return distance(found, target)

    def stored(self) -> dict[str, QuantizedTensor]:
        """Every layer as it would be stored now."""
        return {layer: rounding.stored() for layer, rounding in self.roundings.items()}

    def error(self, quantized: Mapping[str, QuantizedTensor]) -> float:
        """Over all windows."""
        import torch

        tensors = self.tensors | {f"{layer}.weight": item.dequantize() for layer, item in quantized.items()}
        with torch.no_grad():
            return sum(
                float(self._distance(self.forward(tensors, self.entering[window : window + 1]), window))
                for window in range(len(self.entering))
            )

    def step(self, samples: int, rate: float) -> None:
        """One step against the sign of the gradient, on ``samples`` windows drawn without replacement."""
        import torch

        chosen = torch.randperm(len(self.entering), generator=self.generator)[:samples].tolist()
        leaves = {f"{layer}.weight": rounding.values().requires_grad_() for layer, rounding in self.roundings.items()}
        tensors, parameters = self.tensors | leaves, list(leaves.values())
        gradients: list[Tensor] = []
        # One window at a time: its activations are in memory, and no more.
        for window in chosen:
            left = self.forward(tensors, self.entering[window : window + 1])
            found = torch.autograd.grad(self._distance(left, window), parameters)
            gradients = [a + b for a, b in zip(gradients, found, strict=True)] if gradients else list(found)
        for rounding, gradient in zip(self.roundings.values(), gradients, strict=True):
            rounding.step(gradient, rate)


def distance(found: Tensor, target: Tensor) -> Tensor:
    """Sum over tokens of the squared error of ``found`` [..., hidden], relative to the power of ``target``.

    Relative, token by token, since the next block's norm brings every token to one size: a few tokens with huge hidden
    states would outweigh all others.
    """
    square, power = (found - target).square().mean(-1), target.square().mean(-1)
    return (square / power.clamp(min=TINY)).sum()


def _record(
    session: Session, block: Block, layer: str, before: float | None = None, after: float | None = None
) -> LayerRecord:
    """``before`` and ``after``: the block's error under plain rounding and as it is now."""
    scheme = session.plan[layer]
    stats = block.inputs.get(layer)
    tokens = 0 if stats is None else stats.tokens
    fallback = None
    if stats is not None and not tokens:
        fallback = "plain rounding: 0 tokens"
    elif before is not None and after == before and before > 0:
        fallback = f"plain rounding: no step lowered the block's error of {before:.3g}"
    bytes_ = session.stored_bits(scheme, session.shapes[layer]) // 8
    return LayerRecord(layer, str(scheme), bytes_, tokens, None, after, before, fallback)
