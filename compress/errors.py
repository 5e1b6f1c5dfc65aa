"""What can go wrong, said so that the reader can act: what, where, how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CompressError(Exception):
    """A failure that edgepress explains itself.

    ``what`` says what is wrong (all offenders, one a line), ``where`` names the file, line, layer or key,
    ``fix`` says what to change. ``exit_code`` is what the command returns.
    """

    exit_code = 1
    title = "error"

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  fix: {self.fix}" if self.fix else head


class InputError(CompressError):
    """The user's recipe, model, data or machine cannot do what was asked. Exit code 2."""

    exit_code = 2
    title = "input error"


class FullDiskError(InputError):
    """There is no room to write: what was finished is worth keeping."""


class GateError(CompressError):
    """The run finished, and a gate of the recipe is not met. Exit code 3."""

    exit_code = 3
    title = "gate failed"


class ParityError(CompressError):
    """An artifact does not compute what the passes chose. Exit code 1: this is our bug, never the user's."""

    title = "parity failed"


class CrashError(CompressError):
    """The process that ran an artifact died or answered nothing. Exit code 1."""

    title = "runtime crashed"


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'gptq'?"`` for the closest known name, or the empty string."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{found[0]}'?" if found else ""
