"""Small passes and exporters, and the shortest recipe, for tests of how recipes are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.errors import InputError, nearest
from compress.recipe import Recipe, loads
from compress.scheme import INT8_G32, QuantScheme

if TYPE_CHECKING:
    from compress.protocols import Resource

INT4 = QuantScheme(4, 32)
MINIMAL = "model: somewhere\npasses: [round]\nexport: [write]\n"


@dataclass(frozen=True)
class Round:
    """Has a scheme, and a class variable whose type only a type checker can see."""

    scheme: QuantScheme = INT4
    search: bool = True

    reads: ClassVar[frozenset[Resource]] = frozenset()


@dataclass(frozen=True)
class Base:
    """Fields that a subclass inherits."""

    damping: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.damping <= 1:
            raise ValueError(f"damping: {self.damping} is not between 0 and 1")


@dataclass(frozen=True)
class Solve(Base):
    """One field of every other type."""

    columns: int = 128
    limit: float | None = None
    mode: Literal["fast", "exact"] = "fast"
    notes: tuple[str, ...] = ()
    file: Path | None = None


@dataclass(frozen=True)
class Plan:
    """Has a field without a default."""

    target_bits: float
    choices: tuple[QuantScheme, ...] = (INT4, INT8_G32)


@dataclass(frozen=True)
class Write:
    """Refuses with an error of ours, as an exporter may."""

    level: int = 4

    def __post_init__(self) -> None:
        if self.level not in (0, 4):
            raise InputError(f"level {self.level} is not known", fix="known: 0, 4")


CLASSES: dict[str, dict[str, type[Any]]] = {
    "passes": {"round": Round, "solve": Solve, "plan": Plan},
    "exporters": {"write": Write, "keep": Write},
}


def lookup(kind: str, name: str) -> type[Any]:
    known = CLASSES[kind]
    if name not in known:
        raise InputError(f"no {kind} named '{name}'{nearest(name, known)}", fix=f"known: {', '.join(known)}")
    return known[name]


def read(text: str, *overrides: str, model: str | None = None) -> Recipe:
    return loads(text, lookup, "r.yaml", overrides, model)


def complaints(text: str, *overrides: str) -> list[str]:
    """The lines that a recipe is refused with; empty if it is read."""
    try:
        read(text, *overrides)
    except InputError as error:
        return str(error).splitlines()
    return []
