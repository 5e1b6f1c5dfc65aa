"""Patterns that name layers: ``lm_head``, ``*.mlp.down_proj``, ``re:.*layers\\.[0-3]\\..*``.

A pattern matches a layer's whole dotted name or not at all: ``model.layers.1`` is no pattern for ``model.layers.10``.
``*`` stands for any characters, dots included; everything else is literal. ``re:`` starts a regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from compress.errors import InputError, nearest

T = TypeVar("T")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression that a pattern stands for; ValueError says why a pattern is none."""
    if not pattern.strip():
        raise ValueError("an empty pattern matches no layer")
    if not pattern.startswith("re:"):
        return re.compile(".*".join(map(re.escape, pattern.split("*"))))
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"'{pattern}' is not a regular expression: {error}") from error


def match_layers(patterns: Iterable[str], layers: Sequence[str]) -> dict[str, list[str]]:
    """Pattern -> the layers it names, in the order of ``layers``; an empty list where it names none."""
    compiled = {pattern: compile_pattern(pattern) for pattern in patterns}
    return {
        pattern: [layer for layer in layers if expression.fullmatch(layer)] for pattern, expression in compiled.items()
    }


def require_matches(
    matches: Mapping[str, Sequence[str]], layers: Sequence[str], places: Mapping[str, str] | None = None
) -> None:
    """InputError naming every pattern of ``matches`` that names none of ``layers``.

    ``places`` says where each pattern is written, for the message.
    """
    lines = [
        f"{_place(pattern, places)}'{pattern}' matches no layer{_hint(pattern, layers)}"
        for pattern, found in matches.items()
        if not found
    ]
    if lines:
        raise InputError("\n".join(lines), fix="write whole layer names; * stands for any characters, re: for a regex")


def assign(rules: Mapping[str, T], layers: Sequence[str], places: Mapping[str, str] | None = None) -> dict[str, T]:
    """Layer -> value of the rule whose pattern names it, in the order of ``layers``; layers without a rule are absent.

    InputError names every pattern that matches no layer, and every layer that two rules give different values.
    ``places`` says where each pattern is written, for the message.
    """
    matches = match_layers(rules, layers)
    require_matches(matches, layers, places)
    owner: dict[str, str] = {}
    clashes: list[str] = []
    for pattern, found in matches.items():
        for layer in found:
            first = owner.setdefault(layer, pattern)
            if rules[first] != rules[pattern]:
                clashes.append(f"{_place(pattern, places)}{layer} is already given another scheme by '{first}'")
    if clashes:
        raise InputError("\n".join(clashes), fix="write the patterns so that they agree on every layer")
    return {layer: rules[owner[layer]] for layer in layers if layer in owner}


def _place(pattern: str, places: Mapping[str, str] | None) -> str:
    return f"{places[pattern]}: " if places and pattern in places else ""


def _hint(pattern: str, layers: Sequence[str]) -> str:
    if pattern.startswith("re:"):
        expression = compile_pattern(pattern)
        partial = sum(expression.search(layer) is not None for layer in layers)
        return f"; it must match the whole name: '.*' before and after would match {partial}" if partial else ""
    dotted = pattern.strip(".")
    wider = (f"*.{dotted}", f"{dotted}.*", f"*.{dotted}.*")
    for candidate, found in match_layers(wider, layers).items():
        if found and "*" not in pattern:
            return f"; a pattern is a whole name: '{candidate}' would match {len(found)}"
    return nearest(pattern, layers)
