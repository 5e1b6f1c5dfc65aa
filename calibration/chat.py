"""Chats as calibration text: rows of messages, rendered by the model's own template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Render = Callable[[list[dict[str, Any]]], str]
"""Messages, each with role and content, to the text that the model is given; ValueError says why there is none."""


def conversation(value: object) -> list[dict[str, Any]]:
    """The messages of a row: a list of mappings with the texts ``role`` and ``content``; a text is a user's message.

    Raises:
        ValueError: the value is neither, with the message that is not.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"holds {type(value).__name__}, neither text nor a list of messages")
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {number} is {type(message).__name__}, not a mapping of role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"message {number} has no text '{key}'; it has: {', '.join(map(str, message))}")
    return [dict(message) for message in value]
