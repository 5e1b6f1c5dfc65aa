"""A checkpoint's tokenizer files as the ``tokenizer.ggml.*`` keys of GGUF.

Two kinds are written: byte-level BPE (GGUF's "gpt2") and SentencePiece-style BPE with byte fallback ("llama").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import InputError
from exporters.gguf.pretokenizers import pre_tokenizer_name
from exporters.gguf.sentencepiece import SPACE, merge_remarks, piece_scores

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""``gguf.TokenType``."""

_STAND_IN = "[PAD{}]"
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


@dataclass(frozen=True)
class Splitting:
    """How text becomes tokens: GGUF's name of the method and the pre-tokenizer, and merges or scores.

    ``remarks`` name texts that llama.cpp splits otherwise than this tokenizer.
    """

    model: str
    pre: str
    remarks: Sequence[str]
    merges: Sequence[str] | None = None
    scores: Sequence[float] | None = None
    add_space_prefix: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """Everything that GGUF says about a tokenizer.

    ``tokens`` and ``types`` by id; ``ids`` maps bos, eos, eot, eom, unk and pad to token ids, where there are any.
    """

    splitting: Splitting
    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]
    add_bos: bool
    add_eos: bool
    chat_template: str | Sequence[Mapping[str, str]] | None


def check_tokenizer(folder: Path, vocab_size: int, pre_tokenizer: str | None = None) -> Sequence[str]:
    """Remarks about texts that llama.cpp would split otherwise; InputError if it cannot hold this tokenizer at all.

    Takes a fraction of a second, so it can run before any work starts.
    """
    return read_vocabulary(folder, vocab_size, pre_tokenizer=pre_tokenizer).splitting.remarks


