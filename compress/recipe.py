"""A recipe: YAML in, frozen :class:`Recipe` out, and back. Every complaint names file, line and key path.

Relative paths in a recipe are relative to the current directory, as on the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from compress.document import read_text
from compress.errors import InputError, nearest
from compress.fields import plain
from compress.reading import Lookup, read
from compress.scheme import FLOAT
from compress.settings import Calibration, Evaluate, Gates, Measure, Recipe, Step

__all__ = [
    "Calibration",
    "Evaluate",
    "Gates",
    "Lookup",
    "Measure",
    "Recipe",
    "Step",
    "bundled",
    "dump_yaml",
    "find",
    "load",
    "loads",
    "to_dict",
]

BUNDLED = Path(__file__).parent / "bundled"
"""The recipes that come with the package."""


def load(source: Path | str, lookup: Lookup, overrides: Sequence[str] = (), model: str | None = None) -> Recipe:
    """Read a recipe from a file, or from a bundled recipe by its name; InputError lists all that is wrong with it.

    ``overrides`` are ``key.path=value`` texts, applied in order; ``model`` replaces the recipe's model.
    """
    path = find(source)
    return loads(read_text(path), lookup, str(path), overrides, model)


def loads(
    text: str, lookup: Lookup, name: str = "recipe", overrides: Sequence[str] = (), model: str | None = None
) -> Recipe:
    """Read a recipe from YAML text; ``name`` is what messages call it. See :func:`load`."""
    return read(text, lookup, name, overrides, model)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe with every default filled in, as YAML and JSON can write it; :func:`loads` reads it back."""
    return {
        "model": recipe.model,
        "calibration": plain(recipe.calibration),
        "passes": [{step.name: plain(step.value)} for step in recipe.passes],
        "export": [{step.name: plain(step.value)} for step in recipe.export],
        "measure": plain(recipe.measure) if recipe.measure else False,
        "evaluate": plain(recipe.evaluate) if recipe.evaluate else False,
        "gates": plain(recipe.gates),
        "ignore": list(recipe.ignore),
        "pin": {pattern: FLOAT if scheme is None else str(scheme) for pattern, scheme in recipe.pin.items()},
    }


def dump_yaml(recipe: Recipe) -> str:
    """:func:`to_dict` as YAML text."""
    return str(yaml.dump(to_dict(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


class _Dumper(yaml.SafeDumper):
    """Writes text so that it is read back as it was."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        # Single quotes around a next-line character come back with two blanks after it.
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\x85" in text else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def bundled() -> list[Path]:
    """The recipes that come with the package, by name."""
    return sorted(BUNDLED.glob("*.yaml"))


def find(source: Path | str) -> Path:
    """The file of a recipe: a path, or a bundled recipe's name with or without ``.yaml``. A file goes before a name."""
    path = Path(source)
    if path.exists() and not path.is_dir():
        return path
    known = {found.stem: found for found in bundled()}
    name = str(source).removesuffix(".yaml")
    if name in known:
        return known[name]
    if path.is_dir():
        raise InputError("a folder, not a recipe", where=str(path), fix="name the .yaml file in it")
    raise InputError(
        f"no such recipe{nearest(Path(name).name, known)}",
        where=str(source),
        fix=f"give a .yaml file, or a bundled recipe: {', '.join(known)}",
    )
