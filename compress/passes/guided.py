"""Kim et al., "GuidedQuant: Large Language Model Quantization via Exploiting End Loss Guidance", ICML 2025.

An error in a layer's output costs what the loss makes of it, and that differs from token to token. Each token counts in
the statistics of a layer's inputs with the squared norm of the loss gradient at the layer's output (sec. 3.2, with one
group of outputs): the passes then lower what an error does to the model's predictions, not its plain size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.protocols import Resource
from compress.report import PassRecord

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calibration.stats import InputStats
    from compress.gradients import Back
    from compress.models.topology import DecoderSpec
    from compress.scheme import QuantScheme
    from compress.session import Session

HALF = 0.5


@dataclass(frozen=True)
class Guided:
    """Weigh each calibration token by what an error at that token would do to the model's predictions.

    Layers that read the same input share one weight, the sum of theirs. A routed expert's tokens count with the
    gradient at the experts' common output, times the squared weight that the router gave the expert. Of the embedding's
    rows it finds how fast the loss rises with their errors, whether or not they are the head's too.
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
        """Fill ``session.token_weights`` and ``session.row_gram``."""
        from calibration.stats import InputStats
        from compress.gradients import EMBEDDING, HEAD, sweep_back, watched

        started = time.perf_counter()
        spec, weights = session.decoder.spec, session.token_weights
        rows = InputStats(spec.hidden_size)
        for index, module, back in sweep_back(session, len(session.tokens), "token weights"):
            if index == EMBEDDING:
                # What goes back ends at its output.
                module.requires_grad_(False)
                with watched(module, lambda _, gradient: rows.update(gradient)):
                    back()
            elif index == HEAD:
                weights[spec.family.head] = _head_weights(session, module, back, rows)
            else:
                weights |= _block_weights(session, index, module, back)
        session.row_gram[spec.family.embedding] = rows.gram
        spread = [_half_share(found[found > 0]) for found in weights.values()]
        summary = {"inputs": len(spread), "half_of_the_weight_on": sum(spread) / max(len(spread), 1)}
        return PassRecord("guided", {}, time.perf_counter() - started, summary=summary)


def _block_weights(session: Session, index: int, module: nn.Module, back: Back) -> dict[str, Tensor]:
    """Name -> squared norm of the loss gradient at the output, float32 [windows, length], of block ``index``.

    The name is that of the first of the layers that read one input, or of the module that holds a block's experts.
    """
    import torch

    from compress.gradients import watched

    found: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks:
        for name, part in _watched(session.decoder.spec, index, module):
            hooks.enter_context(watched(part, _keep(found.setdefault(name, []))))
        back()
    # In each window the layers that read one input came one after another.
    windows, length = session.tokens.shape
    return {
        name: torch.stack([part.reshape(-1) for part in kept]).view(windows, -1, length).sum(1)
        for name, kept in found.items()
    }


def _head_weights(session: Session, module: nn.Module, back: Back, rows: InputStats) -> Tensor:
    """The same of the head. What a tied one multiplies goes into ``rows`` with these weights, as does its curvature.

    Of the Fisher information of row v, (p - y)_v^2 x xT over tokens, that is the mean over rows, times their number;
    and so is g gT of the embedding, for gradients g at its output: what is added to the loss by a row of both is a sum.
    """
    import torch

    from compress.gradients import watched

    kept: list[Tensor] = []

    def take(inputs: Tensor, gradient: Tensor) -> None:
        kept.append(gradient.square().sum(-1).reshape(-1))
        if session.decoder.spec.tied:
            rows.update(inputs, kept[-1])

    with watched(module, take):
        back()
    return torch.cat(kept).view(session.tokens.shape)


def _keep(kept: list[Tensor]) -> Callable[[Tensor, Tensor], None]:
    return lambda _, gradient: kept.append(gradient.float().square().sum(-1))


def _watched(spec: DecoderSpec, index: int, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name of the weights, module whose output's gradient they come from) of block ``index``."""
    block = spec.family.block.format(index=index)
    for layers in spec.shared_inputs(index):
        for layer in layers:
            yield layers[0], module.get_submodule(layer.removeprefix(f"{block}."))
    if spec.expert_linears(index):
        assert spec.family.experts is not None
        yield f"{block}.{spec.family.experts.module}", module.get_submodule(spec.family.experts.module)


def _half_share(weights: Tensor) -> float:
    """The share of tokens that carries half of the weight: 0.5 if all are alike."""
    ordered = weights.flatten().sort(descending=True).values.cumsum(0)
    return float((ordered < HALF * ordered[-1]).double().mean()) if len(ordered) else 0.0
