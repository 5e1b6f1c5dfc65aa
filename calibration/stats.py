"""Statistics of what a layer is fed: the Gram matrix that GPTQ needs, and how many tokens it saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class InputStats:
    """``gram`` float32 [in, in]: the sum of x xT over every token x that reached the layer; ``tokens``: how many.

    GPTQ's Hessian (Frantar et al. 2023, eq. 2) is ``2 / tokens * gram``. Tokens are added in the order of the
    calibration set, so the sum is the same in every run. ``routed``: only tokens sent to an expert reach the layer.
    """

    def __init__(self, columns: int, routed: bool = False) -> None:
        self.gram = torch.zeros(columns, columns, dtype=torch.float32)
        self.tokens = 0
        self.routed = routed

    def update(self, inputs: Tensor) -> None:
        """Add inputs [..., in] of real tokens (no padding)."""
        flat = inputs.reshape(-1, inputs.shape[-1]).to(torch.float32)
        self.gram.addmm_(flat.T, flat)
        self.tokens += flat.shape[0]

    def rescale(self, factor: Tensor) -> None:
        """Make these the statistics of inputs multiplied by ``factor`` [in], channel by channel."""
        self.gram = self.gram * factor[:, None] * factor

    @property
    def hessian(self) -> Tensor:
        """float32 [in, in]: 2 / tokens * gram."""
        return self.gram * (2.0 / max(self.tokens, 1))

    @property
    def importance(self) -> Tensor:
        """float32 [in]: mean square of each input channel, the weight of its column's rounding error."""
        return self.gram.diagonal() / max(self.tokens, 1)


class RealTokens:
    """Leaves padding out of batches that come in the order of the calibration set, whatever their size.

    ``real``: bool [samples, length], False where a window is padded; None: every token is real.
    """

    def __init__(self, real: Tensor | None) -> None:
        self._real = None if real is None else real.flatten()
        self._next = 0

    def of(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Of tensors [..., width] with the same tokens, the rows [real tokens, width] of those that are real."""
        rows = tuple(tensor.reshape(-1, tensor.shape[-1]) for tensor in batch)
        if self._real is None:
            return rows
        start, self._next = self._next, self._next + len(rows[0])
        if self._next > len(self._real):
            raise ValueError(f"{self._next} tokens came, and the calibration set has {len(self._real)}")
        here = self._real[start : self._next]
        return tuple(tensor[here] for tensor in rows)


@contextmanager
def collect_inputs(
    modules: Mapping[str, nn.Linear], shared: Sequence[Sequence[str]], real: Tensor | None = None
) -> Iterator[dict[str, InputStats]]:
    """Gather statistics of what ``modules`` are fed while the context lasts: one pass over the calibration set.

    ``shared`` lists names that read the same input: those get one object, filled once. ``real`` is as for
    :class:`RealTokens`: padding enters no statistic. Yields name -> statistics.
    """
    found: dict[str, InputStats] = {}
    handles = []
    for names in shared:
        first = modules[names[0]]
        stats, tokens = InputStats(first.in_features), RealTokens(real)

        def hook(
            _: nn.Module, given: tuple[Tensor, ...], stats: InputStats = stats, tokens: RealTokens = tokens
        ) -> None:
            stats.update(*tokens.of(given[0]))

        handles.append(first.register_forward_pre_hook(hook))
        found.update(dict.fromkeys(names, stats))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def collect_expert_inputs(
    experts: nn.Module, layers: Sequence[Mapping[str, str]], real: Tensor | None = None
) -> Iterator[dict[str, InputStats]]:
    """Gather statistics of what each expert of a fused module is fed: the tokens routed to it and no others.

    ``experts`` is one of transformers' modules: it is called with hidden states [tokens, in], the chosen experts
    int64 [tokens, k] and their weights, and holds ``gate_up_proj`` [experts, 2 * middle, in] and ``act_fn``. ``layers``
    has, for each expert, the names of its roles gate, up and down. ``real`` is as for :class:`RealTokens`. Yields
    name -> statistics; gate and up share one object. What down is fed exists only inside the module's own loop, so it
    is computed here once more.
    """
    projections = experts.get_parameter("gate_up_proj")
    _, doubled, columns = projections.shape
    found: dict[str, InputStats] = {}
    for names in layers:
        entering = InputStats(columns, routed=True)
        found |= {
            names["gate"]: entering,
            names["up"]: entering,
            names["down"]: InputStats(doubled // 2, routed=True),
        }
    activation, tokens = experts.get_submodule("act_fn"), RealTokens(real)

    def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        hidden, chosen = tokens.of(*given[:2])
        for expert, names in enumerate(layers):
            routed = hidden[(chosen == expert).any(-1)]
            if len(routed):
                gate, up = nn.functional.linear(routed, projections[expert]).chunk(2, dim=-1)
                found[names["gate"]].update(routed)
                found[names["down"]].update(activation(gate) * up)

    handle = experts.register_forward_pre_hook(hook)
    try:
        yield found
    finally:
        handle.remove()
