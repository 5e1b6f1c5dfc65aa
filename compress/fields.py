"""YAML nodes into frozen dataclasses, by their type hints; and such dataclasses back into plain YAML values.

A field may be bool, int, float, str, Path, ByteSize, QuantScheme, a Literal of texts, ``tuple[X, ...]`` or a union.
Nothing is coerced: 4.0 is no int, true is no number, "4" is text.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NewType

import yaml

from compress.document import TAG, Problems, as_bool, describe, entries, is_null, join
from compress.errors import InputError, nearest
from compress.scheme import QuantScheme

ByteSize = NewType("ByteSize", int)
"""A number of bytes, written ``120MB`` (10**6 each), ``1.5GiB`` (2**30 each) or as a plain number."""

UnknownKey = Callable[[str, type[Any]], str]
"""(key, the class that has no such field) -> what to tell the user."""

_PLAIN_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B", re.IGNORECASE)
_POWERS = {prefix: power for power, prefix in enumerate("kmgt", start=1)}


class _Missing:
    """What :func:`convert` returns when it complained."""


MISSING = _Missing()


def build(cls: type[Any], node: yaml.Node, path: str, problems: Problems, unknown: UnknownKey) -> Any:
    """An instance of the dataclass ``cls`` from a mapping node (or null: all defaults); MISSING if it has problems.

    ``cls`` may refuse values in ``__post_init__`` with ValueError or InputError, one line an offender, written
    ``field: message``.
    """
    hints = field_types(cls)
    written: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    if isinstance(node, yaml.MappingNode):
        written = entries(node, path, problems)
    elif not is_null(node):
        problems.add(node, path, f"expected a mapping of {', '.join(hints) or 'nothing'}, got {describe(node)}")
        return MISSING
    before = len(problems.found)
    values: dict[str, Any] = {}
    broken: set[str] = set()
    for key, (key_node, value_node) in written.items():
        if key not in hints:
            problems.add(key_node, join(path, key), unknown(key, cls))
            continue
        values[key] = convert(hints[key], value_node, join(path, key), problems)
        if values[key] is MISSING:
            broken.add(key)
            del values[key]
    for name in required_fields(cls):
        if name not in written:
            problems.add(node, join(path, name), f"missing; write {name}: {expected(hints[name])}")
        if name not in values:
            return MISSING
    try:
        instance = cls(**values)
    except (ValueError, InputError) as error:
        refusal = f"{error.what} ({error.fix})" if isinstance(error, InputError) and error.fix else str(error)
        for line in refusal.splitlines():
            name, _, text = line.partition(": ")
            if name not in hints:
                problems.add(node, path, line)
            elif name not in broken:
                problems.add(written[name][1] if name in written else node, join(path, name), text)
        return MISSING
    return instance if len(problems.found) == before else MISSING


def convert(hint: Any, node: yaml.Node, path: str, problems: Problems) -> Any:
    """The value of a node as the type ``hint``; MISSING if it is none, after a complaint."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(hint, node, path, problems)
    if origin is tuple and arguments[1:] == (...,):
        if not isinstance(node, yaml.SequenceNode):
            advice = f": write [{node.value}]" if isinstance(node, yaml.ScalarNode) and not is_null(node) else ""
            problems.add(node, path, f"expected {expected(hint)}, got {describe(node)}{advice}")
            return MISSING
        items = [convert(arguments[0], item, f"{path}[{index}]", problems) for index, item in enumerate(node.value)]
        return MISSING if MISSING in items else tuple(items)
    try:
        if origin is typing.Literal:
            return _literal(node, hint)
        return _SCALARS[hint](node)
    except (ValueError, OverflowError) as error:
        problems.add(node, path, str(error))
        return MISSING
    except KeyError as error:
        raise TypeError(f"{path}: a recipe cannot write a {hint}") from error


def expected(hint: Any) -> str:
    """What a value of this type looks like, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(expected(member) for member in arguments if member is not types.NoneType)
    if origin is tuple:
        return f"a list, each {expected(arguments[0])}"
    if origin is typing.Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    return _WORDS.get(hint, str(hint))


def field_types(cls: type[Any]) -> dict[str, Any]:
    """Field name -> evaluated type hint of a dataclass, in its order.

    Only the fields' own hints are evaluated: others (``ClassVar``) may name what only a type checker imports.
    """
    hints: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        owner = next(base for base in cls.__mro__ if item.name in inspect.get_annotations(base))
        holder = types.SimpleNamespace(__annotations__={item.name: item.type})
        hints[item.name] = typing.get_type_hints(holder, vars(sys.modules[owner.__module__]))[item.name]
    return hints


def required_fields(cls: type[Any]) -> list[str]:
    """The fields of a dataclass that have no default."""
    return [
        item.name
        for item in dataclasses.fields(cls)
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]


def plain(value: Any) -> Any:
    """A dataclass instance or a field's value as YAML can write it: what :func:`build` reads back to an equal one."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type | QuantScheme):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, QuantScheme | Path) else value