def read_vocabulary(
    folder: Path, vocab_size: int, eos_token_ids: Sequence[int] = (), pre_tokenizer: str | None = None
) -> Vocabulary:
    """The tokenizer in ``folder``, padded to ``vocab_size`` tokens (the rows of the embedding).

    ``eos_token_ids``: every id that ends a text by the model's configuration. ``pre_tokenizer``: llama.cpp's name for
    it, where it is not to be found out. InputError lists what llama.cpp cannot do of this tokenizer.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(
            "there is no tokenizer.json, and GGUF holds the tokenizer inside the file",
            where=str(folder),
            fix="save the tokenizer as a fast tokenizer: AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
        )
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    config = _json(folder / "tokenizer_config.json")
    try:
        problems = _model_problems(tokenizer) or _vocabulary_problems(tokenizer, vocab_size)
        if problems:
            raise InputError("\n".join(problems), fix="export ONNX, which needs no tokenizer in the file")
        tokens, types = _pieces(tokenizer, vocab_size)
        ids = _special_ids(config, {token: id_ for id_, token in enumerate(tokens)}, eos_token_ids)
        add_bos, add_eos = _added_ends(tokenizer, config, ids, tokens)
        if _is_sentencepiece(tokenizer):
            split = _sentencepiece(tokenizer, tokens, types, pre_tokenizer)
        else:
            split = _byte_level(tokenizer, pre_tokenizer)
        return Vocabulary(split, tokens, types, ids, add_bos, add_eos, _chat_template(folder, config))
    except InputError as error:
        raise InputError(error.what, where=str(path), fix=error.fix) from None


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _is_sentencepiece(tokenizer: Mapping[str, Any]) -> bool:
    return bool(tokenizer["model"].get("byte_fallback"))


def _model_problems(tokenizer: Mapping[str, Any]) -> list[str]:
    model = tokenizer["model"]
    if model.get("type") != "BPE":
        return [f"the tokenizer's model is {model.get('type')}; GGUF files are written for BPE only"]
    return [
        f"the tokenizer sets {key}={model[key]!r}, which llama.cpp does not know"
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if model.get(key)
    ]


def _vocabulary_problems(tokenizer: Mapping[str, Any], vocab_size: int) -> list[str]:
    model = tokenizer["model"]
    ids = [*model["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    problems = []
    beyond = sum(id_ >= vocab_size for id_ in ids)
    if beyond:
        problems.append(f"{beyond} tokens have ids beyond the model's {vocab_size} embedding rows")
    if _is_sentencepiece(tokenizer):
        missing = len(_BYTE_TOKENS - model["vocab"].keys())
        if missing:
            problems.append(f"{missing} of the 256 byte tokens (<0x00> ... <0xFF>) are missing")
    elif not model["merges"]:
        problems.append("the tokenizer has no merges, and llama.cpp refuses such a file")
    return problems


def _pieces(tokenizer: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """(tokens, types) by id; ids that the tokenizer does not use get a stand-in that no text contains."""
    tokens, types = [""] * vocab_size, [UNUSED] * vocab_size
    for token, id_ in tokenizer["model"]["vocab"].items():
        tokens[id_], types[id_] = token, NORMAL
    if _is_sentencepiece(tokenizer):
        for token in _BYTE_TOKENS:
            types[tokenizer["model"]["vocab"][token]] = BYTE
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    unknown = tokenizer["model"].get("unk_token")
    if _is_sentencepiece(tokenizer) and unknown in tokenizer["model"]["vocab"]:
        types[tokenizer["model"]["vocab"][unknown]] = UNKNOWN
    taken = set(tokens)
    for id_, kind in enumerate(types):
        if kind == UNUSED:
            tokens[id_] = _STAND_IN.format(id_)
            while tokens[id_] in taken:
                tokens[id_] += "_"
    return tokens, types


def _special_ids(config: Mapping[str, Any], ids: Mapping[str, int], eos_token_ids: Sequence[int]) -> dict[str, int]:
    """Ids of the special tokens; further ends of text take the roles eot and eom, which stop llama.cpp too."""
    found = {}
    for role in ("bos", "eos", "unk", "pad"):
        value = config.get(f"{role}_token")
        token = str(value["content"] if isinstance(value, dict) else value)
        if token in ids:
            found[role] = ids[token]
    ends = [id_ for id_ in eos_token_ids if id_ != found.get("eos")]
    roles = ["eot", "eom"] if "eos" in found else ["eos", "eot", "eom"]
    return found | dict(zip(roles, ends, strict=False))


def _added_ends(
    tokenizer: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int], tokens: Sequence[str]
) -> tuple[bool, bool]:
    """Whether encoding adds bos and eos: what the configuration says, else what the post-processor does."""
    before, after = _template(tokenizer.get("post_processor"))
    flags = []
    for role, added in (("bos", before), ("eos", after)):
        token = tokens[ids[role]] if role in ids else None
        if config.get(f"add_{role}_token") is not None:
            flags.append(bool(config[f"add_{role}_token"]) and token is not None)
        elif added not in ([], [token]):
            raise InputError(f"the tokenizer adds {added} around a text; GGUF can say bos before and eos after only")
        else:
            flags.append(bool(added))
    return flags[0], flags[1]


def _template(processor: Mapping[str, Any] | None) -> tuple[list[str], list[str]]:
    """(special tokens put before, special tokens put after) a single text."""
    if processor is None or processor["type"] == "ByteLevel":
        return [], []
    if processor["type"] == "Sequence":
        found = [_template(item) for item in processor["processors"]]
        return [token for item in found for token in item[0]], [token for item in found for token in item[1]]
    if processor["type"] != "TemplateProcessing":
        raise InputError(f"llama.cpp has nothing like the tokenizer's post-processor {processor['type']}")
    names = [item["SpecialToken"]["id"] if "SpecialToken" in item else None for item in processor["single"]]
    text = names.index(None)
    return [name for name in names[:text] if name], [name for name in names[text:] if name]


def _byte_level(tokenizer: Mapping[str, Any], pre_tokenizer: str | None) -> Splitting:
    normalizer = tokenizer.get("normalizer")
    remarks = _added_token_remarks(tokenizer)
    if normalizer == {"type": "NFC"}:
        remarks.append("llama.cpp does not normalise text to NFC first, as this tokenizer does")
    elif normalizer is not None:
        raise InputError(f"llama.cpp has nothing like the tokenizer's normalizer {json.dumps(normalizer)}")
    merges = [item if isinstance(item, str) else " ".join(item) for item in tokenizer["model"]["merges"]]
    name, told = pre_tokenizer_name(tokenizer, pre_tokenizer)
    return Splitting("gpt2", name, [*told, *remarks], merges=merges)


def _sentencepiece(
    tokenizer: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], pre_tokenizer: str | None
) -> Splitting:
    if pre_tokenizer is not None:
        raise InputError(
            f"pre_tokenizer '{pre_tokenizer}': this tokenizer merges pieces of SentencePiece, which need none",
            fix="leave pre_tokenizer out",
        )
    prefix, remarks = _space_prefix(tokenizer)
    merges = tokenizer["model"]["merges"]
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    remarks += _added_token_remarks(tokenizer) + merge_remarks(merges, normal)
    scores = piece_scores(tokens, merges)
    return Splitting("llama", "default", remarks, scores=scores, add_space_prefix=prefix)


def _space_prefix(tokenizer: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Whether a space is put before a text, and where llama.cpp, which then always puts one, differs."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    match tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer"):
        case {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, last]}, None if last == replace:
            return True, []
        case normalizer, None if normalizer == replace:
            return False, []
        # Gemma's: there are no spaces left to split at.
        case normalizer, {"type": "Split", "pattern": {"String": " "}} if normalizer == replace:
            return False, []
        case None, {"type": "Metaspace", "replacement": "▁", "split": False, "prepend_scheme": "never"}:
            return False, []
        case None, {"type": "Metaspace", "replacement": "▁", "split": False, "prepend_scheme": scheme}:
            where = "begins with a space" + (" or follows a special token" if scheme == "first" else "")
            return True, [f"llama.cpp puts a space before text that {where}; this tokenizer does not"]
    found = json.dumps({key: tokenizer.get(key) for key in ("normalizer", "pre_tokenizer")}, ensure_ascii=False)
    raise InputError(f"llama.cpp prepares no text for a byte-fallback tokenizer as this one does: {found}")


def _added_token_remarks(tokenizer: Mapping[str, Any]) -> list[str]:
    flags = ("lstrip", "rstrip", "single_word")
    odd = [token["content"] for token in tokenizer["added_tokens"] if any(token.get(flag) for flag in flags)]
    return [f"llama.cpp does not strip spaces around (or respect word ends of) {', '.join(odd)}"] if odd else []


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | Sequence[Mapping[str, str]] | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template: str | Sequence[Mapping[str, str]] | None = config.get("chat_template")
    return template
