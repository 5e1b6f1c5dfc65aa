"""A YAML file as nodes that know their line, and overrides put into it. What the keys mean is not known here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from compress.errors import InputError

TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, order=True)
class Problem:
    """One complaint. ``line`` counts from 1; 0 where ``name`` is a command-line argument and not a file."""

    line: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}:{self.line}: {self.text}" if self.line else f"{self.name}: {self.text}"


@dataclass
class Problems:
    """Complaints about one document, collected so that the user hears of all at once."""

    found: list[Problem] = field(default_factory=list)

    def add(self, node: yaml.Node, path: str, message: str) -> None:
        """Complain about ``node``, which stands at the key path ``path``."""
        line = 0 if node.start_mark.name.startswith("--") else node.start_mark.line + 1
        self.found.append(Problem(line, node.start_mark.name, f"{path}: {message}" if path else message))

    def raise_if_any(self) -> None:
        """One InputError with one line a complaint, in the order of the file."""
        if self.found:
            raise InputError("\n".join(dict.fromkeys(map(str, sorted(self.found)))))


def read_text(path: Path) -> str:
    """The UTF-8 text of a file without its byte order mark; InputError says why it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            where=f"{path}:{line}",
            fix="save the file as UTF-8",
        ) from error


def parse(text: str, name: str) -> yaml.Node | None:
    """The root node of one YAML document, None if it is empty; InputError with the line where it is not YAML."""
    try:
        loader = yaml.SafeLoader(text)
        loader.name = name
        root: yaml.Node | None = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        # The reader keeps the offending character as its code point.
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise InputError(f"the character U+{code:04X} is not allowed in YAML", where=_at(name, line)) from error
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, name) from error
    except RecursionError as error:
        raise InputError("nested too deeply", where=name) from error
    return root


def null(name: str) -> yaml.ScalarNode:
    """The node of a value that is not written."""
    mark = yaml.Mark(name, 0, 0, 0, None, 0)
    return yaml.ScalarNode(f"{TAG}null", "", mark, mark)


def is_null(node: yaml.Node) -> bool:
    """Whether this is YAML's null: nothing, ``~`` or ``null``."""
    return bool(node.tag == f"{TAG}null")


def describe(node: yaml.Node) -> str:
    """What is written there, in words: ``the text 'x'``, ``the number 4.0``, ``true``, ``a list``, ``nothing``."""
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if is_null(node):
        return "nothing"
    kind = node.tag.removeprefix(TAG)
    if kind == "bool":
        word = "true" if as_bool(node) else "false"
        return word if node.value.lower() == word else f"{word} (YAML reads an unquoted {node.value} so)"
    words = {"str": "the text '{}'", "int": "the number {}", "float": "the number {}", "timestamp": "the date {}"}
    return words.get(kind, "'{}' with the tag " + node.tag).format(node.value)


def locate(node: yaml.Node) -> str:
    """``file:line`` of a node, or the command-line argument that wrote it."""
    return _at(node.start_mark.name, node.start_mark.line + 1)


def child(node: yaml.Node, key: str) -> yaml.Node:
    """The value under ``key`` of a mapping; the mapping itself where it has no such key."""
    return next((value for name, value in node.value if name.value == key), node)


def is_bool(node: yaml.Node) -> bool:
    """Whether YAML 1.1 reads this node as a boolean: true, yes, on, false, no, off."""
    return bool(node.tag == f"{TAG}bool")


def as_bool(node: yaml.Node) -> bool:
    """The value of a node that YAML 1.1 reads as a boolean."""
    return node.value.lower() in ("true", "yes", "on")


def entries(node: yaml.MappingNode, path: str, problems: Problems) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """Key -> (key node, value node); complains of duplicate keys and of keys that are no text."""
    found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in node.value:
        if key.tag == f"{TAG}merge":
            problems.add(key, join(path, "<<"), "merge keys are not supported; write the keys out")
        elif key.tag != f"{TAG}str":
            problems.add(key, path, f"a key must be text, got {describe(key)}; put it in quotes if it is meant so")
        elif key.value in found:
            first = found[key.value][0].start_mark.line + 1
            problems.add(key, join(path, key.value), f"written twice, first in line {first}; remove one")
        else:
            found[key.value] = (key, value)
    return found


def join(path: str, key: str) -> str:
    """The key path below ``path``."""
    return f"{path}.{key}" if path else key


