"""What ``import compress`` offers: a recipe, its plan, its run. Importing this loads nothing heavy; calling does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.engine import Plan
    from compress.recipe import Recipe
    from compress.report import Report
    from compress.session import Progress


def load_recipe(source: Path | str, overrides: Sequence[str] = (), model: str | None = None) -> Recipe:
    """Read a recipe from a YAML file, or a bundled one by its name; InputError lists all that is wrong with it.

    ``overrides`` are ``key.path=value`` texts as after ``--set``; ``model`` replaces the recipe's model.
    """
    from compress import registry
    from compress.recipe import load

    return load(source, registry.load, overrides, model)


def plan(recipe: Recipe | Path | str) -> Plan:
    """Check a recipe (or its file, or a bundled one's name) against its model, and say what a run would do.

    Writes nothing and takes seconds. Raises InputError with everything that stands in the way.
    """
    from compress import engine

    return engine.plan(_recipe(recipe))


def run(
    recipe: Recipe | Path | str,
    out: Path | str,
    *,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Compress the model of a recipe (or its file, or a bundled one's name), write ``out`` and measure what is in it.

    ``overwrite`` replaces an earlier run in ``out``, and what an interrupted one has left; ``resume`` goes on with the
    latter. ``progress`` is told of each step. Raises InputError for what the
    caller can mend, ParityError if an artifact is not what the passes chose. Failed gates are in ``report.gates``.
    """
    from compress import engine
    from compress.session import no_progress

    shown = progress or no_progress
    return engine.run(_recipe(recipe), Path(out), overwrite=overwrite, resume=resume, progress=shown)


def _recipe(recipe: Recipe | Path | str) -> Recipe:
    return load_recipe(recipe) if isinstance(recipe, Path | str) else recipe
