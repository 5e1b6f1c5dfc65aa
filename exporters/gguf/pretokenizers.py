"""Which of llama.cpp's named pre-tokenizers a ``tokenizer.json`` describes, found from its structure.

GGUF stores only a name (``tokenizer.ggml.pre``); llama.cpp holds the rules behind it in ``llama-vocab.cpp``. A row
is listed only where both split every text alike: llama.cpp approximates some others (gpt-4o, tekken).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from compress.errors import InputError

Step = tuple[str, ...]
"""One canonical step: ("digits",), ("split", regex), ("gpt-2 words",) or ("bytes",)."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
QWEN2_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"

_DIGITS, _WORDS, _BYTES = ("digits",), ("gpt-2 words",), ("bytes",)
_DEEPSEEK_CODER = tuple(("split", regex) for regex in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"))

PRE_TOKENIZERS: Mapping[tuple[tuple[Step, ...], bool], str] = MappingProxyType(
    {
        ((_WORDS,), False): "gpt-2",
        ((_DIGITS, _WORDS), False): "smollm",
        ((("split", LLAMA3_SPLIT), _BYTES), True): "llama-bpe",
        ((("split", LLAMA3_SPLIT), _BYTES), False): "smaug-bpe",
        ((("split", QWEN2_SPLIT), _BYTES), False): "qwen2",
        ((*_DEEPSEEK_CODER, _DIGITS, _BYTES), False): "deepseek-coder",
    }
)
"""(steps, whether a word that is in the vocabulary is taken whole) -> llama.cpp's name."""


def pre_tokenizer_name(tokenizer: Mapping[str, Any]) -> str:
    """llama.cpp's name for the pre-tokenizer of a parsed byte-level ``tokenizer.json``.

    InputError says what was found and lists the known names where no row fits.
    """
    found = tokenizer.get("pre_tokenizer")
    steps = tuple(_step(item) for item in _flat(found))
    whole_words = bool(tokenizer["model"].get("ignore_merges", False))
    name = PRE_TOKENIZERS.get((steps, whole_words))
    if name is None:
        shown = json.dumps(found, ensure_ascii=False)
        raise InputError(
            f"no pre-tokenizer of llama.cpp splits text as this tokenizer does (ignore_merges={whole_words}): {shown}",
            fix=f"known: {', '.join(PRE_TOKENIZERS.values())}; export ONNX, which needs no tokenizer in the file",
        )
    return name


def _flat(found: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if found is None:
        return []
    if found["type"] == "Sequence":
        return [inner for item in found["pretokenizers"] for inner in _flat(item)]
    return [found]


def _step(item: Mapping[str, Any]) -> Step:
    """The canonical form of one step; a step that no row has becomes one that matches none."""
    match item:
        case {"type": "ByteLevel", "add_prefix_space": False, **rest}:
            return _WORDS if rest.get("use_regex", True) else _BYTES
        case {"type": "Digits", "individual_digits": True}:
            return _DIGITS
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}:
            return ("split", regex)
    return ("unknown", json.dumps(item, sort_keys=True))
