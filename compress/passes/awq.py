"""AWQ: Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression", MLSys 2024.

Input channels that matter are multiplied before rounding, and the layer before is divided by as much (sec. 3.2, eq. 4
and 5): the network computes the same, and what matters most is rounded most finely. The output error that chooses the
scales is exact here, from the Gram matrix of the inputs, and not sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.protocols import Resource
from compress.report import LayerRecord

if TYPE_CHECKING:
    from torch import Tensor

    from calibration.stats import InputStats
    from compress.models.folding import ScaleGroup
    from compress.session import Block, Session

SPREAD = 2.0**10
"""Scales lie between 1 / SPREAD and SPREAD; the geometric mean of those that are not clamped is 1."""
ROWS = 128
"""Rows of each layer on which exponents are tried; the best must then win on all rows."""


@dataclass(frozen=True)
class Awq:
    """Scale input channels so that those that matter are rounded finely; the model computes the same.

    For each set of layers with a common input, ``steps`` exponents ``a`` from 0 to 1 are tried, with scales
    ``x^a / w^(1 - a)`` from the sizes of inputs and weights. Where none lowers the output error nothing changes.
    """

    steps: int = 20

    scope: ClassVar[Literal["block"]] = "block"
    reads: ClassVar[frozenset[Resource]] = frozenset({"weights", "inputs", "plan"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"weights"})

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ValueError(f"steps: {self.steps} is not at least 2")

    def check(self, session: Session) -> Sequence[str]:
        """Nothing to complain about: every family has layers whose inputs can be scaled."""
        return []

    def apply(self, session: Session, block: Block) -> list[LayerRecord]:
        """Scale every group of the block that gains by it; one record for each layer that will be quantised."""
        from compress.models.folding import block_index, scale_groups

        spec = session.decoder.spec
        index = block_index(spec, block.name)
        if index is None:
            return []
        records = []
        for group in scale_groups(spec, index):
            layers = [layer for layer in group.readers if layer in session.plan]
            if layers:
                records += self._scale(session, block, group, layers)
        return records

    def _scale(self, session: Session, block: Block, group: ScaleGroup, layers: Sequence[str]) -> list[LayerRecord]:
        search = _Search(session, block, group, layers)
        before = search.errors(None)
        alpha, scale = search.best(self.steps)
        after = before if scale is None else search.errors(scale)
        # On all rows now: the search has seen some.
        if scale is not None and sum(after) < sum(before):
            fold(block, group, scale, session.decoder.spec.family.norm_offset)
        else:
            alpha, after = None, before
        return [
            LayerRecord(
                layer=layer,
                scheme=str(session.plan[layer]),
                bytes=session.stored_bits(session.plan[layer], session.shapes[layer]) // 8,
                tokens=block.inputs[layer].tokens,
                output_error=error,
                rounding_error=unscaled,
                alpha=alpha,
            )
            for layer, error, unscaled in zip(layers, after, before, strict=True)
        ]


class _Search:
    """The best scale for the layers of one group that will be quantised."""

    def __init__(self, session: Session, block: Block, group: ScaleGroup, layers: Sequence[str]) -> None:
        self.group, self.layers = group, layers
        self.schemes = [session.plan[layer] for layer in layers]
        self.stats = [block.inputs[layer] for layer in layers]
        self.weights = [block.weights[layer] for layer in layers]
        self.some_rows = [_some_rows(weight) for weight in self.weights]

    def best(self, steps: int) -> tuple[float | None, Tensor | None]:
        """(exponent, scale [channels]) with the least output error, on some rows of each layer; None: no scale."""
        import torch

        inputs, weights = self._input_sizes(), self._weight_sizes()
        least, alpha, scale = sum(self.errors(None, self.some_rows)), None, None
        for tried in torch.linspace(0, 1, steps).tolist():
            candidate = scale_of(inputs, weights, tried)
            error = sum(self.errors(candidate, self.some_rows))
            if error < least:
                least, alpha, scale = error, tried, candidate
        return alpha, scale

    def errors(self, scale: Tensor | None, weights: Sequence[Tensor] | None = None) -> list[float]:
        """Each layer's output error, relative to its output's power, of plain rounding under ``scale`` [channels].

        Infinite where the scaled weights are beyond what an fp16 scale serves.
        """
        import torch

        from compress.grid import MAX_WEIGHT, output_error, round_to_nearest

        found = []
        wanted = zip(self.layers, weights or self.weights, self.schemes, self.stats, strict=True)
        for layer, weight, scheme, stats in wanted:
            factor = torch.ones(weight.shape[1]) if scale is None else self.group.to_inputs(scale)
            scaled = weight * factor
            if scale is not None and float(scaled.abs().max()) > MAX_WEIGHT:
                return [float("inf")] * len(self.layers)
            rounded = round_to_nearest(scaled, scheme, stats.importance / factor.square(), layer=layer)
            found.append(output_error(weight, rounded.dequantize() / factor, stats.gram))
        return found

    def _input_sizes(self) -> Tensor:
        """Root mean square of the inputs, for each channel; every token of every expert counts."""
        import torch

        squares = torch.stack([stats.gram.diagonal() for stats in _distinct(self.stats)])
        mass = sum(stats.mass for stats in _distinct(self.stats))
        return (self.group.to_channels(squares.sum(0)) / (mass or 1.0)).sqrt()

    def _weight_sizes(self) -> Tensor:
        """Mean size of the weights, each relative to the largest of its group, for each channel."""
        import torch

        from compress.grid import split_groups

        relative = []
        for weight, scheme in zip(self.weights, self.schemes, strict=True):
            groups = split_groups(weight.abs(), scheme)
            largest = groups.amax(-1, keepdim=True)
            relative.append((groups / torch.where(largest > 0, largest, 1)).flatten(1)[:, : weight.shape[1]])
        return self.group.to_channels(torch.cat(relative).mean(0))


def scale_of(inputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """``inputs^alpha / weights^(1 - alpha)``, with a geometric mean of 1; channels where either is 0 keep a scale of 1.

    ``inputs`` and ``weights``: sizes, float32 [channels], not negative.
    """
    import torch

    alive = (inputs > 0) & (weights > 0)
    exponents = alpha * inputs[alive].log() - (1 - alpha) * weights[alive].log()
    scale = torch.ones_like(inputs)
    scale[alive] = (exponents - exponents.mean()).exp().clamp(1 / SPREAD, SPREAD)
    return scale


def fold(block: Block, group: ScaleGroup, scale: Tensor, norm_offset: float) -> None:
    """Multiply the inputs' channels in the readers by ``scale`` [channels], and divide what comes before.

    The statistics of the readers' inputs follow, so that later passes see those of the changed block.
    """
    factor = group.to_inputs(scale)
    for layer in group.readers:
        _replace_weight(block, layer, block.weights[layer] * factor)
    for layer in group.float_readers:
        _replace_dense(block, f"{layer}.weight", block.dense[f"{layer}.weight"] * factor)
    if group.norm is not None:
        name = f"{group.norm}.weight"
        _replace_dense(block, name, (block.dense[name] + norm_offset) / scale - norm_offset)
    if group.producer is not None:
        layer, rows = group.producer.layer, group.producer.rows
        weight = block.weights[layer].clone()
        weight[rows] /= scale[:, None]
        _replace_weight(block, layer, weight)
        if (bias := block.dense.get(f"{layer}.bias")) is not None:
            bias = bias.clone()
            bias[rows] /= scale
            _replace_dense(block, f"{layer}.bias", bias)
    for stats in _distinct(block.inputs[layer] for layer in group.readers):
        stats.rescale(1 / factor)


def _replace_weight(block: Block, layer: str, weight: Tensor) -> None:
    block.weights[layer] = weight
    block.changed.add(f"{layer}.weight")


def _replace_dense(block: Block, name: str, value: Tensor) -> None:
    block.dense[name] = value
    block.changed.add(name)


def _distinct(stats: Iterable[InputStats]) -> list[InputStats]:
    """Layers with the same input share one object."""
    return list({id(item): item for item in stats}.values())


def _some_rows(weight: Tensor) -> Tensor:
    """At most ROWS rows, evenly spread."""
    import torch

    return weight[torch.linspace(0, len(weight) - 1, min(ROWS, len(weight))).round().long()]
