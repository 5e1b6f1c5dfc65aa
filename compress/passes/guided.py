"""Kim et al., "GuidedQuant: Large Language Model Quantization via Exploiting End Loss Guidance", ICML 2025.

An error in a layer's output costs what the loss makes of it, and that differs from token to token. Each token counts in
the statistics of a layer's inputs with the squared norm of the loss gradient at the layer's output (sec. 3.2, with one
group of outputs): the passes then lower what an error does to the model's predictions, not its plain size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.protocols import Resource
from compress.report import PassRecord

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compress.models.topology import DecoderSpec
    from compress.scheme import QuantScheme
    from compress.session import Session

HALF = 0.5


@dataclass(frozen=True)
class Guided:
    """Weigh each calibration token by what an error at that token would do to the model's predictions.

    Layers that read the same input share one weight, the sum of theirs. A routed expert's tokens count with the
    gradient at the experts' common output, times the squared weight that the router gave the expert.
    """

    scope: ClassVar[Literal["model"]] = "model"
    reads: ClassVar[frozenset[Resource]] = frozenset({"weights"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"inputs"})
    plans_ends: ClassVar[bool] = False

    def check(self, session: Session) -> Sequence[str]:
        """Nothing to complain about: every family has gradients."""
        return []

    def candidates(self, session: Session) -> list[dict[str, QuantScheme]]:
        """None: this plans no scheme."""
        return []

    def kept_windows(self, samples: int) -> int:
        """All: a token without a weight could not be counted."""
        return samples

    def apply(self, session: Session) -> PassRecord:
        """Fill ``session.token_weights``."""
        started = time.perf_counter()
        session.token_weights.update(token_weights(session))
        spread = [_half_share(weights[weights > 0]) for weights in session.token_weights.values()]
        summary = {"inputs": len(spread), "half_of_the_weight_on": sum(spread) / max(len(spread), 1)}
        return PassRecord("guided", {}, time.perf_counter() - started, summary=summary)


def token_weights(session: Session) -> Iterator[tuple[str, Tensor]]:
    """(name, squared norm of the loss gradient at the output, float32 [windows, length]), last block first.

    The name is that of the first of the layers that read one input, or of the module that holds a block's experts.
    """
    import torch

    from compress.gradients import sweep_back

    spec = session.decoder.spec
    for index, module, back in sweep_back(session, len(session.tokens), "token weights"):
        found: dict[str, list[Tensor]] = {}
        with ExitStack() as hooks:
            for name, part in _watched(spec, index, module):
                hooks.callback(part.register_forward_hook(_keep(found.setdefault(name, []))).remove)
            back()
        for name, kept in found.items():
            # In each window the layers that read one input came one after another.
            windows, length = session.tokens.shape
            yield name, torch.stack([part.reshape(-1) for part in kept]).view(windows, -1, length).sum(1)


def _watched(spec: DecoderSpec, index: int, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name of the weights, module whose output's gradient they come from) of block ``index``."""
    block = spec.family.block.format(index=index)
    for layers in spec.shared_inputs(index):
        for layer in layers:
            yield layers[0], module.get_submodule(layer.removeprefix(f"{block}."))
    if spec.expert_linears(index):
        assert spec.family.experts is not None
        yield f"{block}.{spec.family.experts.module}", module.get_submodule(spec.family.experts.module)


def _keep(kept: list[Tensor]) -> Any:
    """A forward hook that notes the squared norms of the gradient at each output."""

    def hook(_: nn.Module, given: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: kept.append(gradient.square().sum(-1)))  # type: ignore[no-untyped-call]

    return hook


def _half_share(weights: Tensor) -> float:
    """The share of tokens that carries half of the weight: 0.5 if all are alike."""
    ordered = weights.flatten().sort(descending=True).values.cumsum(0)
    return float((ordered < HALF * ordered[-1]).double().mean()) if len(ordered) else 0.0
