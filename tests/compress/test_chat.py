"""Answers in the real runtimes against transformers' own, templates against its renderer, streaming of odd bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.errors import CompressError, InputError
from compress.models.topology import FAMILIES
from compress.protocols import Artifact
from compress.runner.chat import ChatSession, Sampling, choose
from compress.runner.template import render
from compress.runner.text import FolderText
from tests.compress.exported import FORMATS, export
from tests.support import SENTENCE, TEMPLATE, tiny_tokenizer

MESSAGES = [
    {"role": "user", "content": "The quick brown fox"},
    {"role": "assistant", "content": "jumps"},
    {"role": "user", "content": "over seven lazy dogs"},
]


@pytest.fixture(autouse=True)
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spinning threads collapse on a machine that does other work at the same time."""
    monkeypatch.setenv("EDGEPRESS_NO_SPIN", "1")


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Artifact]]:
    """Weights that fp16 holds exactly, unquantised: both formats then compute what transformers computes."""
    folder = tmp_path_factory.mktemp("chat")

    return folder, export_float(folder, lambda parameters: None)


def export_float(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> dict[str, Artifact]:
    """Two blocks, every weight an fp16 number; a vocabulary of exactly the tokenizer's size."""

    def halve(parameters: dict[str, torch.Tensor]) -> None:
        for parameter in parameters.values():
            parameter.copy_(parameter.half())
        edit(parameters)

    layers = [f"model.layers.{index}.{name}" for index in range(2) for name in FAMILIES["llama"].linears.values()]
    return export(folder, plan=dict.fromkeys(layers), ends=None, edit=halve, vocab_size=281)


def transformers_answer(folder: Path, messages: Sequence[dict[str, str]], count: int) -> tuple[str, list[int]]:
    """Greedy continuation by transformers: its template, its tokenizer, its model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    tokens: list[int] = []
    with torch.no_grad():
        for _ in range(count):
            token = int(model(ids).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            tokens.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    return tokenizer.decode(tokens), tokens


@pytest.mark.parametrize("format", FORMATS)
def test_a_greedy_answer_equals_transformers(float_model: tuple[Path, dict[str, Artifact]], format: str) -> None:
    folder, artifacts = float_model
    expected, tokens = transformers_answer(folder / "model", MESSAGES, 12)
    assert len(tokens) == 12
    with ChatSession(artifacts[format].path, threads=1) as session:
        first = "".join(session.reply(MESSAGES, max_tokens=12))
        assert session.finish_reason == "length"
        again = "".join(session.reply(MESSAGES, max_tokens=12))
    assert first == again == expected


@pytest.mark.parametrize("format", FORMATS)
def test_an_answer_ends_at_the_end_token(
    float_model: tuple[Path, dict[str, Artifact]], format: str, tmp_path: Path
) -> None:
    _, tokens = transformers_answer(float_model[0] / "model", MESSAGES, 12)
    stop = next(index for index in range(2, 12) if tokens[index] not in tokens[:index])

    def favour_the_end(parameters: dict[str, torch.Tensor]) -> None:
        # The end token now wins wherever that token won.
        parameters["lm_head.weight"][0] = parameters["lm_head.weight"][tokens[stop]] * 2

    artifacts = export_float(tmp_path, favour_the_end)
    expected, shorter = transformers_answer(tmp_path / "model", MESSAGES, 12)
    assert len(shorter) <= stop
    with ChatSession(artifacts[format].path, threads=1) as session:
        assert "".join(session.reply(MESSAGES, max_tokens=12)) == expected
        assert session.finish_reason == "stop"


@pytest.mark.parametrize("format", FORMATS)
def test_the_context_ends_an_answer_or_refuses_it(float_model: tuple[Path, dict[str, Artifact]], format: str) -> None:
    path = float_model[1][format].path
    with ChatSession(path, threads=1) as session:
        assert session.context == 256
        length = len(session._prompt(MESSAGES))
    with ChatSession(path, threads=1, context=length + 3) as session:
        pieces = "".join(session.reply(MESSAGES, max_tokens=50))
        assert pieces
        assert session.finish_reason == "context"
        with pytest.raises(InputError, match=f"the context {length + 3}"):
            session.reply([*MESSAGES, {"role": "user", "content": SENTENCE}])
    for context in (1, 257):
        with pytest.raises(InputError, match="must be 2 to 256"):
            ChatSession(path, threads=1, context=context)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    return export(tmp_path_factory.mktemp("plain"), chat_template=None)


@pytest.mark.parametrize("format", FORMATS)
def test_without_a_template_only_raw_text_is_continued(plain_model: dict[str, Artifact], format: str) -> None:
    path = plain_model[format].path
    with pytest.raises(InputError, match="no chat template") as caught:
        ChatSession(path, threads=1)
    assert "--raw" in caught.value.fix
    with ChatSession(path, threads=1, raw=True) as session:
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=5)
        texts = ["".join(session.reply(MESSAGES[:1], 8, sampling)) for _ in range(2)]
        assert texts[0] == texts[1]
        assert texts[0] != "".join(session.reply(MESSAGES[:1], 8, Sampling(temperature=0.8, seed=6)))
        with pytest.raises(InputError, match="is empty"):
            session.reply([{"role": "user", "content": ""}])
        with pytest.raises(InputError, match="max_tokens is 0"):
            session.reply(MESSAGES, max_tokens=0)


@pytest.mark.parametrize("format", FORMATS)
def test_streamed_pieces_are_whole_characters(plain_model: dict[str, Artifact], format: str) -> None:
    text = "naïve 🦊 — jumps 日本語 over"
    with ChatSession(plain_model[format].path, threads=1, raw=True) as session:
        tokens = session._text.encode(text, add_special=False)
        stream = session._text.pieces()
        pieces = [stream.push(int(token)) for token in tokens]
        assert "".join(pieces) == text
        assert stream.end() == ""
        assert "\ufffd" not in "".join(pieces)
        assert len(tokens) > len(text)
        cut = session._text.pieces()
        fox = session._text.encode("a🦊", add_special=False)[:-1]
        assert "".join(cut.push(int(token)) for token in fox) == "a"
        assert "\ufffd" in cut.end()


def test_sentencepiece_spaces_survive_streaming(tmp_path: Path) -> None:
    """Decoders of this kind strip the first space of a text, which is every space when tokens come one by one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "▁The", "▁quick", "▁fox", "es", *(f"<0x{byte:02X}>" for byte in "é".encode())]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    stream = FolderText(tmp_path).pieces()
    assert [stream.push(token) for token in (1, 2, 3, 4, 5, 6, 2)] == ["The", " quick", " fox", "es", "", "é", " quick"]


