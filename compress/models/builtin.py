"""The builtin model: a llama GGUF with a byte-level BPE tokenizer, turned once into a checkpoint folder.

Layout facts: GGUF specification (ggml-org/ggml, docs/gguf.md); llama q/k rows are stored for interleaved rotary pairs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3


def convert_llama_gguf(gguf: Path, folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` (float32) and the tokenizer of ``gguf`` into ``folder``."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    tensors: dict[str, F32] = {}
    for item in reader.tensors:
        weight: F32 = dequantize(item.data, item.tensor_type)
        role = item.name.split(".")[-2]
        if role in {"attn_q", "attn_k"}:
            weight = _split_halves(weight, heads if role == "attn_q" else kv_heads)
        tensors[_checkpoint_name(item.name)] = np.ascontiguousarray(weight)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(meta), indent=2) + "\n", encoding="utf-8")
    _write_tokenizer(meta, folder)


def _checkpoint_name(name: str) -> str:
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outer:
        return outer[name]
    _, index, role, kind = name.split(".")
    return f"model.layers.{index}.{_NAMES[role]}.{kind}"


def _split_halves(weight: F32, heads: int) -> F32:
    """Rows from interleaved rotary pairs (GGUF llama) to the two halves that transformers rotates."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "dtype": "float32",
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        # The file holds the float32 nearest to 1e-5; the decimal is what the model was trained with.
        "rms_norm_eps": float(np.format_float_positional(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_theta": meta["llama.rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = meta["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # Pre-tokenizer "smollm": every digit alone, then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[meta["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[meta["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
        model_max_length=meta["llama.context_length"],
    )
    wrapped.chat_template = meta["tokenizer.chat_template"]
    wrapped.save_pretrained(folder)
    eos = meta["tokenizer.ggml.eos_token_id"]
    generation = {"bos_token_id": meta["tokenizer.ggml.bos_token_id"], "eos_token_id": eos, "pad_token_id": eos}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
