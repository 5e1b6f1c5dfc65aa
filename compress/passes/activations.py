"""Which layers lose most by 8-bit activations, measured on the model's own loss: those keep theirs in fp32.

The cost of a layer is the rise in KL divergence that rounding its inputs causes, to second order: half the sum of
(g . e)^2 over tokens, with e what rounding does to its outputs and g the loss gradient by them, for tokens drawn from
the model's predictions (Kunstner et al. 2019, "Limitations of the empirical Fisher approximation", sec. 2). Errors of
different tokens count as independent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
    from compress.gradients import sweep_back

    spec = session.decoder.spec
    real = session.tokens[:samples].numel() if session.real is None else int(session.real[:samples].sum())
    costs: dict[str, float] = {}
    for index, module, back in sweep_back(session, samples, "8-bit activations"):
        prefix = f"{spec.family.block.format(index=index)}."
        layers = [layer for layers in spec.shared_inputs(index) for layer in layers if _may_be_chosen(session, layer)]
        linears = {layer: module.get_submodule(layer.removeprefix(prefix)) for layer in layers}
        with _watched(session, linears) as found:
            back()
        costs |= {layer: 0.5 * cost / real for layer, cost in found.items()}
    return costs


def _may_be_chosen(session: Session, layer: str) -> bool:
    scheme = session.plan.get(layer)
    return scheme is not None and scheme.is_integer and scheme.bits == BITS


@contextmanager
def _watched(session: Session, linears: Mapping[str, nn.Module]) -> Iterator[dict[str, float]]:
    """Layer -> the sum over tokens of (g . e)^2 of what goes forward and back while the context lasts."""
    found = dict.fromkeys(linears, 0.0)

    def take(layer: str, error: Tensor, gradient: Tensor) -> None:
        found[layer] += float((gradient * error).sum(-1).double().square().sum())

    def forward(layer: str, module: Any, given: tuple[Tensor, ...], leaving: Tensor) -> None:
        inputs = given[0].detach()
        width = session.plan[layer].width(inputs.shape[-1])
        error = (round_rows(inputs, width) - inputs) @ module.weight.detach().T
        leaving.register_hook(partial(take, layer, error))  # type: ignore[no-untyped-call]

    handles = [linear.register_forward_hook(partial(forward, layer)) for layer, linear in linears.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def round_rows(inputs: Tensor, width: int) -> Tensor:
    """Activations float32 [..., in] as 8-bit numbers, each block of ``width`` of them with its own scale."""
    from torch.nn.functional import pad

    columns = inputs.shape[-1]
    padded = pad(inputs, (0, -columns % width))
    blocks = padded.view(*padded.shape[:-1], -1, width)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    rounded = (blocks / scale.clamp_min(1e-30)).round_() * scale
    return rounded.view(padded.shape)[..., :columns]
