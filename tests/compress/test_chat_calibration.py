"""Chats as calibration text: rendered by the model's own template, tokenised once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compress import engine
from compress.__main__ import main
from compress.errors import InputError
from compress.models.sources import open_model
from compress.recipe import Calibration, Evaluate
from compress.texts import token_windows
from tests.compress.runs import Bench, sentences
from tests.support import TEMPLATE, tiny_llama, tiny_tokenizer

STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<turn>{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"
)


def chat(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": sentences(number, 5)},
        {"role": "assistant", "content": sentences(number + 50, 7)},
    ]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts a begin token before every text, and a template that writes it itself."""
    from tokenizers.processors import TemplateProcessing

    folder = tiny_llama(tmp_path_factory.mktemp("chat") / "model")
    tokenizer = tiny_tokenizer(folder, STRICT)
    tokenizer.add_special_tokens({"bos_token": "<begin>", "additional_special_tokens": ["<turn>"]})
    begin = tokenizer.convert_tokens_to_ids("<begin>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<begin> $A", None, [("<begin>", begin)])
    tokenizer.save_pretrained(folder)
    return folder


def test_special_tokens_are_parsed_and_none_is_doubled(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [chat(number) for number in range(4)]
    path = write(tmp_path / "chats.jsonl", *({"messages": messages} for messages in chats))
    section = Calibration("jsonl", path, chat_template=True, samples=4, sequence_length=200, packing=False)
    windows = token_windows(open_model(str(model)), section, "calibration")
    assert windows.lengths is not None
    for messages, window, length in zip(chats, windows.tokens, windows.lengths.tolist(), strict=True):
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert window[:length].tolist() == ids
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids.count(tokenizer.convert_tokens_to_ids("<turn>")) == 2
        assert ids.count(tokenizer.eos_token_id) == 2
    assert "chat template" in windows.audit["origin"]


def test_packed_chats_are_the_rendered_texts_one_after_the_other(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    path = write(tmp_path / "chats.jsonl", *({"messages": chat(number)} for number in range(3)))
    section = Evaluate("jsonl", path, chat_template=True, windows=1, sequence_length=64)
    windows = token_windows(open_model(str(model)), section, "evaluation")
    joined: list[int] = []
    for number in range(3):
        ids = tokenizer.apply_chat_template(chat(number), tokenize=True, return_dict=False)
        joined += [*ids, tokenizer.eos_token_id]
    assert windows.tokens[0].tolist() == joined[:64]


def test_what_the_template_refuses_is_named_by_its_line(bench: Bench, model: Path, tmp_path: Path) -> None:
    wrong = chat(1)[::-1]
    path = write(tmp_path / "chats.jsonl", {"messages": chat(1)}, {"messages": wrong}, {"messages": chat(2) + wrong})
    text = f"{{source: jsonl, path: {path}, chat_template: true, samples: 1, sequence_length: 16}}"
    with pytest.raises(InputError) as caught:
        engine.plan(bench.recipe(model=str(model), passes="[gptq]", calibration=text))
    assert caught.value.where == str(path)
    assert caught.value.what.splitlines() == [
        f"line {line}: 'messages' is refused by the chat template: roles must alternate" for line in (2, 3)
    ]


@pytest.mark.parametrize("section", ["calibration", "evaluate"])
def test_a_tokenizer_without_a_template_is_refused_with_what_to_do(bench: Bench, tmp_path: Path, section: str) -> None:
    path = write(tmp_path / "chats.jsonl", {"messages": chat(1)})
    count = "samples" if section == "calibration" else "windows"
    text = f"{{source: jsonl, path: {path}, chat_template: true, {count}: 1, sequence_length: 16}}"
    with pytest.raises(InputError, match="no chat template") as caught:
        engine.plan(bench.recipe(passes="[gptq]", **{section: text}))
    assert caught.value.where == str(bench.model)
    assert f"remove {section}.chat_template, or put" in caught.value.fix


def test_eval_takes_chats_too(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "chats.jsonl", {"messages": chat(1)})
    options = ["--source", "jsonl", "--path", str(path), "--chat-template", "--windows", "1", "--sequence-length", "8"]
    assert main(["eval", str(bench.finished("rtn").out / "gguf"), "--reference", str(bench.model), *options]) == 2
    # The option arrives; this tokenizer has no template.
    assert "remove evaluate.chat_template" in capsys.readouterr().err


def test_a_run_on_chats_and_on_what_users_say(bench: Bench, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", chat_template=TEMPLATE)
    rows = [{"messages": chat(number), "question": sentences(number, 6)} for number in range(20)]
    path = write(tmp_path / "chats.jsonl", *rows, {"messages": None, "question": None})
    origins = set()
    for column in ("messages", "question"):
        text = (
            f"{{source: jsonl, path: {path}, chat_template: true, column: {column}, samples: 4, sequence_length: 32}}"
        )
        report = engine.run(
            bench.recipe(model=str(folder), passes="[gptq]", calibration=text), tmp_path / f"run-{column}"
        )
        assert report.calibration["obtained_samples"] == 4
        assert report.calibration["dropped"] == {"null_rows": 1}
        origins.add(report.calibration["tokens_sha256"])
    assert len(origins) == 2
