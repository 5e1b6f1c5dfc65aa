"""The tokenizer inside a GGUF file as the files that transformers reads.

Two kinds are read: byte-level BPE (GGUF's "gpt2") and SentencePiece-style BPE with byte fallback ("llama"). What is
written splits text as llama.cpp does with the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from compress.errors import InputError, nearest

if TYPE_CHECKING:
    from compress.models.gguf.header import GgufFile

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
"""``gguf.TokenType``, as far as it matters here."""
SPACE = "▁"
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}
"""Our name of a special token -> what the file calls its id."""
_KEY = "tokenizer.ggml."

_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES = _WORDS | {"use_regex": False}
_DIGITS = {"type": "Digits", "individual_digits": True}
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MODERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|" + _TAIL


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


LLAMA3_SPLIT, QWEN2_SPLIT = _MODERN % "{1,3}", _MODERN % ""
_BY_THREES, _ONE_BY_ONE = (_split(LLAMA3_SPLIT), _BYTES), (_split(QWEN2_SPLIT), _BYTES)
_CODER = tuple(_split(regex) for regex in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"))


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is cut before it is merged: steps of a ``tokenizer.json``; whether known words are taken whole."""

    steps: Sequence[Mapping[str, Any]]
    whole_words: bool = False
    adds_bos: bool = False
    """Whether llama.cpp puts bos before a text where the file does not say."""


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), PreTokenizer((_WORDS,))),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), PreTokenizer((_DIGITS, _WORDS))),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), PreTokenizer(_BY_THREES, whole_words=True, adds_bos=True)),
        "smaug-bpe": PreTokenizer(_BY_THREES),
        "dbrx": PreTokenizer(_BY_THREES),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), PreTokenizer(_ONE_BY_ONE)),
        "deepseek-coder": PreTokenizer((*_CODER, _DIGITS, _BYTES)),
    }
)
"""llama.cpp's name -> the same rules; only where both were seen to split alike."""


def token_ids(file: GgufFile) -> dict[str, int]:
    """Role (bos, eos, unk, pad, eot, eom) -> id, where the file names one."""
    found = {role: file.metadata.get(f"{_KEY}{name}_token_id") for role, name in ROLES.items()}
    return {role: int(token) for role, token in found.items() if token is not None}


def write_tokenizer(file: GgufFile, vocab_size: int, folder: Path) -> None:
    """Write tokenizer, chat template and ``generation_config.json`` into ``folder``.

    InputError where the file has no tokenizer, or one of a kind that is not known here.
    """
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = file.metadata.get(f"{_KEY}tokens", [])
    kinds: list[int] = file.metadata.get(f"{_KEY}token_type", []) or [1] * len(tokens)
    problems = _problems(file, tokens, kinds, vocab_size)
    if problems:
        raise InputError("\n".join(problems), where=str(file.path), fix="give the original checkpoint")
    ids = token_ids(file)
    model = file.text(f"{_KEY}model")
    described = _DESCRIBE[model](file, tokens, kinds)
    described |= {"added_tokens": _added(tokens, kinds), "post_processor": _ends(file, model, tokens, ids)}
    named = {f"{role}_token": tokens[ids[role]] for role in ("bos", "eos", "unk", "pad") if role in ids}
    length = file.metadata.get(f"{file.text('general.architecture')}.context_length")
    (folder / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        clean_up_tokenization_spaces=False,
        **named,
        **({} if length is None else {"model_max_length": length}),
    )
    wrapped.chat_template = _templates(file)
    wrapped.save_pretrained(folder)
    ends = list(dict.fromkeys(ids[role] for role in ("eos", "eot", "eom") if role in ids))
    generation: dict[str, Any] = {f"{role}_token_id": ids.get(role) for role in ("bos", "pad")}
    generation |= {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _problems(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int], vocab_size: int) -> list[str]:
    model, pre = file.text(f"{_KEY}model"), file.text(f"{_KEY}pre", "default")
    if not model or model in ("none", "no_vocab") or not tokens:
        return ["the file has no tokenizer (tokenizer.ggml.model, tokenizer.ggml.tokens)"]
    if model not in _DESCRIBE:
        return [f"a tokenizer of the kind '{model}' is not known; known: {', '.join(_DESCRIBE)}"]
    problems = []
    if model == "gpt2" and pre not in PRE_TOKENIZERS:
        near = nearest(pre, PRE_TOKENIZERS)
        problems.append(f"pre-tokenizer '{pre}' is not known{near}; known: {', '.join(PRE_TOKENIZERS)}")
    needed = {"gpt2": "merges", "llama": "scores"}[model]
    count = len(file.metadata.get(f"{_KEY}{needed}", []))
    if not count or (needed == "scores" and count != len(tokens)):
        problems.append(f"{count} {needed} for {len(tokens)} tokens")
    if len(kinds) != len(tokens):
        problems.append(f"{len(kinds)} types for {len(tokens)} tokens")
    if len(tokens) > vocab_size:
        problems.append(f"{len(tokens)} tokens, and the embedding has {vocab_size} rows")
    beyond = {role: token for role, token in token_ids(file).items() if not 0 <= token < len(tokens)}
    problems += [f"the {role} token {token} is none of the {len(tokens)} tokens" for role, token in beyond.items()]
    twice = len(tokens) - len(set(tokens))
    return [*problems, *([f"{twice} tokens are there twice"] if twice else [])]


