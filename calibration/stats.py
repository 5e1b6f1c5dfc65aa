"""Statistics of what a layer is fed: the Gram matrix that GPTQ needs, and how many tokens it saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn


class InputStats:
    """``gram`` float32 [in, in]: the sum of w x xT over every token x that reached the layer, each of weight w.

    ``tokens``: how many; ``mass``: the sum of their weights, which are 1 where nothing else is said. GPTQ's Hessian
    (Frantar et al. 2023, eq. 2) is ``2 / mass * gram``. Tokens are added in the order of the calibration set, so the
    sum is the same in every run. ``routed``: only tokens sent to an expert reach the layer.
    """

    def __init__(self, columns: int, routed: bool = False) -> None:
        self.gram = torch.zeros(columns, columns, dtype=torch.float32)
        self.tokens = 0
        self.mass = 0.0
        self.routed = routed

    @classmethod
    def of(cls, gram: Tensor, tokens: int) -> InputStats:
        """What was gathered elsewhere, over ``tokens`` tokens of weight 1."""
        stats = cls(len(gram))
        stats.gram, stats.tokens, stats.mass = gram, tokens, float(tokens)
        return stats

    def update(self, inputs: Tensor, weights: Tensor | None = None) -> None:
        """Add inputs [..., in] of real tokens (no padding), each of a weight float32 [...]."""
        flat = inputs.reshape(-1, inputs.shape[-1]).to(torch.float32)
        if weights is None:
            self.gram.addmm_(flat.T, flat)
            self.mass += flat.shape[0]
        else:
            weights = weights.reshape(-1)
            self.gram.addmm_(flat.T * weights, flat)
            self.mass += float(weights.double().sum())
        self.tokens += flat.shape[0]

    def rescale(self, factor: Tensor) -> None:
        """Make these the statistics of inputs multiplied by ``factor`` [in], channel by channel."""
        self.gram = self.gram * factor[:, None] * factor

    @property
    def hessian(self) -> Tensor:
        """float32 [in, in]: 2 / mass * gram."""
        return self.gram * (2.0 / self._divisor)

    @property
    def importance(self) -> Tensor:
        """float32 [in]: mean square of each input channel, the weight of its column's rounding error."""
        return self.gram.diagonal() / self._divisor

    @property
    def _divisor(self) -> float:
        return self.mass if self.mass > 0 else 1.0


class TokenFeed:
    """Takes batches in the order of the calibration set, whatever their size: leaves padding out, and adds weights.

    ``real``: bool [samples, length], False where a window is padded; None: every token is real. ``weights``: float32
    [samples, length], what each token counts; None: all count the same.
    """

    def __init__(self, real: Tensor | None, weights: Tensor | None = None) -> None:
        self._real = None if real is None else real.flatten()
        self._weights = None if weights is None else weights.flatten()
        self._next = 0

    def take(self, *batch: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The next batch, tensors [..., width] of the same tokens: rows [real tokens, width], and weights if any."""
        rows = tuple(tensor.reshape(-1, tensor.shape[-1]) for tensor in batch)
        start, self._next = self._next, self._next + len(rows[0])
        weights = None if self._weights is None else self._weights[start : self._next]
        for known in (self._real, self._weights):
            if known is not None and self._next > len(known):
                raise ValueError(f"{self._next} tokens came, and the calibration set has {len(known)}")
        if self._real is None:
            return rows, weights
        here = self._real[start : self._next]
        return tuple(tensor[here] for tensor in rows), None if weights is None else weights[here]


@contextmanager
def collect_inputs(
    modules: Mapping[str, nn.Linear],
    shared: Sequence[Sequence[str]],
    real: Tensor | None = None,
    weights: Mapping[str, Tensor] = MappingProxyType({}),
) -> Iterator[dict[str, InputStats]]:
    """Gather statistics of what ``modules`` are fed while the context lasts: one pass over the calibration set.

    ``shared`` lists names that read the same input: those get one object, filled once. ``real`` is as for
    :class:`TokenFeed`: padding enters no statistic. ``weights``: first name of such a list -> what its tokens count.
    Yields name -> statistics.
    """
    found: dict[str, InputStats] = {}
    handles = []
    for names in shared:
        first = modules[names[0]]
        stats, feed = InputStats(first.in_features), TokenFeed(real, weights.get(names[0]))

        def hook(_: nn.Module, given: tuple[Tensor, ...], stats: InputStats = stats, feed: TokenFeed = feed) -> None:
            (rows,), counts = feed.take(given[0])
            stats.update(rows, counts)

        handles.append(first.register_forward_pre_hook(hook))
        found.update(dict.fromkeys(names, stats))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def collect_expert_inputs(
    experts: nn.Module,
    layers: Sequence[Mapping[str, str]],
    real: Tensor | None = None,
    weights: Tensor | None = None,
) -> Iterator[dict[str, InputStats]]:
    """Gather statistics of what each expert of a fused module is fed: the tokens routed to it and no others.

    ``experts`` is one of transformers' modules: it is called with hidden states [tokens, in], the chosen experts
    int64 [tokens, k] and their weights, and holds ``gate_up_proj`` [experts, 2 * middle, in] and ``act_fn``. ``layers``
    has, for each expert, the names of its roles gate, up and down. ``real`` and ``weights`` are as for
    :class:`TokenFeed`; a token counts with the square of what the router gives the expert besides. Yields
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
    activation, feed = experts.get_submodule("act_fn"), TokenFeed(real, weights)

    def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        (hidden, chosen, shares), counts = feed.take(*given[:3])
        for expert, names in enumerate(layers):
            hits = chosen == expert
            here = hits.any(-1)
            if bool(here.any()):
                routed = hidden[here]
                gate, up = nn.functional.linear(routed, projections[expert]).chunk(2, dim=-1)
                count = None if counts is None else counts[here] * (shares * hits).sum(-1)[here].square()
                found[names["gate"]].update(routed, count)
                found[names["down"]].update(activation(gate) * up, count)

    handle = experts.register_forward_pre_hook(hook)
    try:
        yield found
    finally:
        handle.remove()
