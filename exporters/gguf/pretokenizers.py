"""Which of llama.cpp's named pre-tokenizers a ``tokenizer.json`` describes, found from its structure.

GGUF stores only a name (``tokenizer.ggml.pre``); llama.cpp holds the rules behind it in ``llama-vocab.cpp``. A row
is listed only where both split alike, as far as was tried; what is known to differ is remarked on. llama.cpp only
comes near some others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from compress.errors import InputError
from compress.models.gguf.vocabulary import PRE_TOKENIZERS as READABLE

Step = tuple[str, ...]
"""One canonical step: ("digits",), ("split", regex), ("gpt-2 words",) or ("bytes",)."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN35_SPLIT = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(after: str, digits: str) -> str:
    """Words of upper and then lower case, with what may follow each, runs of digits, and the rest."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{_UPPER}*{_LOWER}+{after}|{before}{_UPPER}+{_LOWER}*{after}"
    return rf"{words}|{digits}|{_CASED_TAIL}"


O200K_SPLIT = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
TEKKEN_SPLIT = _cased("", r"\p{N}")

_DIGITS, _WORDS, _BYTES = ("digits",), ("gpt-2 words",), ("bytes",)
_DEEPSEEK_V3 = tuple(
    ("split", regex)
    for regex in (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)


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


def _read(name: str) -> tuple[tuple[Step, ...], bool]:
    """The steps that a file with this name is read with, and whether known words are taken whole."""
    rules = READABLE[name]
    return tuple(map(_step, rules.steps)), rules.whole_words


PRE_TOKENIZERS: Mapping[tuple[tuple[Step, ...], bool], str] = MappingProxyType(
    {
        **{_read(name): name for name in ("gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2")},
        ((("split", QWEN35_SPLIT), _BYTES), False): "qwen35",
        _read("deepseek-coder"): "deepseek-coder",
        ((*_DEEPSEEK_V3, _BYTES), False): "deepseek-v3",
    }
)
"""(steps, whether a word that is in the vocabulary is taken whole) -> llama.cpp's name."""

_DIFFERS: Mapping[str, str] = MappingProxyType(
    {"deepseek-coder": "llama.cpp splits some texts with ideographic spaces (U+3000) or line separators otherwise"}
)
"""Name -> what is known to be split otherwise."""

_NEAREST: Mapping[tuple[Step, ...], str] = MappingProxyType(
    {(("split", O200K_SPLIT), _BYTES): "gpt-4o", (("split", TEKKEN_SPLIT), _BYTES): "tekken"}
)
_NEAR = "where upper case turns to lower, it sees the letters A to Z alone"
"""Steps that llama.cpp only comes near, and how they differ."""

_NAMES = """
a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chatglm-bpe codeshell command-r dbrx deepseek-coder deepseek-llm
deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon falcon-h1 falcon3 gemma4 gigachat glm4
glm5 gpt-2 gpt-4o gpt3-finnish granite-docling granite-embed-multi-311m granite-embed-multi-97m grok-2 hunyuan
hunyuan-dense jais jais-2 jina-de jina-es jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-v5-nano joyai-llm
kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-bpe llama-v3 llama3 llama4 megrez mellum mellum2 midm-2.0
minerva-7b minimax-m2 modern-bert mpt olmo phi-2 pixtral poro-chat qwen2 qwen35 refact roberta-bpe sarvam-moe
seed-coder smaug-bpe smollm solar-open stablelm2 starcoder superbpe talkie tekken tiny_aya trillion ufakzeka viking
youtu
"""
LLAMA_CPP_NAMES = tuple(_NAMES.split())
"""Names that llama.cpp 0.3.36 knows."""


def pre_tokenizer_name(tokenizer: Mapping[str, Any], forced: str | None = None) -> tuple[str, list[str]]:
    """(llama.cpp's name for the pre-tokenizer of a parsed byte-level ``tokenizer.json``, remarks).

    ``forced`` is taken unproven, and remarked on, where the structure does not have that name. Without it, InputError
    says what was found and lists the known names where no row fits.
    """
    found = tokenizer.get("pre_tokenizer")
    steps = tuple(_step(item) for item in _flat(found))
    whole_words = bool(tokenizer["model"].get("ignore_merges", False))
    name = PRE_TOKENIZERS.get((steps, whole_words))
    if forced is not None and forced != name:
        really = "none that is known" if name is None else f"'{name}'"
        return forced, [f"the recipe has text split as by llama.cpp's '{forced}'; this tokenizer is {really}"]
    if name is None:
        shown = json.dumps(found, ensure_ascii=False)
        near = _NEAREST.get(steps)
        hint = f" ('{near}' comes near: {_NEAR})" if near else ""
        raise InputError(
            f"no pre-tokenizer of llama.cpp splits text as this tokenizer does (ignore_merges={whole_words}): {shown}",
            fix=f"known: {', '.join(PRE_TOKENIZERS.values())}; have it split as by another with pre_tokenizer: NAME"
            f"{hint}, or export ONNX, which needs no tokenizer in the file",
        )
    return name, [_DIFFERS[name]] if name in _DIFFERS else []


def _flat(found: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if found is None:
        return []
    if found["type"] == "Sequence":
        return [inner for item in found["pretokenizers"] for inner in _flat(item)]
    return [found]