def _vocabulary(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Every token that a text can contain. Control tokens too: an id that is nowhere else would be given anew."""
    return {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}


def _byte_level(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    rules = PRE_TOKENIZERS[file.text(f"{_KEY}pre", "default")]
    steps = [dict(step) for step in rules.steps]
    merges = [merge.split(" ", 1) for merge in file.metadata[f"{_KEY}merges"]]
    model = _bpe(_vocabulary(tokens, kinds), merges, ignore_merges=rules.whole_words)
    pre_tokenizer = {"type": "Sequence", "pretokenizers": steps} if steps[1:] else steps[0]
    return _tokenizer(model, None, pre_tokenizer, dict(_WORDS))


def _sentencepiece(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """As llama.cpp merges: of all neighbours that make a known piece, those whose piece has the highest score."""
    vocabulary = _vocabulary(tokens, kinds)
    scores: list[float] = file.metadata[f"{_KEY}scores"]
    pieces = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in (CONTROL, UNUSED, UNKNOWN)}
    ways = [
        (-scores[vocabulary[piece]], vocabulary[piece], (piece[:cut], piece[cut:]))
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    merges = [list(pair) for _, _, pair in sorted(ways)]
    model = _bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    prefixed = bool(file.metadata.get(f"{_KEY}add_space_prefix", True))
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return _tokenizer(model, prepend if prefixed else replace, None, {"type": "Sequence", "decoders": decoders})


_DESCRIBE = {"gpt2": _byte_level, "llama": _sentencepiece}
"""``tokenizer.ggml.model`` -> a ``tokenizer.json`` without its added tokens."""


def _bpe(vocabulary: dict[str, int], merges: Sequence[Sequence[str]], **others: Any) -> dict[str, Any]:
    usual = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **usual, **flags, **others, "vocab": vocabulary, "merges": merges}


def _tokenizer(model: Any, normalizer: Any, pre_tokenizer: Any, decoder: Any) -> dict[str, Any]:
    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model}
    return {"version": "1.0", "truncation": None, "padding": None, **parts}


def _added(tokens: Sequence[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is split, by id; llama.cpp takes them literally."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, **flags, "special": kind != USER_DEFINED}
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]


def _ends(file: GgufFile, model: str, tokens: Sequence[str], ids: Mapping[str, int]) -> dict[str, Any] | None:
    """What puts bos before a text and eos after it, as llama.cpp would."""
    pre = PRE_TOKENIZERS.get(file.text(f"{_KEY}pre", "default"))
    usual = {"bos": model == "llama" or (pre is not None and pre.adds_bos), "eos": False}
    added = {
        role: tokens[ids[role]]
        for role, default in usual.items()
        if role in ids and file.metadata.get(f"{_KEY}add_{role}_token", default)
    }
    if not added:
        return None
    before, after = ([{"SpecialToken": {"id": added[r], "type_id": 0}}] if r in added else [] for r in ("bos", "eos"))
    one, other = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    special = {token: {"id": token, "ids": [ids[role]], "tokens": [token]} for role, token in added.items()}
    single = [*before, one, *after]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *before, other, *after],
        "special_tokens": special,
    }


def _templates(file: GgufFile) -> str | dict[str, str] | None:
    """The chat template, or all of them by name."""
    first = file.metadata.get("tokenizer.chat_template")
    names = file.metadata.get("tokenizer.chat_templates", [])
    others = {name: file.text(f"tokenizer.chat_template.{name}") for name in names if name != "default"}
    if not others:
        return first
    return ({} if first is None else {"default": first}) | others
