"""llama.cpp must split text exactly as the checkpoint's tokenizer does, or the exporter must say so beforehand."""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from compress.errors import InputError
from compress.models.gguf.vocabulary import LLAMA3_SPLIT, QWEN2_SPLIT
from compress.runner.llamacpp import LlamaCppRuntime
from exporters.gguf import GgufExporter
from exporters.gguf.pretokenizers import (
    LLAMA_CPP_NAMES,
    O200K_SPLIT,
    PRE_TOKENIZERS,
    QWEN35_SPLIT,
    TEKKEN_SPLIT,
)
from exporters.gguf.tokenizer import check_tokenizer, read_vocabulary
from tests.support import SENTENCE, TEMPLATE, rounded_model, tiny_llama

CORPUS = [
    SENTENCE,
    "It's 12345 and we'll say I'M 3.14159; don't they've she'd? 'S 'LL",
    "Grüße aus Köln, café naïve, señor; cafe\u0301 combining",
    "你好，世界。今天天气很好！ こんにちは 안녕하세요",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}\n\n\tif x != 0x1F:  # tab\r\n\r\n",
    "   leading   runs    of  spaces  \n\n\n  and\t\ttabs   ",
    "😀👩‍👩‍👧 emoji 🇩🇪 ٣٤٥ ½ x² №9 Ⅷ",
]
TEXTS = [*CORPUS, "", " ", "\n", "a", "a  b", "aaaaaaaaaaaaa", "<|endoftext|>", "x<|user|> y <|endoftext|>\n<|user|>"]
LETTERS = (
    "aZéÉßñΑαΩωДдЖж你好こカ안녕ａＡǅʰªº١٣½²Ⅷ１017 \n\r\t\u00a0'\"’.,;:!?-_/\\()[]{}<>@#$%^&*+=|~`"
    "€→∑😀👩\u200d🇩\u0301\u0308\u0903\u0e33กำ"
)
PIECES = [
    *("the", "Hello", "WORLD", "McDonald", "étÉ", " I'm", " don't", "'S", "'ll"),
    *("\n\n", "   ", "12345", "3.14", "\t\t"),
]


def tricky(count: int) -> list[str]:
    """Texts in which any kind of character meets any other."""
    generator = random.Random(1)
    pool = [*LETTERS, *PIECES]
    return [
        "".join(generator.choice(pool) * generator.choice([1, 1, 1, 2, 5]) for _ in range(12)) for _ in range(count)
    ]


SPECIAL = ["<|endoftext|>", "<|user|>"]
VOCAB_SIZE = 600


def byte_level(steps: list[Any], ignore_merges: bool = False, often: str = "") -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    # Trained without steps, so that what it merges across words shows where words end.
    tokenizer.pre_tokenizer = raw_bytes()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS * 3, *tricky(60), *[often] * 99], trainer)
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    return tokenizer


def words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(regex: str) -> Any:
    return pre_tokenizers.Split(Regex(regex), "isolated")


def raw_bytes() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def digits() -> Any:
    return pre_tokenizers.Digits(individual_digits=True)


