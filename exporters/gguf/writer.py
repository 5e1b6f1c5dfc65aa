"""A compressed model to one GGUF file, one tensor at a time and encoded a few rows at a time.

The header is written by gguf-py; the data follow through plain file writes, whose errors (disk full) are never lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress import __version__
from compress.errors import InputError
from compress.models.topology import DecoderSpec, describe, rope_frequencies
from compress.session import CompressedModel
from exporters.gguf.blocks import F32, U8, encode_float, encode_quantized
from exporters.gguf.families import GGUF_FAMILIES, Slot, slots, spec_complaints
from exporters.gguf.storage import LAYOUTS, Layout, TypeChoices, complaint
from exporters.gguf.tokenizer import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

CHUNK_BYTES = 1 << 24
"""Float32 bytes that are encoded at a time."""

ROPE_FACTORS = "rope_freqs.weight"
_VECTOR_TYPE = "F32"
"""Norms and biases: llama.cpp computes them in float32."""


def write_gguf(model: CompressedModel, path: Path, choices: TypeChoices) -> None:
    """Write ``model`` to ``path``; InputError if GGUF cannot hold it, CompressError names a tensor that loses bits."""
    from gguf import GGMLQuantizationType, GGUFWriter

    spec = describe(model.config)
    _refuse(model, spec)
    vocabulary = read_vocabulary(model.folder, spec.vocab_size, _eos_token_ids(model, spec))
    order = list(slots(spec, model.has_dense))
    factors = _rope_factors(model.config, spec)
    layouts = {slot.name: _layout(model, slot, choices) for slot in order}

    writer = GGUFWriter(path, GGUF_FAMILIES[spec.family.name].architecture)
    _add_model(writer, model.name, spec, _file_type(model, order, layouts))
    _add_vocabulary(writer, vocabulary)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for slot in order:
        shape = model.shapes[slot.layer] if slot.layer else tuple(model.dense(slot.source).shape)
        layout = layouts[slot.name]
        size = int(np.prod(shape)) // layout.block * layout.size
        writer.add_tensor_info(slot.name, shape, np.float32, size, raw_dtype=GGMLQuantizationType[layout.type])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    with path.open("ab") as file:
        if factors is not None:
            _pad(file, writer.data_alignment)
            file.write(factors.tobytes())
        for slot in order:
            _pad(file, writer.data_alignment)
            for rows in _encoded(model, slot, layouts[slot.name]):
                file.write(np.ascontiguousarray(rows).data)
        _pad(file, writer.data_alignment)


def _refuse(model: CompressedModel, spec: DecoderSpec) -> None:
    stored = ((layer, complaint(layer, model.shapes[layer], scheme)) for layer, scheme in model.schemes.items())
    problems = [*spec_complaints(spec), *(text for _, text in stored if text)]
    if problems:
        raise InputError("\n".join(problems), where=model.name)


def _eos_token_ids(model: CompressedModel, spec: DecoderSpec) -> list[int]:
    """Ends of text by config.json and generation_config.json, in that order, each once."""
    import json

    path = model.folder / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    more = generation.get("eos_token_id")
    listed = more if isinstance(more, list) else [] if more is None else [more]
    return list(dict.fromkeys([*spec.eos_token_ids, *listed]))


def _layout(model: CompressedModel, slot: Slot, choices: TypeChoices) -> Layout:
    return choices.layout(model.schemes.get(slot.layer)) if slot.layer else LAYOUTS[_VECTOR_TYPE]


def _file_type(model: CompressedModel, order: list[Slot], layouts: Mapping[str, Layout]) -> int:
    """``general.file_type``: the type of most weights inside the blocks."""
    from gguf import LlamaFileType

    count: Counter[str] = Counter()
    for slot in order:
        if slot.layer and slot.name.startswith("blk."):
            count[layouts[slot.name].file_type] += int(np.prod(model.shapes[slot.layer]))
    most = count.most_common(1)[0][0]
    return int(LlamaFileType[most if most == "ALL_F32" else f"MOSTLY_{most}"])


def _add_model(writer: GGUFWriter, name: str, spec: DecoderSpec, file_type: int) -> None:
    from gguf import GGML_QUANT_VERSION, RopeScalingType

    writer.add_type("model")
    writer.add_name(name)
    writer.add_quantized_by(f"edgepress {__version__}")
    writer.add_file_type(file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    if spec.head_dim * spec.heads != spec.hidden_size:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(float(spec.rope["rope_theta"]))
    kind = spec.rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(float(spec.rope["factor"]))
    if kind == "yarn":
        original = spec.rope.get("original_max_position_embeddings") or spec.max_positions
        writer.add_rope_scaling_orig_ctx_len(int(original))


def _rope_factors(config: Mapping[str, Any], spec: DecoderSpec) -> F32 | None:
    """What llama.cpp divides the plain rotary frequencies by under Llama-3's scaling; float32 [head_dim / 2]."""
    if spec.rope.get("rope_type") != "llama3":
        return None
    wanted = np.array(rope_frequencies(config)[0])
    plain = float(spec.rope["rope_theta"]) ** -(np.arange(0, spec.head_dim, 2) / spec.head_dim)
    factors: F32 = (plain / wanted).astype(np.float32)
    return factors


def _add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    split = vocabulary.splitting
    writer.add_tokenizer_model(split.model)
    writer.add_tokenizer_pre(split.pre)
    writer.add_token_list(list(vocabulary.tokens))
    if split.scores is not None:
        writer.add_token_scores(list(split.scores))
    writer.add_token_types(list(vocabulary.types))
    if split.merges is not None:
        writer.add_token_merges(list(split.merges))
    add_id = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "eot": writer.add_eot_token_id,
        "eom": writer.add_eom_token_id,
        "unk": writer.add_unk_token_id,
        "pad": writer.add_pad_token_id,
    }
    for role, token in vocabulary.ids.items():
        add_id[role](token)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    writer.add_add_space_prefix(split.add_space_prefix)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def interleaved_rows(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which checkpoint row each row of the file holds: the halves of a head, row by row in turn."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _encoded(model: CompressedModel, slot: Slot, layout: Layout) -> Iterator[U8]:
    """The bytes of one tensor, a few rows at a time."""
    if slot.layer is not None and slot.layer in model.schemes:
        quantized = model.quantized(slot.layer)
        for rows in _chunks(*quantized.shape, slot.heads):
            yield encode_quantized(slot.layer, quantized.rows(rows), layout)
        return
    tensor: Tensor = model.dense(slot.source)
    tensor = tensor.reshape(tensor.shape[0], -1)
    for rows in _chunks(tensor.shape[0], tensor.shape[1], slot.heads):
        yield encode_float(slot.source, tensor[rows].float().numpy(), layout.type)


def _chunks(rows: int, columns: int, heads: int) -> Iterator[Any]:
    """Rows of the checkpoint in the order of the file, ``CHUNK_BYTES`` of float32 at a time."""
    step = max(1, CHUNK_BYTES // (4 * columns))
    order = interleaved_rows(rows, heads) if heads else None
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield slice(start, stop) if order is None else order[start:stop]


def _pad(file: Any, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))