def _convert_union(hint: Any, node: yaml.Node, path: str, problems: Problems) -> Any:
    members = list(typing.get_args(hint))
    if types.NoneType in members:
        if is_null(node):
            return None
        members.remove(types.NoneType)
    attempts = [Problems() for _ in members]
    for member, attempt in zip(members, attempts, strict=True):
        value = convert(member, node, path, attempt)
        if value is not MISSING:
            return value
    first = attempts[0].found[0]
    if len(members) > 1:
        was = f"expected {expected(members[0])}"
        rest = ", or " + " or ".join(map(expected, members[1:]))
        text = first.text.replace(was, f"expected {expected(hint)}") if was in first.text else first.text + rest
        first = dataclasses.replace(first, text=text)
    problems.found.extend([first, *attempts[0].found[1:]])
    return MISSING


def _scalar(node: yaml.Node, kinds: tuple[str, ...], hint: Any) -> str:
    """The text of a scalar of one of these YAML kinds; ValueError with what would be right."""
    if isinstance(node, yaml.ScalarNode) and node.tag.removeprefix(TAG) in kinds:
        return str(node.value)
    raise ValueError(f"expected {expected(hint)}, got {describe(node)}{_advice(node, hint)}")


def _advice(node: yaml.Node, hint: Any) -> str:
    if not isinstance(node, yaml.ScalarNode):
        return ""
    kind, text = node.tag.removeprefix(TAG), str(node.value)
    if hint in (str, Path) and kind in ("int", "float", "bool", "timestamp"):
        return f": put it in quotes, '{text}'"
    if hint not in (int, float) or kind not in ("str", "float"):
        return ""
    with suppress(ValueError, OverflowError):
        written = _decimal(float(text), hint)
        if node.style is None and kind == "str" and _EXPONENT.fullmatch(text):
            return f": YAML reads {text} as text, write {written}"
        return f": write {written}" + (" without quotes" if kind == "str" else "")
    return ""


def _decimal(number: float, hint: Any) -> str:
    """How a recipe writes a number; ValueError or OverflowError where it cannot be one of type ``hint``."""
    if hint is int:
        if not number.is_integer():
            raise ValueError(number)
        return str(int(number))
    if not math.isfinite(number):
        raise ValueError(number)
    return str(yaml.safe_dump(number)).split("\n", maxsplit=1)[0]


def _integer(node: yaml.Node) -> int:
    text = _scalar(node, ("int",), int)
    if not _PLAIN_INT.fullmatch(text):
        # YAML 1.1 reads 010 as 8 and 1:30 as 90: nobody means that here.
        raise ValueError(f"expected a whole number, got {text}: write decimal digits without a leading zero")
    return int(text)


def _number(node: yaml.Node) -> float:
    text = _scalar(node, ("int", "float"), float).replace("_", "")
    if node.tag == f"{TAG}int":
        return float(_integer(node))
    # YAML 1.1 reads 1:30.5 as 90.5 and knows .nan and .inf: nobody means those here.
    number = math.nan if ":" in text or text.lower().endswith(("nan", "inf")) else float(text)
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number in decimal digits, got {text}")
    return number


def _boolean(node: yaml.Node) -> bool:
    _scalar(node, ("bool",), bool)
    return as_bool(node)


def _text(node: yaml.Node) -> str:
    return _scalar(node, ("str",), str)


def _path(node: yaml.Node) -> Path:
    text = _scalar(node, ("str",), Path)
    if not text or "\0" in text:
        raise ValueError(f"expected a path, got {describe(node)}")
    return Path(text)


def _scheme(node: yaml.Node) -> QuantScheme:
    return QuantScheme.parse(_scalar(node, ("str",), QuantScheme))


def _byte_size(node: yaml.Node) -> ByteSize:
    if node.tag == f"{TAG}int":
        number = _integer(node)
        if number < 0:
            raise ValueError(f"expected {_WORDS[ByteSize]}, got {number}")
        return ByteSize(number)
    text = _scalar(node, ("str",), ByteSize)
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected {_WORDS[ByteSize]}, got '{text}'")
    prefix = (match[2] or "").lower()
    base = 1024 if prefix.endswith("i") else 1000
    return ByteSize(round(float(match[1]) * base ** _POWERS.get(prefix[:1], 0)))


def _literal(node: yaml.Node, hint: Any) -> str:
    text, choices = _scalar(node, ("str",), hint), typing.get_args(hint)
    if text not in choices:
        raise ValueError(f"expected {expected(hint)}, got {describe(node)}{nearest(text, choices)}")
    return text


_SCALARS: Mapping[Any, Callable[[yaml.Node], Any]] = types.MappingProxyType(
    {
        bool: _boolean,
        int: _integer,
        float: _number,
        str: _text,
        Path: _path,
        QuantScheme: _scheme,
        ByteSize: _byte_size,
    }
)
_WORDS: Mapping[Any, str] = types.MappingProxyType(
    {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        Path: "a path",
        QuantScheme: "a scheme such as int4-g32",
        ByteSize: "a size such as 120MB or 1.5GiB",
    }
)
