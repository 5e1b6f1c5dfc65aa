"""A compressed model to one GGUF file, one tensor at a time and encoded a few rows at a time.

The header is written by gguf-py; the data follow through plain file writes, whose errors (disk full) are never lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.errors import InputError
from compress.models.topology import DecoderSpec, describe
from compress.session import CompressedModel
from exporters.gguf.blocks import U8, encode_float, encode_quantized
from exporters.gguf.families import GGUF_FAMILIES
from exporters.gguf.limits import complaints
from exporters.gguf.metadata import add_decoder, add_general, add_vocabulary
from exporters.gguf.rope import rope_tensors
from exporters.gguf.storage import LAYOUTS, Layout, TypeChoices
from exporters.gguf.tensors import Slot, expert_number, slots
from exporters.gguf.tokenizer import read_vocabulary

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 1 << 24
"""Float32 bytes that are encoded at a time."""

_VECTOR_TYPE = "F32"
"""Norms and biases: llama.cpp computes them in float32."""


def write_gguf(model: CompressedModel, path: Path, choices: TypeChoices, pre_tokenizer: str | None = None) -> None:
    """Write ``model`` to ``path``; InputError if GGUF cannot hold it, CompressError names a tensor that loses bits."""
    from gguf import GGMLQuantizationType, GGUFWriter

    spec = describe(model.config)
    biased = {layer for layer in model.shapes if model.has_dense(f"{layer}.bias")}
    problems = complaints(spec, model.schemes, model.shapes, biased)
    if problems:
        raise InputError("\n".join(problems), where=model.name)
    row = GGUF_FAMILIES[spec.family.name]
    vocabulary = read_vocabulary(model.folder, spec.vocab_size, _eos_token_ids(model, spec), pre_tokenizer)
    order = list(slots(spec, model.has_dense))
    factors = rope_tensors(model.config, spec, row)
    layouts = {slot.name: _layout(model, slot, choices) for slot in order}

    writer = GGUFWriter(path, row.architecture)
    add_general(writer, model, _file_type(model, order, layouts))
    add_decoder(writer, spec, model)
    add_vocabulary(writer, vocabulary)
    for name, values in factors.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    for slot in order:
        shape, layout = _shape(model, slot), layouts[slot.name]
        size = int(np.prod(shape)) // layout.block * layout.size
        writer.add_tensor_info(slot.name, shape, np.float32, size, raw_dtype=GGMLQuantizationType[layout.type])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    with path.open("ab") as file:
        for values in factors.values():
            _pad(file, writer.data_alignment)
            file.write(values.tobytes())
        for slot in order:
            _pad(file, writer.data_alignment)
            for rows in _encoded(model, slot, layouts[slot.name]):
                file.write(np.ascontiguousarray(rows).data)
        _pad(file, writer.data_alignment)


def _eos_token_ids(model: CompressedModel, spec: DecoderSpec) -> list[int]:
    """Ends of text by config.json and generation_config.json, in that order, each once."""
    import json

    path = model.folder / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    more = generation.get("eos_token_id")
    listed = more if isinstance(more, list) else [] if more is None else [more]
    return list(dict.fromkeys([*spec.eos_token_ids, *listed]))


def _shape(model: CompressedModel, slot: Slot) -> tuple[int, ...]:
    """Experts are stacked along a first axis."""
    shape = model.shapes[slot.layers[0]] if slot.layers else tuple(model.dense(slot.sources[0]).shape)
    stacked = expert_number(slot.sources[0]) is not None
    return (len(slot.sources), *shape) if stacked else shape


def _layout(model: CompressedModel, slot: Slot, choices: TypeChoices) -> Layout:
    return choices.layout(model.schemes.get(slot.layers[0])) if slot.layers else LAYOUTS[_VECTOR_TYPE]


def _file_type(model: CompressedModel, order: list[Slot], layouts: Mapping[str, Layout]) -> int:
    """``general.file_type``: the type of most weights inside the blocks."""
    from gguf import LlamaFileType

    count: Counter[str] = Counter()
    for slot in order:
        if slot.layers and slot.name.startswith("blk."):
            count[layouts[slot.name].file_type] += int(np.prod(_shape(model, slot)))
    most = count.most_common(1)[0][0]
    return int(LlamaFileType[most if most == "ALL_F32" else f"MOSTLY_{most}"])


def interleaved_rows(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which checkpoint row each row of the file holds: the halves of a head, row by row in turn."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _encoded(model: CompressedModel, slot: Slot, layout: Layout) -> Iterator[U8]:
    """The bytes of one tensor, a few rows at a time."""
    for source in slot.sources:
        layer = source.removesuffix(".weight")
        if slot.layers and layer in model.schemes:
            quantized = model.quantized(layer)
            for rows in _chunks(*quantized.shape, slot.heads):
                yield encode_quantized(layer, quantized.rows(rows), layout)
            continue
        tensor: Tensor = model.dense(source)
        tensor = tensor.reshape(tensor.shape[0], -1)
        for rows in _chunks(tensor.shape[0], tensor.shape[1], slot.heads):
            yield encode_float(source, tensor[rows].float().numpy() + np.float32(slot.offset), layout.type)


def _chunks(rows: int, columns: int, heads: int) -> Iterator[Any]:
    """Rows of the checkpoint in the order of the file, ``CHUNK_BYTES`` of float32 at a time."""
    step = max(1, CHUNK_BYTES // (4 * columns))
    order = interleaved_rows(rows, heads) if heads else None
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield slice(start, stop) if order is None else order[start:stop]


def _pad(file: Any, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))
