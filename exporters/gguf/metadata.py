"""The keys of a file: what the model is called, and its numbers as llama.cpp reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress import __version__
from compress.models.topology import DecoderSpec
from compress.session import CompressedModel
from exporters.gguf.families import GGUF_FAMILIES
from exporters.gguf.limits import context_length
from exporters.gguf.rope import add_rope
from exporters.gguf.tokenizer import Vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter


def add_general(writer: GGUFWriter, model: CompressedModel, file_type: int) -> None:
    """What the model is called, who made the file, and the licence that a model card beside the weights states."""
    from gguf import GGML_QUANT_VERSION

    writer.add_type("model")
    writer.add_name(model.name)
    writer.add_quantized_by(f"edgepress {__version__}")
    writer.add_file_type(file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    add_card(writer, model.folder)


def add_card(writer: GGUFWriter, folder: Path) -> None:
    """Licence, languages and tags of the model card (``README.md``) in ``folder``, if there is one."""
    from gguf import Metadata

    card = Metadata.load_model_card(folder)
    texts = {
        "license": writer.add_license,
        "license_name": writer.add_license_name,
        "license_link": writer.add_license_link,
    }
    for key, add in texts.items():
        if isinstance(card.get(key), str):
            add(card[key])


def add_decoder(writer: GGUFWriter, spec: DecoderSpec, model: CompressedModel) -> None:
    """The numbers that llama.cpp builds its graph from."""
    row = GGUF_FAMILIES[spec.family.name]
    writer.add_context_length(context_length(spec))
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
    add_rope(writer, spec, row, model.config)
    for name, key in row.scaling_keys.items():
        value = getattr(spec.scaling, name)
        if value is not None:
            # llama.cpp divides the logits by its number.
            writer.add_float32(f"{row.architecture}.{key}", 1 / value if name == "logits" else value)
    stated = [kind.window for kind in spec.attentions if kind.window is not None]
    if row.windows and stated:
        writer.add_sliding_window(stated[0])
        writer.add_sliding_window_pattern([kind.window is not None for kind in spec.attentions])
    if spec.experts is not None:
        _add_experts(writer, spec, model.shapes)


def _add_experts(writer: GGUFWriter, spec: DecoderSpec, shapes: Mapping[str, tuple[int, int]]) -> None:
    assert spec.experts is not None
    assert spec.family.experts is not None
    index = min(spec.experts.blocks)
    writer.add_expert_count(spec.experts.count)
    writer.add_expert_used_count(spec.experts.per_token)
    writer.add_expert_feed_forward_length(shapes[spec.expert_linears(index)[0]["up"]][0])
    if spec.family.experts.shared:
        shared = f"{spec.family.block.format(index=index)}.{spec.family.experts.shared['up']}"
        writer.add_expert_shared_feed_forward_length(shapes[shared][0])


def add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    """The ``tokenizer.*`` keys."""
    split = vocabulary.splitting
    writer.add_tokenizer_model(split.model)
    writer.add_tokenizer_pre(split.pre)
    writer.add_token_list(list(vocabulary.tokens))
    if split.scores is not None:
        writer.add_token_scores(list(split.scores))
    writer.add_token_types(list(vocabulary.types))
    if split.merges is not None:
        writer.add_token_merges(list(split.merges))
    add_id: Mapping[str, Any] = {
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
