"""What can be wrong with calibration data, said so that the reader can act."""

from __future__ import annotations


class DataError(Exception):
    """A text source that cannot be read or does not hold enough.

    ``what`` says what is wrong (all offenders, one a line), ``where`` names the file, ``fix`` says what to change.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  fix: {self.fix}" if self.fix else head
