"""Which tensors a file has, and which of the checkpoint's tensors each of them holds. The names are gguf-py's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from compress.models.topology import DecoderSpec, Family
from exporters.gguf.families import GGUF_FAMILIES

if TYPE_CHECKING:
    from gguf import TensorNameMap

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
HEAD_COUNTS: Mapping[str, str] = MappingProxyType({"attn_q": "head_count", "attn_k": "head_count_kv"})
"""Tensors whose rows llama.cpp may want permuted -> the key with their number of heads."""


@dataclass(frozen=True)
class Slot:
    """One tensor of the file.

    ``sources`` are the checkpoint's tensors in it; several are experts, stacked along a new first axis. ``layers`` are
    the layers whose weights they are, where those may be quantised. ``heads`` > 0: rows permuted within that many
    heads. ``offset`` is added to what the checkpoint has.
    """

    name: str
    sources: tuple[str, ...]
    layers: tuple[str, ...] = ()
    heads: int = 0
    offset: float = 0.0


@cache
def _names(architecture: str, blocks: int) -> TensorNameMap:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    return get_tensor_name_map(kinds[architecture], blocks)


def tensor_name(architecture: str, blocks: int, source: str) -> str | None:
    """Name in the file of a tensor of the checkpoint, one name for all experts; None if it has no place."""
    names = _names(architecture, blocks)
    name: str | None = names.get_name(_EXPERT.sub(".experts.", source), try_suffixes=(".weight", ".bias"))
    return name


def expert_number(layer: str) -> int | None:
    """Which expert a layer is of."""
    found = _EXPERT.search(layer)
    return None if found is None else int(found[1])


def any_expert(layer: str) -> str:
    """A layer of an expert as a pattern for all of them."""
    return _EXPERT.sub(".experts.*.", layer)


def head_key(architecture: str, name: str) -> str | None:
    """The key that counts the heads within which the rows of a tensor are permuted; None if they are as they were."""
    interleaved = any(row.interleaved for row in GGUF_FAMILIES.values() if row.architecture == architecture)
    return HEAD_COUNTS.get(name.split(".")[-2]) if interleaved else None


def gathered(architecture: str, blocks: int, layers: Iterable[str]) -> dict[str | None, tuple[str, ...]]:
    """Name of a weight in the file -> the layers that it holds; None -> those that have no place."""
    found: dict[str | None, tuple[str, ...]] = {}
    for layer in layers:
        name = tensor_name(architecture, blocks, f"{layer}.weight")
        found[name] = (*found.get(name, ()), layer)
    return found


def slots(spec: DecoderSpec, has_dense: Callable[[str], bool]) -> Iterator[Slot]:
    """Every tensor of the file in its order; biases where the checkpoint has them. KeyError if one has no place."""
    family = spec.family
    yield from _weights(spec, spec.ends[:1])
    yield _norm(spec, family.final_norm, family.norm_offset)
    yield from _weights(spec, spec.ends[1:])
    for index in range(spec.layers):
        block = family.block.format(index=index)
        for name in (*family.norms.values(), *family.head_norms.values()):
            yield _norm(spec, f"{block}.{name}", family.norm_offset)
        for slot in _weights(spec, spec.block_linears(index)):
            yield slot
            biases = tuple(f"{layer}.bias" for layer in slot.layers)
            if any(map(has_dense, biases)):
                yield Slot(_placed(spec, biases[0]), biases, heads=slot.heads)
        for layer in spec.float_linears():
            if layer.startswith(f"{block}."):
                yield _norm(spec, layer)


def _placed(spec: DecoderSpec, source: str) -> str:
    name = tensor_name(GGUF_FAMILIES[spec.family.name].architecture, spec.layers, source)
    if name is None:
        raise KeyError(source)
    return name


def _norm(spec: DecoderSpec, name: str, offset: float = 0.0) -> Slot:
    """A norm, or anything else that is one tensor in float32."""
    return Slot(_placed(spec, f"{name}.weight"), (f"{name}.weight",), offset=offset)


def _weights(spec: DecoderSpec, layers: Iterable[str]) -> Iterator[Slot]:
    architecture = GGUF_FAMILIES[spec.family.name].architecture
    heads = {"head_count": spec.heads, "head_count_kv": spec.kv_heads, None: 0}
    for name, held in gathered(architecture, spec.layers, layers).items():
        if name is None:
            raise KeyError(held[0])
        sources = tuple(f"{layer}.weight" for layer in held)
        yield Slot(name, sources, held, heads[head_key(architecture, name)])


def layers_by_tensor(family: Family, blocks: int, experts: int) -> dict[str | None, tuple[str, ...]]:
    """Name of a weight matrix in the file -> the layers that it holds, for every matrix that a file may hold."""
    layers = [family.embedding, family.head]
    for index in range(blocks):
        names = [*family.linears.values()]
        if family.experts is not None:
            routed = family.experts.linears.values()
            names += [name.format(expert=expert) for name in routed for expert in range(experts)]
            names += [*family.experts.shared.values(), family.experts.router]
            names += [family.experts.shared_gate] if family.experts.shared_gate else []
        layers += [f"{family.block.format(index=index)}.{name}" for name in names]
    return gathered(GGUF_FAMILIES[family.name].architecture, blocks, layers)