@dataclass(frozen=True)
class Override:
    """``key.path=value`` from the command line. ``name`` is how messages call it."""

    steps: tuple[str, ...]
    value: yaml.Node
    name: str

    @classmethod
    def parse(cls, text: str, option: str = "--set") -> Override:
        """Read ``passes.0.gptq.damping=0.1``; the value is YAML. Below ``pin`` everything is one key: a pattern."""
        name = f"{option} {text}"
        path, equals, value = text.partition("=")
        steps = path.strip().split(".", 1) if path.startswith("pin.") else path.strip().split(".")
        if not equals or not all(steps):
            raise InputError("not an override", where=name, fix="write --set key.path=value")
        return cls(tuple(steps), parse(value, name) or null(name), name)

    @classmethod
    def literal(cls, key: str, text: str, option: str) -> Override:
        """Put ``text`` as it is, not as YAML, under a top-level key."""
        name = f"{option} {text}"
        return cls((key,), retag(null(name), "str", text), name)

    def apply(self, root: yaml.MappingNode) -> yaml.MappingNode:
        """A document with the value put in; InputError names the override where its path leads nowhere."""
        return _put_in_mapping(root, self.steps, self, "")


def retag(node: yaml.Node, kind: str, value: str) -> yaml.ScalarNode:
    """A scalar of another kind and value at the same place."""
    return yaml.ScalarNode(f"{TAG}{kind}", value, node.start_mark, node.end_mark)


def _put(node: yaml.Node | None, steps: Sequence[str], override: Override, trail: str) -> yaml.Node:
    # Nodes are rebuilt, not changed: an alias may share them with another key.
    if not steps:
        return override.value
    if node is None or is_null(node):
        node = _mapping([], null(override.name))
    if isinstance(node, yaml.MappingNode):
        return _put_in_mapping(node, steps, override, trail)
    if isinstance(node, yaml.SequenceNode):
        return _put_in_list(node, steps, override, trail)
    raise InputError(f"{trail} is {describe(node)}, which has no '{steps[0]}' below it", where=override.name)


def _put_in_mapping(node: yaml.MappingNode, steps: Sequence[str], override: Override, trail: str) -> yaml.MappingNode:
    step, rest = steps[0], steps[1:]
    path = join(trail, step)
    pairs = [(key, _put(value, rest, override, path) if key.value == step else value) for key, value in node.value]
    if all(key.value != step for key, _ in pairs):
        pairs.append((retag(null(override.name), "str", step), _put(None, rest, override, path)))
    return _mapping(pairs, node)


def _put_in_list(node: yaml.SequenceNode, steps: Sequence[str], override: Override, trail: str) -> yaml.Node:
    step, rest = steps[0], steps[1:]
    items = list(node.value)
    names = [_item_name(item) for item in items]
    if step.isdecimal():
        place, inner = int(step), rest
        if place >= len(items):
            raise InputError(
                f"{trail} has {len(items)} entries, so no {trail}.{step}; they count from 0", where=override.name
            )
        if rest and names[place] not in (None, rest[0]):
            raise InputError(f"{trail}.{step} is '{names[place]}', not '{rest[0]}'", where=override.name)
    else:
        places = [index for index, name in enumerate(names) if name == step]
        if len(places) != 1:
            known = ", ".join(f"{index} ({name})" for index, name in enumerate(names))
            why = "stands there more than once" if places else "is not there"
            raise InputError(f"{trail} has {known}: '{step}' {why}", where=override.name, fix="give the entry's number")
        place, inner = places[0], steps
    item = items[place]
    if inner and isinstance(item, yaml.ScalarNode) and names[place] is not None:
        item = _mapping([(item, null(override.name))], item)
    items[place] = _put(item, inner, override, f"{trail}.{step}")
    return yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark)


def _item_name(item: yaml.Node) -> str | None:
    """The name of a list entry that is a bare name or a mapping of one key."""
    if isinstance(item, yaml.MappingNode) and len(item.value) == 1:
        item = item.value[0][0]
    return item.value if isinstance(item, yaml.ScalarNode) else None


def _mapping(pairs: list[tuple[yaml.Node, yaml.Node]], at: yaml.Node) -> yaml.MappingNode:
    return yaml.MappingNode(f"{TAG}map", pairs, at.start_mark, at.end_mark)


def _at(name: str, line: int) -> str:
    return name if name.startswith("--") else f"{name}:{line}"


def _syntax_error(error: yaml.MarkedYAMLError, text: str, name: str) -> InputError:
    mark = error.problem_mark or error.context_mark
    number = mark.line if mark else 0
    lines = text.splitlines()
    line = lines[number] if number < len(lines) else ""
    fix = ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        fix = "YAML does not allow tabs for indentation; use spaces"
    elif error.context == "while scanning an alias" or str(error.problem).startswith("found undefined alias"):
        fix = "put text that starts with * in quotes"
    elif error.problem == "mapping values are not allowed here":
        fix = "check the indentation, and put text that contains ': ' in quotes"
    return InputError(f"not YAML: {error.problem}", where=_at(name, number + 1), fix=fix)
