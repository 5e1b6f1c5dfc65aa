"""Which layers lose most by 8-bit activations, measured on the model's own loss: those keep theirs in fp32.

The cost of a layer is the rise in KL divergence that rounding its inputs causes, to second order: half the sum of
(g . e)^2 over tokens, with e what rounding does to its outputs and g the loss gradient by them, for tokens drawn from
the model's predictions (Kunstner et al. 2019, "Limitations of the empirical Fisher approximation", sec. 2). Errors of
different tokens count as independent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.fields import plain
from compress.protocols import Resource
from compress.report import LayerRecord, PassRecord
from compress.scheme import QuantScheme

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compress.session import Session

BITS = 4
"""Of layers that may be chosen: with 2 and 8 the kernel for fp32 activations is many times slower."""
LARGEST = 127
"""Of an activation's 8 bits: each block of it has a scale that its largest number takes there (MLAS)."""


@dataclass(frozen=True)
class Activations:
    """Keep activations in fp32 in the 4-bit layers where that gains most for each weight, up to a ``share`` of weights.

    Costs are measured on the first ``samples`` calibration windows. For ONNX's MatMulNBits; other runtimes decide
    themselves. Routed experts are left out.
    """

    share: float = 0.03
    samples: int = 4

    scope: ClassVar[Literal["model"]] = "model"
    reads: ClassVar[frozenset[Resource]] = frozenset({"weights", "plan"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"levels"})
    plans_ends: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share: {self.share} is not above 0 and at most 1")
        if self.samples < 1:
            raise ValueError(f"samples: {self.samples} is not at least 1")

    def check(self, session: Session) -> Sequence[str]:
        """Nothing can be wrong before the layers have their schemes."""
        return []

    def candidates(self, session: Session) -> Sequence[Mapping[str, QuantScheme]]:
        """No plan of its own."""
        return []

    def kept_windows(self, samples: int) -> int:
        """The windows that costs are measured on."""
        return min(self.samples, samples)

    def apply(self, session: Session) -> PassRecord:
        """Measure, choose, and name the chosen in ``session.float_activations``."""
        import torch

        started = time.perf_counter()
        costs = activation_costs(session, self.samples)
        weights = {layer: rows * columns for layer, (rows, columns) in session.shapes.items()}
        room = self.share * sum(weights[layer] for layer in session.plan)
        chosen: list[str] = []
        for layer in sorted(costs, key=lambda layer: -costs[layer] / weights[layer]):
            if weights[layer] <= room:
                room -= weights[layer]
                chosen.append(layer)
        for layer in session.shapes:
            if layer in chosen:
                session.float_activations[layer] = torch.tensor(costs[layer])
        records = tuple(
            LayerRecord(
                layer,
                str(session.plan[layer]),
                session.stored_bits(session.plan[layer], session.shapes[layer]) // 8,
                sensitivity={"8-bit activations": costs[layer]},
            )
            for layer in session.shapes
            if layer in costs
        )
        return PassRecord(
            name="activations",
            arguments=plain(self),
            seconds=time.perf_counter() - started,
            layers=records,
            summary={
                "fp32_activations": list(session.float_activations),
                "share_of_weights": sum(weights[layer] for layer in chosen)
                / sum(weights[layer] for layer in session.plan),
                "predicted_kld": sum(costs.values()),
                "predicted_kld_left": sum(cost for layer, cost in costs.items() if layer not in chosen),
            },
        )


def activation_costs(session: Session, samples: int) -> dict[str, float]:
    """Linear layer planned in 4 bits -> predicted KLD (nats a token) of rounding its inputs to 8 bits."""
    from compress.gradients import sweep_back, watched

    spec = session.decoder.spec
    costs: dict[str, float] = {}
    for index, module, back in sweep_back(session, samples, "8-bit activations"):
        prefix = f"{spec.family.block.format(index=index)}."
        layers = [layer for layers in spec.shared_inputs(index) for layer in layers if _may_be_chosen(session, layer)]
        costs |= dict.fromkeys(layers, 0.0)
        with ExitStack() as hooks:
            for layer in layers:
                linear = module.get_submodule(layer.removeprefix(prefix))
                width = session.plan[layer].width(session.shapes[layer][1])
                hooks.enter_context(watched(linear, _cost(linear, width, costs, layer)))
            back()
    real = session.count_tokens(samples)
    return {layer: 0.5 * cost / real for layer, cost in costs.items()}


def _may_be_chosen(session: Session, layer: str) -> bool:
    scheme = session.plan.get(layer)
    return scheme is not None and scheme.is_integer and scheme.bits == BITS


def _cost(module: nn.Module, width: int, costs: dict[str, float], layer: str) -> Callable[[Tensor, Tensor], None]:
    """What adds (g . e)^2, summed over tokens, to the costs of ``layer``, from its inputs and the gradient."""

    def take(inputs: Tensor, gradient: Tensor) -> None:
        error = (round_rows(inputs, width) - inputs) @ module.get_parameter("weight").detach().T
        costs[layer] += float((gradient * error).sum(-1).double().square().sum())

    return take


def round_rows(inputs: Tensor, width: int) -> Tensor:
    """Activations float32 [..., in] as 8-bit numbers, each block of ``width`` of them with its own scale."""
    from torch.nn.functional import pad

    columns = inputs.shape[-1]
    padded = pad(inputs, (0, -columns % width))
    blocks = padded.view(*padded.shape[:-1], -1, width)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    rounded = (blocks / scale.clamp_min(1e-30)).round_() * scale
    return rounded.view(padded.shape)[..., :columns]
