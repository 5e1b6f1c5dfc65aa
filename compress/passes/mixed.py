"""Mixed precision: which layers deserve more bits, measured on the model's own loss and solved exactly.

A layer's sensitivity to a scheme is the rise in KL divergence that its rounding errors cause, to second order: half
the sum of Fisher information times squared error, as in Dong et al. 2019 (HAWQ) and Kim et al. 2024 (SqueezeLLM). The
diagonal Fisher information comes from gradients of the loss for tokens drawn from the model's own predictions
(Kunstner et al. 2019, "Limitations of the empirical Fisher approximation", sec. 2). The choice is a knapsack: one
scheme a layer, bits under the target, least total divergence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.fields import ByteSize, plain
from compress.protocols import Resource
from compress.report import LayerRecord, PassRecord
from compress.scheme import QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

    from compress.session import Session


@dataclass(frozen=True)
class Mixed:
    """Choose one of ``choices`` for each layer, so that together they take no more than a target.

    Either ``target_bits``, the average over the linear layers of the decoder blocks (the embedding and the head are
    pinned apart); or ``target_size``, bytes of all matrices: then the embedding and the head are chosen for as well.
    What counts is what the recipe's artifacts hold, codes, scales and zero points, layers that are pinned or left in
    floating point too. Of several artifacts the one counts that takes most for a layer.
    ``samples`` calibration windows are used to measure sensitivity.
    """

    target_bits: float | None = None
    choices: tuple[QuantScheme, ...] = (QuantScheme(4, 32), QuantScheme(8, 32))
    samples: int = 6
    target_size: ByteSize | None = None

    scope: ClassVar[Literal["model"]] = "model"
    reads: ClassVar[frozenset[Resource]] = frozenset({"weights"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"plan"})

    def __post_init__(self) -> None:
        if len(set(self.choices)) < 2:
            raise ValueError("choices: give at least two different schemes")
        if self.samples < 1:
            raise ValueError(f"samples: {self.samples} is not at least 1")
        if (self.target_bits is None) == (self.target_size is None):
            raise ValueError("target_bits: give either target_bits or target_size")

    @property
    def plans_ends(self) -> bool:
        """Whether the embedding and the head are chosen for too."""
        return self.target_size is not None

    def check(self, session: Session) -> Sequence[str]:
        """Refuse a target below what the cheapest choice needs."""
        fixed, weights = self._fixed_bits(session)
        layers = self._free(session)
        if not layers:
            return ["mixed: the recipe fixes every layer: there is nothing to choose"]
        # A first, cheapest plan: exporters check it before any work.
        for layer in layers:
            session.plan[layer] = min(self.choices, key=partial(_bits, session, layer))
        least = fixed + sum(_bits(session, layer, session.plan[layer]) for layer in layers)
        if least <= self._budget(weights):
            return []
        # Rounded up: the number in the message must itself be reachable.
        if self.target_bits is None:
            asked = f"mixed.target_size: {self.target_size} bytes"
            shown = f"{-(-least // 8)}"
        else:
            asked = f"mixed.target_bits: {self.target_bits:g} bits a weight"
            shown = f"{math.ceil(Fraction(least, weights) * 1000) / 1000:.3f}"
        return [
            f"{asked} cannot be reached with {', '.join(map(str, self.choices))}: the least is {shown} "
            "(codes, scales, zero points, pinned layers)"
        ]

    def candidates(self, session: Session) -> list[dict[str, QuantScheme]]:
        """One plan a choice, with the layers that are pinned."""
        return [session.plan | dict.fromkeys(self._free(session), choice) for choice in self.choices]

    def kept_windows(self, samples: int) -> int:
        """The windows that sensitivity is measured on."""
        return min(self.samples, samples)

    def apply(self, session: Session) -> PassRecord:
        """Measure, solve, write the plan."""
        started = time.perf_counter()
        layers = self._free(session)
        loss = self._sensitivity(session, layers)
        fixed, weights = self._fixed_bits(session)
        bits = [[_bits(session, layer, choice) for choice in self.choices] for layer in layers]
        picked = self._picked(session, loss, dict(zip(layers, bits, strict=True)), self._budget(weights) - fixed)
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
            arguments=plain(self),
            seconds=time.perf_counter() - started,
            layers=records,
            summary={
                **self._target(),
                "achieved_bits": used / weights,
                "achieved_bytes": -(-used // 8),
                "windows": min(self.samples, len(session.tokens)),
                "layers_per_scheme": {str(c): picked.count(i) for i, c in enumerate(self.choices)},
                "predicted_kld": sum(loss[layer][choice] for layer, choice in zip(layers, picked, strict=True)),
                "predicted_kld_uniform": {
                    str(c): sum(loss[layer][i] for layer in layers) for i, c in enumerate(self.choices)
                },
            },
        )

    def _picked(
        self, session: Session, loss: Mapping[str, list[float]], bits: Mapping[str, list[int]], budget: int
    ) -> list[int]:
        """The choice for each layer; layers that must have one scheme are one item of the knapsack."""
        from compress.knapsack import solve

        together = {layer: tuple(layers) for layers in session.one_scheme for layer in layers}
        items: dict[tuple[str, ...], list[str]] = {}
        for layer in loss:
            items.setdefault(together.get(layer, (layer,)), []).append(layer)
        costs = [
            [sum(column) for column in zip(*(loss[layer] for layer in item), strict=True)] for item in items.values()
        ]
        sizes = [
            [sum(column) for column in zip(*(bits[layer] for layer in item), strict=True)] for item in items.values()
        ]
        chosen = zip(items.values(), solve(costs, sizes, budget), strict=True)
        choices = {layer: choice for item, choice in chosen for layer in item}
        return [choices[layer] for layer in loss]

    def _target(self) -> dict[str, float]:
        given = {"target_bits": self.target_bits, "target_size": self.target_size}
        return {name: value for name, value in given.items() if value is not None}

    def _counted(self, session: Session) -> list[str]:
        """The layers that the target is about."""
        return list(session.shapes) if self.plans_ends else list(session.decoder.spec.all_linears())

    def _free(self, session: Session) -> list[str]:
        counted = set(self._counted(session))
        return [layer for layer in session.free_layers() if layer in counted]

    def _budget(self, weights: int) -> int:
        """Bits that ``weights`` weights may take. The target is the decimal that the recipe says, not its float."""
        if self.target_size is not None:
            return 8 * self.target_size
        return math.floor(Fraction(str(self.target_bits)) * weights)

    def _fixed_bits(self, session: Session) -> tuple[int, int]:
        """(bits of the pinned layers, weights of all layers) that the target is about."""
        fixed = weights = 0
        for layer in self._counted(session):
            rows, columns = session.shapes[layer]
            weights += rows * columns
            if layer in session.pinned:
                fixed += _bits(session, layer, session.pinned[layer])
        return fixed, weights

    def _sensitivity(self, session: Session, layers: Sequence[str]) -> dict[str, list[float]]:
        """layer -> predicted KLD (nats a token) of rounding it by each choice."""
        from compress.grid import round_to_nearest

        loss: dict[str, list[float]] = {}
        for name, weight, fisher in fisher_information(session, self.samples, set(layers)):
            loss[name] = []
            for choice in self.choices:
                error = round_to_nearest(weight, choice, layer=name).dequantize() - weight
                loss[name].append(0.5 * float((fisher * error.square()).sum()))
        return {layer: loss[layer] for layer in layers}


def _bits(session: Session, layer: str, scheme: QuantScheme | None) -> int:
    beside = 0 if scheme is None else session.residual_bits(layer)
    return session.stored_bits(scheme, session.shapes[layer]) + beside


def fisher_information(session: Session, samples: int, wanted: set[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(layer, weight, diagonal Fisher information per token), float32 [out, in]: head, last block to first, embedding.

    The information of a window is the square of its whole gradient. A tied head and embedding are one layer, which
    comes last: what it costs as the one is added to what it costs as the other.
    """
    from compress.gradients import EMBEDDING, HEAD, sweep_back

    decoder, spec = session.decoder, session.decoder.spec
    real = session.count_tokens(samples)
    tied: list[Tensor] = []
    for index, module, back in sweep_back(session, samples, "sensitivity"):
        if index in (HEAD, EMBEDDING):
            layer = spec.ends[0 if index == EMBEDDING else -1]
            weight = module.get_parameter("weight").requires_grad_(layer in wanted)
            with _squared_gradients({layer: weight} if layer in wanted else {}, real) as fisher:
                if index == HEAD or layer in wanted:
                    back()
            weight.requires_grad_(False)
            if layer in wanted and spec.tied and index == HEAD:
                tied.append(fisher[layer])
            elif layer in wanted:
                yield layer, weight.detach(), fisher[layer] + tied.pop() if tied else fisher[layer]
            continue
        # The experts of a block are parts of one parameter.
        places = {layer: decoder.place(index, layer) for layer in decoder.spec.block_linears(index) if layer in wanted}
        names = dict.fromkeys(place.parameter for place in places.values())
        weights = {name: module.get_parameter(name).requires_grad_(True) for name in names}
        with _squared_gradients(weights, real) as fisher:
            back()
        for layer, place in places.items():
            yield layer, place.of(weights[place.parameter].detach()), place.of(fisher[place.parameter])


@contextmanager
def _squared_gradients(weights: Mapping[str, Tensor], tokens: int) -> Iterator[dict[str, Tensor]]:
    """What goes back while the context lasts: squared gradients by each of ``weights``, summed, over ``tokens``."""
    import torch

    fisher = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def square(name: str) -> Callable[[Tensor], None]:
        def take(weight: Tensor) -> None:
            # At once, so that only one gradient of a weight is in memory.
            found, weight.grad = weight.grad, None
            if found is not None:
                fisher[name].addcmul_(found, found, value=1.0 / tokens)

        return take

    handles = [weight.register_post_accumulate_grad_hook(square(name)) for name, weight in weights.items()]  # type: ignore[no-untyped-call]
    try:
        yield fisher
    finally:
        for handle in handles:
            handle.remove()
