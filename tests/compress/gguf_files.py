"""Checkpoints of every family written as GGUF files by gguf-py, as llama.cpp's own converter lays them out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from compress.models.checkpoint import open_checkpoint
from tests.compress.families import saved
from tests.support import tiny_tokenizer

Config = Mapping[str, Any]


def _shared(config: Config) -> dict[str, Any]:
    return {
        # transformers saves it under either name.
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }


def _local(config: Config) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {"attention.sliding_window": config["sliding_window"]} | {
        key: float(config[key]) for key in caps if config.get(key)
    }


PECULIAR: Mapping[str, tuple[str, Callable[[Config], dict[str, Any]]]] = {
    "llama": ("llama", lambda config: {}),
    "mixtral": (
        "llama",
        lambda c: {"expert_count": c["num_local_experts"], "expert_used_count": c["num_experts_per_tok"]},
    ),
    "qwen2": ("qwen2", lambda config: {}),
    "qwen3": ("qwen3", lambda config: {}),
    "qwen2_moe": (
        "qwen2moe",
        lambda c: _shared(c) | {"expert_shared_feed_forward_length": c["shared_expert_intermediate_size"]},
    ),
    "qwen3_moe": ("qwen3moe", _shared),
    "gemma": ("gemma", lambda config: {}),
    "gemma2": ("gemma2", _local),
    "gemma3_text": ("gemma3", _local),
    "phi3": ("phi3", lambda config: {}),
    "smollm3": ("smollm3", lambda config: {}),
    "olmo2": ("olmo2", lambda config: {}),
    "granite": (
        "granite",
        lambda c: {
            "embedding_scale": float(c["embedding_multiplier"]),
            "residual_scale": float(c["residual_multiplier"]),
            "attention.scale": float(c["attention_multiplier"]),
            "logit_scale": float(c["logits_scaling"]),
        },
    ),
}
"""Family -> (architecture, its own keys)."""
PERMUTED = ("llama", "mixtral", "smollm3", "granite")


def interleaved(values: Any, heads: int) -> Any:
    """Rows of two rotary halves to rows of pairs: row 2i is row i of the first half, 2i + 1 of the second."""
    size = len(values) // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return values[order]


def metadata(config: Config) -> dict[str, Any]:
    """What converters write about a model of such a configuration, without the architecture's prefix."""
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.get("head_dim"):
        found |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found | PECULIAR[config["model_type"]][1](config)


def tensors(folder: Path, config: Config) -> dict[str, Any]:
    """The checkpoint's tensors, float32, as a file holds them."""
    checkpoint, family = open_checkpoint(folder), config["model_type"]
    number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == PECULIAR[family][0])
    table = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for name in checkpoint.files:
        values = checkpoint.tensor(name).float().numpy()
        module, _, kind = name.rpartition(".")
        role = module.rpartition(".")[2]
        if family in PERMUTED and role in heads:
            values = interleaved(values, heads[role])
        if family.startswith("gemma") and role.endswith("norm"):
            values = values + np.float32(1)
        parts = module.split(".experts.")
        if parts[1:]:
            number_, _, leaf = parts[1].partition(".")
            stored = table.get_name(f"{parts[0]}.experts.{leaf}")
            experts.setdefault(f"{stored}.{kind}", {})[int(number_)] = values
        else:
            found[f"{table.get_name(module)}.{kind}"] = values
    return found | {name: np.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def add(writer: Any, key: str, value: Any) -> None:
    """A key of the type that the value has."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    (writer.add_array if isinstance(value, list) else kinds[type(value)])(key, value)


def vocabulary(folder: Path, size: int) -> dict[str, Any]:
    """``tokenizer.ggml.*`` of the tokenizer in ``folder``, a byte-level BPE with one control token."""
    described = json.loads((folder / "tokenizer.json").read_text())
    known = {index: token for token, index in described["model"]["vocab"].items()}
    tokens = [known.get(index, f"[PAD{index}]") for index in range(size)]
    kinds = [1 if index in known else 5 for index in range(size)]
    for added in described["added_tokens"]:
        kinds[added["id"]] = 3
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in described["model"]["merges"]],
        "eos_token_id": 0,
        "add_bos_token": False,
    }


def write(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    words: Mapping[str, Any],
    arrays: Mapping[str, Any],
    whole: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """A file of such metadata (``words``: below tokenizer.ggml, ``whole``: any key) and tensors.

    ``kinds``: type -> of tensors whose values are the bytes of that type already.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add(writer, f"{architecture}.{key}", value)
    for key, value in words.items():
        add(writer, f"tokenizer.ggml.{key}", value)
    for key, value in (whole or {}).items():
        add(writer, key, value)
    for name, values in arrays.items():
        kind = (kinds or {}).get(name)
        writer.add_tensor(name, values, raw_dtype=None if kind is None else gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written(variant: str, folder: Path, **overrides: Any) -> tuple[Path, Path]:
    """(checkpoint, file) of a random model of a variant of tests.compress.families."""
    checkpoint = saved(variant, folder / "checkpoint", **overrides)
    tiny_tokenizer(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    words = vocabulary(checkpoint, config["vocab_size"])
    architecture = PECULIAR[config["model_type"]][0]
    file = folder / f"{variant.split(maxsplit=1)[0].rstrip(',')}.gguf"
    return checkpoint, write(file, architecture, metadata(config), words, tensors(checkpoint, config))
