"""Tokenizers rebuilt from GGUF files: the same tokens as llama.cpp gives, and as the tokenizer that was exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from compress.models.gguf.source import open_gguf
from compress.models.gguf.vocabulary import PRE_TOKENIZERS
from compress.runner.llamacpp import LlamaCppRuntime
from exporters.gguf import GgufExporter
from exporters.gguf.pretokenizers import pre_tokenizer_name
from tests.compress.gguf_files import metadata, tensors, vocabulary, write, written
from tests.support import TEMPLATE, rounded_model, tiny_llama

TEXTS = (
    "The quick brown fox, jumps over 42 jars of potion.",
    "I'll we've DON'T it's they'RE  two   spaces\tand tabs\n\n\nlines \r\n end ",
    "1234567890 12 345,678.90 -7e10 0x1F",
    "\u00fcber stra\u00dfe \u00c9COLE caf\u00e9 e\u0301 \u0391\u03b2\u03b3 \u4e2d\u6587\u5b57\u7b26 \ud55c\uad6d\uc5b4",
    "emoji \U0001f600\U0001f469\u200d\U0001f4bb flags",
    "def f(x):\n    return x**2 != 3  # !?!;;::",
    "<|endoftext|>The lazy dog<|endoftext|> <|user|>hi",
    " leading",
    "",
    "a",
)


def same_as_llama_cpp(file: Path, cache: Path) -> Any:
    """The rebuilt tokenizer, once it gives llama.cpp's tokens for every text, with and without bos and eos."""
    tokenizer = AutoTokenizer.from_pretrained(open_gguf(file, cache).folder)
    runtime = LlamaCppRuntime()
    runtime.load(file, threads=1, context=16)
    try:
        for text in TEXTS:
            for special in (False, True):
                wanted = runtime.tokenize(text, parse_special=True, add_special=special).tolist()
                assert tokenizer(text, add_special_tokens=special).input_ids == wanted, (text, special)
    finally:
        runtime.close()
    return tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Metadata, vocabulary and tensors of a llama's file."""
    folder, _ = written("llama", tmp_path_factory.mktemp("llama"))
    config = json.loads((folder / "config.json").read_text())
    return metadata(config), vocabulary(folder, 320), tensors(folder, config)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_splits_as_llama_cpp_does(pre: str, llama: Any, tmp_path: Path) -> None:
    keys, words, arrays = llama
    words = words | {"pre": pre, "bos_token_id": 0}
    del words["add_bos_token"]
    file = write(tmp_path / "m.gguf", "llama", keys, words, arrays)
    tokenizer = same_as_llama_cpp(file, tmp_path / "cache")
    assert tokenizer.decode(tokenizer(TEXTS[3]).input_ids, skip_special_tokens=True) == TEXTS[3]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "deepseek-coder"])
def test_the_exporter_finds_the_same_name_again(pre: str, llama: Any, tmp_path: Path) -> None:
    keys, words, arrays = llama
    file = write(tmp_path / "m.gguf", "llama", keys, words | {"pre": pre}, arrays)
    folder = open_gguf(file, tmp_path / "cache").folder
    name, _ = pre_tokenizer_name(json.loads((folder / "tokenizer.json").read_text()))
    assert name == pre


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True)])
def test_bos_and_eos_are_added_as_the_file_says(bos: bool, eos: bool, llama: Any, tmp_path: Path) -> None:
    keys, words, arrays = llama
    words = words | {"bos_token_id": 7, "eos_token_id": 9, "add_bos_token": bos, "add_eos_token": eos}
    file = write(tmp_path / "m.gguf", "llama", keys, words, arrays)
    tokenizer = same_as_llama_cpp(file, tmp_path / "cache")
    ids = tokenizer("fox").input_ids
    assert (ids[0] == 7, ids[-1] == 9) == (bos, eos)


def test_added_tokens_templates_and_ends_of_text_are_those_of_the_file(llama: Any, tmp_path: Path) -> None:
    keys, words, arrays = llama
    tokens, kinds = list(words["tokens"]), list(words["token_type"])
    for index, token, kind in ((290, "<|user|>", 3), (300, "fox, ju", 4), (310, "<|im_end|>", 3)):
        tokens[index], kinds[index] = token, kind
    words = words | {"tokens": tokens, "token_type": kinds, "eot_token_id": 310, "padding_token_id": 290}
    whole = {
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ 'tools' }}",
        "general.name": "A name",
    }
    file = write(tmp_path / "m.gguf", "llama", keys, words, arrays, whole=whole)
    tokenizer = same_as_llama_cpp(file, tmp_path / "cache")
    found = open_gguf(file, tmp_path / "cache")
    assert found.name == "A name"
    assert tokenizer(TEXTS[0]).input_ids.count(300) == 1
    assert tokenizer(TEXTS[6]).input_ids.count(290) == 1
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == ("<|user|>", "<|endoftext|>", None)
    said = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(said, tokenize=False) == "<|user|>hi<|endoftext|>"
    assert tokenizer.apply_chat_template(said, tokenize=False, chat_template="tool_use") == "tools"
    assert json.loads((found.folder / "generation_config.json").read_text())["eos_token_id"] == [0, 310]
    # Ids that nothing uses are no tokens of a text.
    assert tokenizer("[PAD299]").input_ids != [299]


def pieces() -> dict[str, Any]:
    """A SentencePiece vocabulary: bytes, letters, and pieces that merges of two make, with falling scores."""
    made = [
        "\u2581t",
        "he",
        "\u2581the",
        "qu",
        "\u2581qu",
        "ick",
        "ck",
        "ic",
        "\u2581quick",
        "ox",
        "\u2581f",
        "\u2581fox",
    ]
    letters = sorted({letter for text in TEXTS[:2] for letter in text if letter.isalpha()} | {"\u2581", ",", "."})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *made, *letters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(made))] + [-1e9] * len(letters)
    size = 352
    extra = size - len(tokens)
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens + [f"[PAD{index}]" for index in range(extra)],
        "token_type": kinds + [5] * extra,
        "scores": scores + [0.0] * extra,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


@pytest.mark.parametrize("prefix", [None, False])
def test_a_sentencepiece_vocabulary_merges_by_scores_as_llama_cpp_does(prefix: bool | None, tmp_path: Path) -> None:
    folder, _ = written("llama", tmp_path, vocab_size=352)
    config = json.loads((folder / "config.json").read_text())
    words = pieces() | ({} if prefix is None else {"add_space_prefix": prefix})
    file = write(tmp_path / "m.gguf", "llama", metadata(config), words, tensors(folder, config))
    tokenizer = same_as_llama_cpp(file, tmp_path / "cache")
    assert tokenizer.convert_ids_to_tokens(tokenizer("the quick fox").input_ids)[:2] == [
        "<s>",
        "\u2581the" if prefix is None else "t",
    ]
    assert tokenizer.decode(tokenizer(TEXTS[3]).input_ids, skip_special_tokens=True) == TEXTS[3]


def test_an_exported_tokenizer_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", chat_template=TEMPLATE)
    (tmp_path / "out").mkdir()
    artifact = GgufExporter().write(rounded_model(folder, tmp_path / "work"), tmp_path / "out")
    found = open_gguf(artifact.path / artifact.entry, tmp_path / "cache")
    original, rebuilt = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(found.folder)
    for text in TEXTS:
        assert rebuilt(text).input_ids == original(text).input_ids
        assert rebuilt.decode(rebuilt(text).input_ids) == original.decode(original(text).input_ids)
    assert rebuilt.chat_template == original.chat_template
    assert (rebuilt.eos_token, rebuilt.bos_token) == (original.eos_token, original.bos_token)