DEEPSEEK_CODER = [*map(split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"))]
BYTE_LEVEL: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: byte_level([words()]),
    "smollm": lambda: byte_level([digits(), words()]),
    "llama-bpe": lambda: byte_level([split(LLAMA3_SPLIT), raw_bytes()], ignore_merges=True),
    "smaug-bpe": lambda: byte_level([split(LLAMA3_SPLIT), raw_bytes()]),
    "qwen2": lambda: byte_level([split(QWEN2_SPLIT), raw_bytes()]),
    "deepseek-coder": lambda: byte_level([*DEEPSEEK_CODER, digits(), raw_bytes()]),
    "qwen35": lambda: byte_level([split(QWEN35_SPLIT), raw_bytes()]),
    "deepseek-v3": lambda: byte_level(
        [
            split(r"\p{N}{1,3}"),
            split("[一-龥぀-ゟ゠-ヿ]+"),
            split(
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            raw_bytes(),
        ]
    ),
}


def sentencepiece(prefix: str = "prepend", drop_merges: int = 1) -> Tokenizer:
    """Like a vocabulary converted from SentencePiece: every way to join two pieces is a merge, by the piece's rank."""
    spaced = [text.replace(" ", "▁") for text in CORPUS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(spaced, trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 260, show_progress=False))
    made = [left + right for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]
    ends = ["<unk>", "<s>", "</s>"]
    pieces = [*sorted(set("".join(spaced))), *made]
    tokens = [*ends, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    known = set(pieces)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in made
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    vocab = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=merges[::drop_merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    if prefix == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif prefix == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif prefix == "none":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prefix, split=False)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ends])
    return tokenizer


def checkpoint(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None, vocab_size: int = 700) -> Path:
    tiny_llama(folder, vocab_size=vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>"} if config is None else config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def runtime() -> Iterator[LlamaCppRuntime]:
    runtime = LlamaCppRuntime()
    yield runtime
    runtime.close()


def load(runtime: LlamaCppRuntime, folder: Path, tmp_path: Path) -> LlamaCppRuntime:
    out = tmp_path / "out"
    out.mkdir()
    artifact = GgufExporter().write(rounded_model(folder, tmp_path / "work"), out)
    runtime.load(out / artifact.entry, threads=1, context=64)
    return runtime


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_llama_cpp_splits_as_the_byte_level_tokenizer_does(name: str, tmp_path: Path, runtime: LlamaCppRuntime) -> None:
    tokenizer = BYTE_LEVEL[name]()
    folder = checkpoint(tmp_path / "model", tokenizer)
    assert read_vocabulary(folder, 700).splitting.pre == name
    load(runtime, folder, tmp_path)
    for text in [*TEXTS, *tricky(200)]:
        expected = tokenizer.encode(text).ids
        assert runtime.tokenize(text).tolist() == expected, text
        assert runtime.detokenize(expected) == text


def test_every_known_pre_tokenizer_is_compared_with_llama_cpp() -> None:
    assert set(PRE_TOKENIZERS.values()) == set(BYTE_LEVEL)


@pytest.mark.parametrize("prefix", ["prepend", "none", "never", "gemma"])
def test_llama_cpp_splits_as_the_sentencepiece_tokenizer_does(
    prefix: str, tmp_path: Path, runtime: LlamaCppRuntime
) -> None:
    tokenizer = sentencepiece(prefix)
    folder = checkpoint(tmp_path / "model", tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    assert check_tokenizer(folder, 700) == []
    load(runtime, folder, tmp_path)
    for text in [*CORPUS, *tricky(200), " ", "a  b", "aaaaaaaaaaaaa", "x</s> y<s>z", "\n"]:
        assert runtime.tokenize(text).tolist() == tokenizer.encode(text).ids, text


@pytest.mark.parametrize(("prefix", "differs"), [("always", " a"), ("first", "x</s>y")])
def test_text_where_the_space_before_it_differs_is_remarked_on(
    prefix: str, differs: str, tmp_path: Path, runtime: LlamaCppRuntime
) -> None:
    tokenizer = sentencepiece(prefix)
    folder = checkpoint(tmp_path / "model", tokenizer, {"bos_token": "<s>", "eos_token": "</s>"})
    [remark] = check_tokenizer(folder, 700)
    assert ("special token" in remark) == (prefix == "first")
    load(runtime, folder, tmp_path)
    assert runtime.tokenize(SENTENCE).tolist() == tokenizer.encode(SENTENCE).ids
    assert runtime.tokenize(differs).tolist() != tokenizer.encode(differs).ids


def test_vocabulary_that_is_no_sentencepiece_is_remarked_on(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", sentencepiece(drop_merges=2), {"eos_token": "</s>"})
    [remark] = check_tokenizer(folder, 700)
    assert "no SentencePiece vocabulary" in remark


def test_begin_and_end_are_added_as_the_post_processor_adds_them(tmp_path: Path, runtime: LlamaCppRuntime) -> None:
    tokenizer = byte_level([words()])
    template = processors.TemplateProcessing(
        single="<|user|> $A", pair="<|user|> $A $B", special_tokens=[("<|user|>", tokenizer.token_to_id("<|user|>"))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    config = {"bos_token": "<|user|>", "eos_token": "<|endoftext|>"}
    load(runtime, checkpoint(tmp_path / "model", tokenizer, config), tmp_path)
    assert runtime.tokenize("hello", add_special=True).tolist() == tokenizer.encode("hello").ids
    assert runtime.tokenize("hello").tolist() == tokenizer.encode("hello", add_special_tokens=False).ids


def test_configuration_decides_over_the_post_processor(tmp_path: Path) -> None:
    config = {"bos_token": "<|user|>", "eos_token": "<|endoftext|>", "add_bos_token": True}
    vocabulary = read_vocabulary(checkpoint(tmp_path / "model", byte_level([words()]), config), 700)
    assert (vocabulary.add_bos, vocabulary.add_eos) == (True, False)


def test_special_tokens_added_elsewhere_are_refused(tmp_path: Path) -> None:
    tokenizer = byte_level([words()])
    ids = [(token, tokenizer.token_to_id(token)) for token in SPECIAL]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|user|> <|endoftext|> $A", pair="<|user|> $A $B", special_tokens=ids
    )
    with pytest.raises(InputError, match="around a text"):
        check_tokenizer(checkpoint(tmp_path / "model", tokenizer), 700)


ADDED = ["<a>", "<a>b", "[long name]", "word", "\n\n\n", "<x><y>"]
AROUND = ["", "x", " ", "\n", "word", "<a"]


@pytest.mark.parametrize("kind", ["byte level", "prepend", "gemma"])
@pytest.mark.parametrize("special", [True, False])
def test_added_tokens_are_found_in_any_surroundings(
    kind: str, special: bool, tmp_path: Path, runtime: LlamaCppRuntime
) -> None:
    tokenizer = byte_level([words()]) if kind == "byte level" else sentencepiece(kind)
    added = [AddedToken(token, normalized=False, special=special) for token in ADDED]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    config = {"eos_token": "<|endoftext|>" if kind == "byte level" else "</s>"}
    folder = checkpoint(tmp_path / "model", tokenizer, config)
    assert check_tokenizer(folder, 700) == []
    load(runtime, folder, tmp_path)
    for before, token, after in itertools.product(AROUND, ADDED, AROUND):
        text = f"{before}{token}{after}{token}"
        assert runtime.tokenize(text).tolist() == tokenizer.encode(text).ids, text


def test_unknown_pre_tokenizer_is_refused_with_the_known_names(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", byte_level([pre_tokenizers.Punctuation(), words()]))
    with pytest.raises(InputError) as caught:
        GgufExporter().check_tokenizer(folder, 700)
    assert "Punctuation" in caught.value.what
    assert "smollm" in caught.value.fix
    assert "tokenizer.json" in caught.value.where


@pytest.mark.parametrize(("regex", "name"), [(O200K_SPLIT, "gpt-4o"), (TEKKEN_SPLIT, "tekken")])
def test_what_llama_cpp_only_comes_near_is_taken_when_the_recipe_says_so(
    regex: str, name: str, tmp_path: Path, runtime: LlamaCppRuntime
) -> None:
    differs = "étÉ"
    tokenizer = byte_level([split(regex), raw_bytes()], often=differs)
    folder = checkpoint(tmp_path / "model", tokenizer)
    with pytest.raises(InputError) as caught:
        GgufExporter().check_tokenizer(folder, 700)
    assert json.dumps(regex) in caught.value.what
    assert f"pre_tokenizer: NAME ('{name}' comes near" in caught.value.fix
    exporter = GgufExporter(pre_tokenizer=name)
    [remark] = exporter.check_tokenizer(folder, 700)
    assert f"split as by llama.cpp's '{name}'; this tokenizer is none that is known" in remark
    out = tmp_path / "out"
    out.mkdir()
    artifact = exporter.write(rounded_model(folder, tmp_path / "work"), out)
    runtime.load(out / artifact.entry, threads=1, context=64)
    assert runtime.metadata("tokenizer.ggml.pre") == name
    assert runtime.tokenize(SENTENCE).tolist() == tokenizer.encode(SENTENCE).ids
    assert runtime.tokenize(differs).tolist() != tokenizer.encode(differs).ids


def test_a_named_pre_tokenizer_is_checked(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", byte_level([words()]))
    assert GgufExporter(pre_tokenizer="gpt-2").check_tokenizer(folder, 700) == []
    [remark] = GgufExporter(pre_tokenizer="qwen2").check_tokenizer(folder, 700)
    assert "this tokenizer is 'gpt-2'" in remark
    with pytest.raises(InputError, match="pre_tokenizer 'gtp-2' is not known; did you mean 'gpt-2'"):
        GgufExporter(pre_tokenizer="gtp-2")
    folder = checkpoint(tmp_path / "pieces", sentencepiece(), {"eos_token": "</s>"})
    with pytest.raises(InputError, match="pieces of SentencePiece, which need none"):
        GgufExporter(pre_tokenizer="gpt-2").check_tokenizer(folder, 700)


def test_llama_cpp_knows_every_name_that_may_be_given(tmp_path: Path, runtime: LlamaCppRuntime) -> None:
    """By its own word for one that it does not know."""
    whole = checkpoint(tmp_path / "model", byte_level([words()]), vocab_size=600)
    (tmp_path / "out").mkdir()
    artifact = GgufExporter().write(rounded_model(whole, tmp_path / "work"), tmp_path / "out")
    data = (artifact.path / artifact.entry).read_bytes()
    key = b"tokenizer.ggml.pre" + struct.pack("<IQ", gguf.GGUFValueType.STRING, len("gpt-2"))
    start = data.index(key)
    header, rest = data[:start], data[start + len(key) + len("gpt-2") :]

    def loads(name: str) -> bool:
        path = tmp_path / "named.gguf"
        path.write_bytes(header + key[:-8] + struct.pack("<Q", len(name)) + name.encode() + rest + bytes(64))
        options = llama_cpp.llama_model_default_params()
        options.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if model:
            llama_cpp.llama_model_free(model)
        return bool(model)

    runtime.load(artifact.path / artifact.entry, threads=1, context=64)
    assert [name for name in LLAMA_CPP_NAMES if not loads(name)] == []
    assert not loads("nobody")


def test_ideographic_spaces_that_deepseek_coder_splits_otherwise_are_remarked_on(
    tmp_path: Path, runtime: LlamaCppRuntime
) -> None:
    differs = "\u3000&&"
    tokenizer = byte_level([*DEEPSEEK_CODER, digits(), raw_bytes()], often=differs)
    folder = checkpoint(tmp_path / "model", tokenizer)
    [remark] = check_tokenizer(folder, 700)
    assert "U+3000" in remark
    load(runtime, folder, tmp_path)
    assert runtime.tokenize(differs).tolist() != tokenizer.encode(differs).ids


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: data["model"].update(type="Unigram"), "Unigram"),
        (lambda data: data["model"].update(dropout=0.1), "dropout"),
        (lambda data: data["model"].update(merges=[]), "no merges"),
        (lambda data: data.update(normalizer={"type": "Lowercase"}), "Lowercase"),
        (lambda data: data["added_tokens"][0].update(id=900), "beyond the model's 700"),
        (lambda data: data.update(post_processor={"type": "RobertaProcessing"}), "RobertaProcessing"),
        (lambda data: data["model"].update(byte_fallback=True), "byte tokens"),
    ],
)
def test_what_llama_cpp_cannot_do_is_refused(change: Callable[[Any], None], complaint: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", byte_level([words()]))
    data = json.loads((folder / "tokenizer.json").read_text())
    change(data)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=complaint):
        check_tokenizer(folder, 700)


def test_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        check_tokenizer(tmp_path, 700)


def test_normalisation_and_stripping_are_remarked_on(tmp_path: Path) -> None:
    tokenizer = byte_level([split(QWEN2_SPLIT), raw_bytes()])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    remarks = check_tokenizer(checkpoint(tmp_path / "model", tokenizer), 700)
    assert ["NFC" in remarks[1], "<mask>" in remarks[0]] == [True, True]


def test_unused_rows_of_the_embedding_get_names_that_no_token_has(tmp_path: Path) -> None:
    tokenizer = byte_level([words()])
    tokenizer.add_tokens(["[PAD650]"])
    vocabulary = read_vocabulary(checkpoint(tmp_path / "model", tokenizer), 700)
    assert len(set(vocabulary.tokens)) == len(vocabulary.tokens) == 700
    assert vocabulary.types[650] == 5


def test_every_end_of_text_stops_llama_cpp(tmp_path: Path, runtime: LlamaCppRuntime) -> None:
    folder = checkpoint(tmp_path / "model", byte_level([words()]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 40, 41]}))
    load(runtime, folder, tmp_path)
    assert [token for token in range(50) if runtime.ends_text(token)] == [0, 40, 41]


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json", None])
def test_chat_template_is_stored_if_there_is_one(where: str | None, tmp_path: Path, runtime: LlamaCppRuntime) -> None:
    folder = checkpoint(tmp_path / "model", byte_level([words()]))
    if where == "chat_template.jinja":
        (folder / where).write_text(TEMPLATE)
    elif where is not None:
        (folder / where).write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}))
    load(runtime, folder, tmp_path)
    assert runtime.chat_template() == (TEMPLATE if where else None)
