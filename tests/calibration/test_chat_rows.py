"""Rows that are chats: what is rendered, what is dropped, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calibration.chat import conversation
from calibration.errors import DataError
from calibration.text import Texts, TextSource, load_texts

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]


def render(messages: list[dict[str, Any]]) -> str:
    if messages[0]["role"] == "assistant":
        raise ValueError("is refused by the chat template: the user speaks first")
    return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def loaded(folder: Path, *rows: Any, column: str | None = None) -> Texts:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_texts(TextSource("jsonl", path, column=column, chat_template=True), "calibration", render)


def test_messages_are_rendered_and_a_text_is_what_a_user_says(tmp_path: Path) -> None:
    assert loaded(tmp_path, {"messages": HELLO}).texts == ("<user>Hello<assistant>Good day",)
    found = loaded(tmp_path, {"text": "Hi"}, {"text": HELLO}, column="text")
    assert found.texts == ("<user>Hi", "<user>Hello<assistant>Good day")
    assert found.origin.endswith("chats.jsonl, rendered by the chat template")


def test_rows_of_nothing_are_dropped_and_counted(tmp_path: Path) -> None:
    found = loaded(tmp_path, {"messages": None}, {"messages": []}, {"messages": "  "}, {"messages": HELLO})
    assert len(found.texts) == 1
    assert found.dropped == {"null_rows": 1, "empty_rows": 2}


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (3, "holds int, neither text nor a list of messages"),
        (["Hi"], "message 1 is str, not a mapping of role and content"),
        ([*HELLO, {"from": "human", "value": "Hi"}], "message 3 has no text 'role'; it has: from, value"),
        ([{"role": "user", "content": None}], "message 1 has no text 'content'; it has: role, content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1 has no text 'content'"),
        (HELLO[1:], "is refused by the chat template: the user speaks first"),
        ([{"role": "user", "content": "a\0"}], "has a NUL character"),
    ],
)
def test_what_is_no_chat_is_refused_with_its_line(tmp_path: Path, value: Any, complaint: str) -> None:
    with pytest.raises(DataError) as caught:
        loaded(tmp_path, {"messages": HELLO}, {"messages": value}, {"messages": value})
    lines = caught.value.what.splitlines()
    assert [line.split(":")[0] for line in lines] == ["line 2", "line 3"]
    assert all(f"'messages' {complaint}" in line for line in lines)


def test_messages_without_the_template_say_what_they_need(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"text": HELLO}) + "\n")
    with pytest.raises(DataError, match=r"not text \(messages need chat_template: true\)"):
        load_texts(TextSource("jsonl", path), "calibration")


def test_a_missing_column_lists_the_columns_there_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'messages' \(line 1\); columns: text"):
        loaded(tmp_path, {"text": "Hi"})


def test_other_keys_of_a_message_reach_the_template() -> None:
    message = {"role": "user", "content": "Hi", "name": "Ada"}
    assert conversation([message]) == [message]


def test_a_folder_in_a_layout_of_the_hub_may_hold_chats(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in ({"messages": HELLO}, {"messages": HELLO[:1]}))
    )
    source = TextSource("hub", name=str(tmp_path), chat_template=True)
    assert load_texts(source, "calibration", render).texts == ("<user>Hello<assistant>Good day", "<user>Hello")
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": HELLO[1:]}) + "\n")
    with pytest.raises(DataError, match="row 0: 'messages' is refused by the chat template"):
        load_texts(source, "calibration", render)
