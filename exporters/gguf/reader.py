"""A GGUF file read back: by gguf-py for the proof, and by its header alone for the listing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import CompressError
from compress.models.gguf.header import read_gguf
from compress.models.topology import FAMILIES
from compress.protocols import StoredTensor
from exporters.gguf.families import GGUF_FAMILIES
from exporters.gguf.tensors import expert_number, head_key, layers_by_tensor, tensor_name
from exporters.gguf.writer import interleaved_rows

if TYPE_CHECKING:
    from gguf import GGUFReader


def read_layers(path: Path, layers: Sequence[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """(layer, float32 [out, in] in the checkpoint's row order) of each of ``layers``; CompressError if one is missing.

    gguf-py parses the vocabulary token by token, which takes seconds: the file is opened once for all layers.
    """
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    architecture, blocks = _text(reader, "general.architecture"), _number(reader, "block_count")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = {layer: tensor_name(architecture, blocks, f"{layer}.weight") for layer in layers}
    missing = [layer for layer, name in names.items() if name not in tensors]
    if missing:
        raise CompressError(f"the file holds no tensor for {', '.join(missing)}", where=str(path))
    for layer, name in names.items():
        assert name is not None
        tensor, expert = tensors[name], expert_number(layer)
        weight = dequantize(tensor.data if expert is None else tensor.data[expert], tensor.tensor_type)
        key = head_key(architecture, name)
        if key is not None:
            order = interleaved_rows(weight.shape[0], _number(reader, f"attention.{key}"))
            weight = weight[np.argsort(order)]
        yield layer, weight


def _text(reader: GGUFReader, key: str) -> str:
    return str(reader.fields[key].contents())


def _number(reader: GGUFReader, key: str) -> int:
    return int(reader.fields[f"{_text(reader, 'general.architecture')}.{key}"].contents())


def stored_tensors(path: Path) -> Sequence[StoredTensor]:
    """Every tensor of the file, from its header, those of experts apart; InputError if the file is no GGUF file."""
    header = read_gguf(path, arrays=False)
    layers = _layers(header.metadata)
    found = []
    for name, tensor in header.tensors.items():
        shape, held = tensor.shape, layers.get(name, ())
        if len(shape) < 3 or len(held) != shape[0]:
            found.append(StoredTensor(name, tensor.type, shape, tensor.bytes, held[0] if held else None))
            continue
        found += [
            StoredTensor(f"{name}[{expert}]", tensor.type, shape[1:], tensor.bytes // shape[0], layer)
            for expert, layer in enumerate(held)
        ]
    return found


def _layers(facts: Mapping[str, Any]) -> Mapping[str | None, tuple[str, ...]]:
    """Tensor -> the layers of a checkpoint that it holds; empty for an architecture that no row has."""
    architecture = facts.get("general.architecture")
    experts = facts.get(f"{architecture}.expert_count") or 0
    for name, row in GGUF_FAMILIES.items():
        if row.architecture == architecture and (FAMILIES[name].experts is not None) == bool(experts):
            return layers_by_tensor(FAMILIES[name], facts[f"{architecture}.block_count"], experts)
    return {}
