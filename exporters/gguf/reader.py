"""A GGUF file read back: by gguf-py for the proof, and by its header alone for the listing."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from compress.errors import CompressError, InputError
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
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with path.open("rb") as file:
        facts, infos = _header(file, path)
    layers = _layers(facts)
    found = []
    for name, shape, number in infos:
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        size = int(np.prod(shape)) // block * block_bytes
        held = layers.get(name, ())
        if len(shape) < 3 or len(held) != shape[0]:
            found.append(StoredTensor(name, kind.name, shape, size, held[0] if held else None))
            continue
        found += [
            StoredTensor(f"{name}[{expert}]", kind.name, shape[1:], size // shape[0], layer)
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


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def _header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int]]]:
    """(single values by key, (name, shape, type number) of each tensor). Arrays are skipped."""
    try:
        magic, version, tensors, keys = _unpack(file, "4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise InputError("this is no GGUF file of version 2 or 3", where=str(path))
        facts = {}
        for _ in range(keys):
            key = _string(file)
            facts[key] = _value(file, *_unpack(file, "I"))
        infos = []
        for _ in range(tensors):
            name, (count,) = _string(file), _unpack(file, "I")
            shape = _unpack(file, f"{count}Q")[::-1]
            number, _offset = _unpack(file, "IQ")
            infos.append((name, shape, number))
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise InputError(f"the header is damaged or cut short ({error!r})", where=str(path)) from error
    return facts, infos


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))


def _string(file: BinaryIO) -> str:
    return file.read(*_unpack(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _unpack(file, _SCALARS[kind])[0]
    inner, count = _unpack(file, "IQ")
    if inner == _STRING:
        for _ in range(count):
            (length,) = _unpack(file, "Q")
            file.seek(length, 1)
    else:
        file.seek(count * struct.calcsize(_SCALARS[inner]), 1)
    return None
