"""Which weights read and write what inside a block: what a transform of the weights must change together.

All of it follows from the family's row (:mod:`compress.models.families`); names are those of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.models.topology import DecoderSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Output rows of a layer: all of them, or those of one part of a fused one."""

    layer: str
    start: int = 0
    stop: int | None = None

    @property
    def rows(self) -> slice:
        """To index the layer's weight or bias with."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class ScaleGroup:
    """Layers with a common input, and where the inverse of a scale on that input goes: a norm or the layer before.

    ``float_readers`` are those of the readers that are never quantised. Input channels may outnumber the channels that
    can be scaled: each value head is read by ``repeats`` query heads, ``head_size`` channels at a time.
    """

    readers: tuple[str, ...]
    float_readers: tuple[str, ...] = ()
    norm: str | None = None
    producer: Rows | None = None
    repeats: int = 1
    head_size: int = 1

    def to_channels(self, inputs: Tensor) -> Tensor:
        """Mean of ``inputs [in]`` over the input channels that share a scale; [channels]."""
        return inputs.view(-1, self.repeats, self.head_size).mean(1).reshape(-1)

    def to_inputs(self, scales: Tensor) -> Tensor:
        """``scales [channels]`` for each input channel; [in]."""
        return scales.view(-1, 1, self.head_size).expand(-1, self.repeats, -1).reshape(-1)


def block_index(spec: DecoderSpec, block: str) -> int | None:
    """The number of the decoder block called ``block``; None for the ends of the model."""
    return next((i for i in range(spec.layers) if spec.family.block.format(index=i) == block), None)


def scale_groups(spec: DecoderSpec, index: int) -> Iterator[ScaleGroup]:
    """Everything in block ``index`` that shares a scale, in the order in which data flow."""
    floats = set(spec.float_linears())
    for norm, readers in norm_readers(spec, index).items():
        kept = tuple(layer for layer in readers if layer in floats)
        yield ScaleGroup(tuple(layer for layer in readers if layer not in floats), kept, norm=norm)
        if norm == spec.norm(index, "attention"):
            yield _values(spec, index)
    if "attention" not in spec.family.norms:
        yield _values(spec, index)
    for layers in _feed_forwards(spec, index):
        yield ScaleGroup((layers["down"],), producer=_rows(spec, layers, "up"))


def norm_readers(spec: DecoderSpec, index: int) -> dict[str, tuple[str, ...]]:
    """Norm before a branch of block ``index`` -> every layer that reads what it puts out, floats included."""
    family, found = spec.family, {}
    if "attention" in family.norms:
        names = _attention(spec, index)
        found[spec.norm(index, "attention")] = tuple(name for role, name in names.items() if role != "o")
    if "feed_forward" in family.norms:
        branches = _feed_forwards(spec, index)
        readers = [name for layers in branches for role, name in layers.items() if role != "down"]
        prefix = f"{family.block.format(index=index)}."
        readers += [name for name in spec.float_linears() if name.startswith(prefix)]
        found[spec.norm(index, "feed_forward")] = tuple(readers)
    return found


def residual_writers(spec: DecoderSpec, index: int) -> tuple[str, ...]:
    """The layers of block ``index`` whose outputs are added to the residual stream; a norm may come in between."""
    return (spec.linear(index, "o"), *(layers["down"] for layers in _feed_forwards(spec, index)))


def value_rows(spec: DecoderSpec, index: int) -> Rows:
    """Where the value heads of block ``index`` come from."""
    return _rows(spec, _attention(spec, index), "v")


def _values(spec: DecoderSpec, index: int) -> ScaleGroup:
    repeats = spec.heads // spec.kv_heads
    reader, producer = spec.linear(index, "o"), value_rows(spec, index)
    return ScaleGroup((reader,), producer=producer, repeats=repeats, head_size=spec.head_dim)


def _attention(spec: DecoderSpec, index: int) -> dict[str, str]:
    """Role -> layer of the projections; fused ones under their own role."""
    wanted = {"q", "k", "v", "o"}
    return {role: spec.linear(index, role) for role in spec.family.linears if wanted & _parts(spec, role)}


def _feed_forwards(spec: DecoderSpec, index: int) -> list[dict[str, str]]:
    """Role -> layer of each feed-forward layer of the block: one, or one an expert and those that all tokens pass."""
    experts = spec.family.experts
    if experts is None or not spec.has_experts(index):
        wanted = {"gate", "up", "down"}
        return [{role: spec.linear(index, role) for role in spec.family.linears if wanted & _parts(spec, role)}]
    prefix = spec.family.block.format(index=index)
    shared = {role: f"{prefix}.{name}" for role, name in experts.shared.items()}
    return [*spec.expert_linears(index), *([shared] if shared else [])]


def _parts(spec: DecoderSpec, role: str) -> set[str]:
    return set(spec.family.fused.get(role, (role,)))


def _rows(spec: DecoderSpec, layers: dict[str, str], part: str) -> Rows:
    """Where the rows of ``part`` lie in ``layers`` (role -> name)."""
    role = next(role for role in layers if part in _parts(spec, role))
    heads = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
    start = 0
    for other in spec.family.fused.get(role, ()):
        stop = start + (heads[other] * spec.head_dim if other in heads else spec.intermediate_size)
        if other == part:
            return Rows(layers[role], start, stop)
        start = stop
    return Rows(layers[role])
