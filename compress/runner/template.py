"""Chat templates: Jinja that comes with a model, so it runs in Jinja's sandbox, with what transformers offers it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from compress.errors import InputError

Message = Mapping[str, str]
"""``{"role": "user", "content": "..."}``."""


def render(template: str, messages: Sequence[Message], markers: Mapping[str, str]) -> str:
    """The prompt of ``messages`` with the opening of the assistant's turn; ``markers`` are bos_token and the like.

    InputError when the template does not compile, does what the sandbox forbids, or itself refuses the messages.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    # Templates ask for tools and documents by "is none" as well as by "is defined": transformers always passes them.
    values = {"tools": None, "documents": None, "add_generation_prompt": True, **markers}
    try:
        return environment.from_string(template).render(messages=[dict(message) for message in messages], **values)
    except TemplateError as error:
        raise InputError(f"the model's chat template cannot be applied: {error}", where="chat template") from error


class _GenerationTag(Extension):
    """``{% generation %}`` marks for training what the assistant said; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)
