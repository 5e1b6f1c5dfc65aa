"""What stands beside the graph: ``genai_config.json`` for onnxruntime-genai, the tokenizer, the model's config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from compress.models.topology import DecoderSpec
from compress.session import CompressedModel
from exporters.onnx.attention import PAST, PRESENT
from exporters.onnx.limits import STANDARD, context_length

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
"""Files of the checkpoint that a runtime reads; whichever exist are copied."""

_DEFAULT_MAX_LENGTH = 4096
"""onnxruntime-genai allocates the whole key/value cache for this length at once."""


def write_companions(model: CompressedModel, spec: DecoderSpec, out: Path, entry: str, dialect: str) -> None:
    """Copy the companions, write ``config.json`` and ``genai_config.json``. OSError passes through."""
    for name in COMPANIONS:
        source = model.folder / name
        if source.is_file():
            shutil.copyfile(source, out / name)
    _write_json(out / "config.json", dict(model.config))
    _write_json(out / "genai_config.json", genai_config(spec, entry, _eos_token_ids(model, spec), dialect))


def genai_config(spec: DecoderSpec, entry: str, eos_token_ids: list[int], dialect: str) -> dict[str, Any]:
    """What onnxruntime-genai needs to run ``entry``; it refuses keys that it does not know."""
    names = {"index": "%d"}
    tokens: dict[str, Any] = {"bos_token_id": spec.bos_token_id, "pad_token_id": spec.pad_token_id}
    if eos_token_ids:
        tokens["eos_token_id"] = eos_token_ids
        # Without a padding token of its own a batch is padded with the end token; the mask hides it either way.
        tokens["pad_token_id"] = eos_token_ids[0] if spec.pad_token_id is None else spec.pad_token_id
    return {
        "model": {
            # Any family: the graph says what it computes. Types of that name would bring habits of their own.
            "type": "decoder",
            "context_length": context_length(spec),
            "vocab_size": spec.vocab_size,
            **{name: value for name, value in tokens.items() if value is not None},
            "decoder": {
                "filename": entry,
                "hidden_size": spec.hidden_size,
                "head_size": spec.head_dim,
                "num_attention_heads": spec.heads,
                "num_key_value_heads": spec.kv_heads,
                "num_hidden_layers": spec.layers,
                # A plan of memory serves one shape, and every token's mask has a new one.
                "session_options": {"enable_mem_pattern": False, "provider_options": []},
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": PAST.format(part="key", **names),
                    "past_value_names": PAST.format(part="value", **names),
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": PRESENT.format(part="key", **names),
                    "present_value_names": PRESENT.format(part="value", **names),
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": min(context_length(spec), _DEFAULT_MAX_LENGTH),
            "past_present_share_buffer": dialect != STANDARD,
        },
    }


def _eos_token_ids(model: CompressedModel, spec: DecoderSpec) -> list[int]:
    """End tokens: generation_config.json knows those of a chat model; config.json often names one only."""
    path = model.folder / "generation_config.json"
    found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    if found is None:
        return list(spec.eos_token_ids)
    return list(found) if isinstance(found, list) else [found]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
