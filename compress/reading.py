"""How a recipe's YAML becomes a :class:`Recipe`: which key means what, and what to say of a wrong one.

Pass and exporter classes come in through a lookup, so that this module knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from calibration.text import TextSource
from compress.document import (
    Override,
    Problems,
    as_bool,
    child,
    describe,
    entries,
    is_bool,
    is_null,
    join,
    locate,
    parse,
    retag,
)
from compress.errors import InputError, nearest
from compress.fields import MISSING, build, convert, field_types
from compress.patterns import compile_pattern
from compress.scheme import FLOAT, QuantScheme
from compress.settings import Calibration, Evaluate, Gates, Measure, Recipe, Step

Kind = Literal["passes", "exporters"]
SECTIONS: Mapping[str, type[Any]] = {
    "calibration": Calibration,
    "measure": Measure,
    "evaluate": Evaluate,
    "gates": Gates,
}
SWITCHABLE = ("measure", "evaluate")
"""The sections that ``false`` switches off."""
STEPS: Mapping[str, Kind] = {"passes": "passes", "export": "exporters"}
ROOT_KEYS = ("model", *SECTIONS, *STEPS, "ignore", "pin")
SCHEME_WORDS = frozenset(
    {
        "bits",
        "wbits",
        "w_bit",
        "num_bits",
        "group_size",
        "grp_size",
        "groupsize",
        "q_group_size",
        "sym",
        "symmetric",
        "asym",
        "asymmetric",
    }
)
"""What other tools call the parts of a scheme."""

Lookup = Callable[[Kind, str], type[Any]]
"""Name -> class of a pass or an exporter; InputError with the known names when there is none."""


def read(text: str, lookup: Lookup, name: str, overrides: Sequence[str], model: str | None) -> Recipe:
    """The recipe in ``text``, called ``name`` in messages; InputError lists all that is wrong with it."""
    root = parse(text, name)
    if root is None or is_null(root):
        raise InputError("an empty recipe", where=name, fix="write at least model, passes and export")
    if not isinstance(root, yaml.MappingNode):
        where = f"{name}:{root.start_mark.line + 1}"
        raise InputError(f"expected a mapping of {', '.join(ROOT_KEYS)}, got {describe(root)}", where=where)
    replacements = [Override.parse(item) for item in overrides]
    if model is not None:
        replacements.append(Override.literal("model", model, "--model"))
    failed: list[InputError] = []
    for replacement in replacements:
        try:
            root = replacement.apply(root)
        except InputError as error:
            failed.append(error)
    if failed:
        raise InputError("\n".join(map(str, failed)))
    return _Reader(root, lookup).read()


@dataclass(frozen=True)
class _Entry:
    """One entry of ``passes`` or ``export`` whose class is known, before its arguments are read."""

    name: str
    cls: type[Any]
    path: str
    key: yaml.Node
    arguments: yaml.Node


class _Reader:
    """Reads one document and collects what is wrong with it."""

    def __init__(self, root: yaml.MappingNode, lookup: Lookup) -> None:
        self.root = root
        self.lookup = lookup
        self.problems = Problems()
        self.written = entries(root, "", self.problems)
        self.steps = {key: self._entries(key) for key in STEPS}
        homes = {"the top level": list(ROOT_KEYS)} | {name: list(field_types(cls)) for name, cls in SECTIONS.items()}
        for step in (*self.steps["passes"], *self.steps["export"]):
            homes.setdefault(f"'{step.name}'", list(field_types(step.cls)))
        self.homes = homes
        """Where -> the keys that belong there, to tell where a misplaced key belongs."""

    def read(self) -> Recipe:
        """The recipe; InputError with all complaints."""
        model = self._model()
        sections = {name: self._section(name) for name in SECTIONS}
        passes, export = (tuple(self._build(step) for step in self.steps[key]) for key in STEPS)
        ignore, pin, where = self._patterns()
        for key, (node, _) in self.written.items():
            if key not in ROOT_KEYS:
                self.problems.add(node, key, self._unknown_at_top(key))
        self._check_gates(sections)
        self._check_formats()
        self.problems.raise_if_any()
        return Recipe(model, passes, export, **sections, ignore=ignore, pin=pin, where=where)

    def _value(self, key: str) -> yaml.Node | None:
        return self.written[key][1] if key in self.written else None

    def _model(self) -> str:
        node, example = self._value("model"), "builtin:smollm2-135m, a folder or a hub id"
        if node is None:
            self.problems.add(self.root, "model", f"missing; write model: {example}")
            return ""
        model = convert(str, node, "model", self.problems)
        if model is not MISSING and not model.strip():
            self.problems.add(node, "model", f"empty; write {example}")
        return str(model)

    def _section(self, name: str) -> Any:
        cls, node = SECTIONS[name], self._value(name)
        if node is None:
            return cls()
        if name in SWITCHABLE and is_null(node):
            self.problems.add(node, name, "got nothing: write {} for the defaults, or false to switch it off")
            return cls()
        if name in SWITCHABLE and is_bool(node) and not as_bool(node):
            return None
        section = build(cls, node, name, self.problems, self._unknown)
        if isinstance(section, TextSource) and section.path is not None and not _found(section.path):
            what = f"'{section.path}' does not exist; paths start at {Path.cwd()}"
            self.problems.add(child(node, "path"), f"{name}.path", what)
        return section

    def _entries(self, key: str) -> list[_Entry]:
        node, example = self._value(key), f"{key}: [{'rtn' if key == 'passes' else 'onnx'}]"
        if node is None:
            self.problems.add(self.root, key, f"missing; write {example}")
            return []
        if not isinstance(node, yaml.SequenceNode):
            self.problems.add(node, key, f"expected a list, got {describe(node)}; write {example}")
            return []
        if not node.value:
            self.problems.add(node, key, f"an empty list; write {example}")
        found = [self._entry(key, f"{key}[{index}]", item) for index, item in enumerate(node.value)]
        return [entry for entry in found if entry is not None]

    def _entry(self, key: str, path: str, item: yaml.Node) -> _Entry | None:
        name_node, arguments = item, retag(item, "null", "")
        others: list[tuple[yaml.Node, yaml.Node]] = []
        if isinstance(item, yaml.MappingNode) and item.value:
            (name_node, arguments), *others = item.value
        if not isinstance(name_node, yaml.ScalarNode) or not name_node.tag.endswith(":str"):
            self.problems.add(item, path, f"expected a name, or a name with arguments, got {describe(name_node)}")
            return None
        name = name_node.value
        try:
            cls = self.lookup(STEPS[key], name)
        except InputError as error:
            self.problems.add(name_node, path, self._unknown_step(key, name, error))
            return None
        for other, _ in others:
            inside = other.value in field_types(cls)
            advice = f"indent it to stand below '{name}'" if inside else "start a new entry with '- '"
            self.problems.add(other, path, f"{describe(other)} stands beside '{name}': {advice}")
        return _Entry(name, cls, f"{path}.{name}", name_node, arguments)

    def _build(self, step: _Entry) -> Step:
        value = build(step.cls, step.arguments, step.path, self.problems, self._unknown)
        return Step(step.name, value, where=f"{locate(step.key)}: {step.path}")

    def _patterns(self) -> tuple[tuple[str, ...], dict[str, QuantScheme | None], dict[str, str]]:
        node = self._value("ignore")
        ignore: tuple[str, ...] = ()
        nodes: list[tuple[str, yaml.Node, str]] = []
        if node is not None and not is_null(node):
            read = convert(tuple[str, ...], node, "ignore", self.problems)
            if read is not MISSING:
                ignore = read
                nodes = [(ignore[i], item, f"ignore[{i}]") for i, item in enumerate(node.value)]
        pin, pin_nodes = self._pins()
        where: dict[str, str] = {}
        for pattern, at, path in nodes + pin_nodes:
            try:
                compile_pattern(pattern)
            except ValueError as error:
                self.problems.add(at, path, str(error))
            if pattern in where:
                self.problems.add(at, path, f"'{pattern}' is already in {where[pattern]}; remove one")
            where[pattern] = f"{locate(at)}: {path}"
        return ignore, pin, where

    def _pins(self) -> tuple[dict[str, QuantScheme | None], list[tuple[str, yaml.Node, str]]]:
        node = self._value("pin")
        if node is None or is_null(node):
            return {}, []
        if not isinstance(node, yaml.MappingNode):
            self.problems.add(node, "pin", f"expected 'pattern: scheme' lines, got {describe(node)}")
            return {}, []
        written = entries(node, "pin", self.problems)
        hint = QuantScheme | Literal["float"]
        values = {key: convert(hint, value, join("pin", key), self.problems) for key, (_, value) in written.items()}
        pin = {key: None if value == FLOAT else value for key, value in values.items()}
        return pin, [(key, key_node, join("pin", key)) for key, (key_node, _) in written.items()]

    def _check_gates(self, sections: Mapping[str, Any]) -> None:
        node = self._value("gates")
        for gate, step in Gates.NEEDS.items():
            if sections[step] is None and getattr(sections["gates"], gate, None) is not None and node is not None:
                self.problems.add(child(node, gate), f"gates.{gate}", f"needs {step}, which is switched off")

    def _check_formats(self) -> None:
        seen: dict[str, str] = {}
        for entry in self.steps["export"]:
            if entry.name in seen:
                self.problems.add(entry.key, entry.path, f"already in line {seen[entry.name]}; one artifact a format")
            seen.setdefault(entry.name, str(entry.key.start_mark.line + 1))

    def _unknown(self, key: str, cls: type[Any]) -> str:
        """What to say of a key that the dataclass ``cls`` has no field for."""
        names = field_types(cls)
        schemes = [name for name, hint in names.items() if "QuantScheme" in str(hint)]
        if key in SCHEME_WORDS and schemes:
            return f"unknown key; bits, group and symmetry are one text, as in {schemes[0]}: int4-g32-asym"
        return self._misplaced(key, list(names))

    def _unknown_at_top(self, key: str) -> str:
        for where, kind in STEPS.items():
            with suppress(InputError):
                self.lookup(kind, key)
                return f"unknown key; '{key}' is an entry of the list '{where}'"
        if key in SCHEME_WORDS:
            return "unknown key; bits, group and symmetry are one text of a pass, as in rtn: {scheme: int4-g32-asym}"
        return self._misplaced(key, ROOT_KEYS)

    def _misplaced(self, key: str, here: Sequence[str]) -> str:
        homes = [home for home, names in self.homes.items() if key in names]
        if homes:
            return f"unknown key here; it belongs under {' or '.join(homes)}"
        return f"unknown key{nearest(key, here) or '; known: ' + (', '.join(here) or 'none')}"

    def _unknown_step(self, key: str, name: str, error: InputError) -> str:
        for where, kind in STEPS.items():
            if where != key:
                with suppress(InputError):
                    self.lookup(kind, name)
                    return f"'{name}' belongs in the list '{where}'"
        return f"{error.what} ({error.fix})"


def _found(path: Path) -> bool:
    """Whether a file or a folder is there; a pattern (``texts/*.txt``) is looked up when it is read."""
    return path.exists() or bool(set(str(path)) & set("*?["))