TEMPLATES = {
    "plain": TEMPLATE,
    "chatml": (
        "{% for message in messages %}\n"
        "    {% if loop.first and messages[0]['role'] != 'system' %}\n"
        "        {{- '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}\n"
        "    {% endif %}\n"
        "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "markers": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{% if tools is defined %}tools{% endif %}",
    "loops": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "year": "{{ strftime_now('%Y') }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_transformers_does(name: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, TEMPLATES[name])
    messages = [*MESSAGES, {"role": "user", "content": ' é <b> "quoted" '}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    text = FolderText(tmp_path)
    assert text.template is not None
    assert render(text.template, messages, text.markers) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "cannot be applied"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_an_input_error(template: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        render(template, MESSAGES, {})


def write_text_files(folder: Path, **files: Any) -> FolderText:
    tiny_tokenizer(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return FolderText(folder)


def test_end_tokens_are_collected_from_every_file(tmp_path: Path) -> None:
    text = write_text_files(
        tmp_path,
        generation_config={"eos_token_id": [7, 8]},
        config={"eos_token_id": 9, "max_position_embeddings": 128},
        genai_config={"model": {"eos_token_id": 11, "context_length": 64}},
    )
    assert [token for token in range(20) if text.ends(token)] == [0, 7, 8, 9, 11]
    assert text.context == 64


def test_an_end_of_turn_that_no_config_names_still_ends_it(tmp_path: Path) -> None:
    text = write_text_files(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 281, "content": "<|im_end|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert not text.ends(281)
    assert FolderText(tmp_path).ends(281)


def test_a_template_in_the_tokenizer_config_is_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    for stored, expected in (("inline", "inline"), (named, "usual"), (None, None)):
        text = write_text_files(tmp_path, tokenizer_config={"chat_template": stored, "bos_token": {"content": "<s>"}})
        assert (text.template, text.markers) == (expected, {"bos_token": "<s>"})


def test_missing_and_damaged_text_files_are_named(plain_model: dict[str, Artifact], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(plain_model["onnx"].path, folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="this is not JSON") as caught:
        ChatSession(folder, threads=1, raw=True)
    assert caught.value.where.endswith("config.json")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        ChatSession(folder, threads=1, raw=True)


def test_choices_follow_temperature_and_top_p() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(probabilities).astype(np.float32)[[2, 0, 3, 1]]
    assert choose(logits, Sampling(), np.random.default_rng(0)) == 1

    def shares(sampling: Sampling) -> np.ndarray:
        rng = np.random.default_rng(0)
        picks = [choose(logits, sampling, rng) for _ in range(4000)]
        return np.bincount(picks, minlength=4)[[1, 3, 0, 2]] / 4000

    np.testing.assert_allclose(shares(Sampling(temperature=1.0)), probabilities, atol=0.03)
    np.testing.assert_allclose(shares(Sampling(1.0, top_p=0.7)), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(Sampling(1.0, top_p=0.01)), [1, 0, 0, 0])
    squared = probabilities**2 / (probabilities**2).sum()
    np.testing.assert_allclose(shares(Sampling(temperature=0.5)), squared, atol=0.03)


def test_nonsense_is_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)temperature is -1.*top_p is 0"):
        Sampling(temperature=-1, top_p=0)
    with pytest.raises(CompressError, match="not finite"):
        choose(np.array([0, np.nan], dtype=np.float32), Sampling(), np.random.default_rng(0))
