"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from compress.kv import CACHE_TYPES

Command = TypeVar("Command", bound=Callable[..., Any])


ARTIFACT = click.argument("artifact", type=click.Path(path_type=Path))
FORMAT = click.option("--format", "format_", help="Which artifact, where a folder holds more than one.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_SET_HELP = "Change one value of the recipe, as in passes.gptq.damping=0.1; may be repeated."
_CACHE = click.Choice(list(CACHE_TYPES))
_SOURCES = click.Choice(["builtin", "text", "jsonl", "hub"])
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


def _all(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """One decorator of several, in the order in which help shows them."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


recipe_options = _all(
    click.argument("recipe"),
    click.option("--model", help="A folder, .gguf file, hub id or builtin:NAME, instead of the recipe's model."),
    click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=_SET_HELP),
    JSON,
    click.option("--quiet", "-q", is_flag=True, help="Show no progress."),
)
cache_options = _all(
    click.option("--kv-keys", type=_CACHE, default="f16", show_default=True, help="GGUF: of the cache's keys."),
    click.option("--kv-values", type=_CACHE, default="f16", show_default=True, help="GGUF: of the cache's values."),
)
window_options = _all(
    click.option("--window", type=int, help="ONNX: tokens that the cache keeps beside the first ones; else all."),
    click.option("--sinks", type=int, default=4, show_default=True, help="First tokens kept, with --window."),
)


def text_options(split: str) -> Callable[[Command], Command]:
    """Where a text comes from; ``split`` is the usual one of a data set."""
    return _all(
        click.option("--source", type=_SOURCES, default="builtin", show_default=True),
        click.option("--path", type=_FILE, help="text, jsonl: the file."),
        click.option("--name", help="hub: the data set."),
        click.option("--split", default=split, show_default=True, help="hub: the split."),
        click.option("--column", help="jsonl, hub: where the text is; messages with --chat-template, else text."),
        click.option("--chat-template", is_flag=True, help="jsonl, hub: rows are chats, rendered by the model's own."),
        click.option("--encoding", default="utf-8", show_default=True, help="text, jsonl: of the file."),
    )
