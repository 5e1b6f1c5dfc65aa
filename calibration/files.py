"""Local text files and JSON lines, checked byte by byte so that an error names the file, the line and the offset.

They are read here and not by ``datasets``, whose readers keep a byte order mark, name no file for a wrong encoding
and guess types (a JSON string that looks like a date becomes one).
"""

from __future__ import annotations

import codecs
import difflib
import glob
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from calibration.chat import Render, conversation
from calibration.errors import DataError

BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Longest first: the mark of UTF-32 begins with that of UTF-16."""

NAMED_OFFENDERS = 5
"""How many rows of each kind of fault an error lists before it counts the rest."""


@dataclass
class Rows:
    """The usable texts of some rows, and how many rows of each kind were dropped.

    ``render``: rows are chats (or what a user says) and become the text that it makes of them.
    """

    texts: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    render: Render | None = None

    def add(self, value: object) -> str | None:
        """Take one value of a text column; returns what is wrong with it, if it is neither usable nor nothing."""
        if self.render is not None and not _is_nothing(value):
            try:
                value = self.render(conversation(value))
            except ValueError as error:
                return str(error)
        return self._add_text(value)

    def _add_text(self, value: object) -> str | None:
        if value is None:
            self.dropped["null_rows"] += 1
        elif value == []:
            self.dropped["empty_rows"] += 1
        elif not isinstance(value, str):
            chats = " (messages need chat_template: true)" if isinstance(value, list) else ""
            return f"holds {type(value).__name__} {json.dumps(value, default=repr)[:40]}, not text{chats}"
        elif not value.strip():
            self.dropped["empty_rows"] += 1
        elif "\0" in value:
            return f"has a NUL character at position {value.index(chr(0))}"
        elif not _is_encodable(value):
            return "has half of a surrogate pair, which is no character"
        else:
            self.texts.append(value)
        return None


def _is_nothing(value: object) -> bool:
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def find_files(path: str, suffix: str, key: str) -> list[Path]:
    """The files that ``path`` means: itself, the ``*suffix`` files under a folder, or what a pattern matches."""
    place = Path(path).expanduser()
    if place.is_dir():
        found, missing = sorted(place.rglob(f"*{suffix}")), f"the folder holds no *{suffix} file"
    elif place.exists() or not set(path) & set("*?["):
        found, missing = [place] if place.exists() else [], f"there is no such file{_nearest(place)}"
    else:
        # Path.glob takes no absolute pattern.
        found = sorted(Path(match) for match in glob.glob(str(place), recursive=True))  # noqa: PTH207
        missing = "no file matches this pattern"
    files = [file for file in found if not file.is_dir()]
    if not files:
        raise DataError(missing, where=path, fix=f"correct {key}.path (relative paths start at the working directory)")
    return files


def check_encoding(encoding: str, key: str) -> None:
    """DataError for a name that is no text encoding of Python."""
    try:
        b"a".decode(encoding)
    except UnicodeDecodeError:
        pass
    except LookupError as error:
        fix = f"set {key}.encoding to utf-8, latin-1, cp1252 or utf-16, say"
        raise DataError(f"Python knows no text encoding '{encoding}'", fix=fix) from error


def read_text(path: Path, encoding: str, key: str) -> str:
    """The decoded file without its byte order mark, line ends as newlines; DataError names offset and line."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    mark, name = next((pair for pair in BYTE_ORDER_MARKS if raw.startswith(pair[0])), (b"", ""))
    if not codecs.lookup(encoding).name.startswith(name):
        raise DataError(
            f"starts with the byte order mark of {name.upper()} (bytes {mark.hex(' ')} at offset 0): not {encoding}",
            where=str(path),
            fix=f"set {key}.encoding: {name}",
        )
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise _decode_error(path, raw, error, encoding, key) from error
    position = text.find("\0")
    if position >= 0:
        raise _nul_error(path, text, position, encoding, key)
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def read_documents(files: Sequence[Path], encoding: str, key: str) -> Rows:
    """One document a file; empty and blank files are dropped and counted. DataError lists every bad file."""
    rows = Rows()

    def read(path: Path) -> None:
        text = read_text(path, encoding, key)
        if text.strip():
            rows.texts.append(text)
        else:
            rows.dropped["blank_files" if text else "empty_files"] += 1

    _for_each(files, read)
    return rows


def read_json_lines(files: Sequence[Path], column: str, encoding: str, key: str, render: Render | None = None) -> Rows:
    """One document a row, from ``column``; blank lines, null and empty rows are dropped and counted.

    ``render`` is as for :class:`Rows`. DataError lists rows without the column, rows that are no JSON object and
    values that are no text (or no chat, or one that the template refuses), by line.
    """
    rows = Rows(render=render)
    _for_each(files, lambda path: _read_json_file(path, read_text(path, encoding, key), column, key, rows))
    return rows


def _for_each(files: Sequence[Path], read: Callable[[Path], None]) -> None:
    """Read every file before complaining, so that all bad ones are named at once."""
    found: list[DataError] = []
    for path in files:
        try:
            read(path)
        except DataError as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        raise DataError("\n".join(_shorten([f"{error.where}: {error.what}" for error in found])), fix=found[0].fix)


def _read_json_file(path: Path, text: str, column: str, key: str, rows: Rows) -> None:
    if text.lstrip().startswith("["):
        raise DataError("is one JSON array, not one JSON object a line", where=str(path), fix="write it as JSON lines")
    faults: list[str] = []
    columns: dict[str, None] = {}
    lacking: list[int] = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        if not line.strip():
            rows.dropped["blank_lines"] += 1
            continue
        row = _parse(line)
        if isinstance(row, str):
            faults.append(f"line {number} {row}")
            continue
        columns.update(dict.fromkeys(row))
        if column not in row:
            lacking.append(number)
            continue
        fault = rows.add(row[column])
        if fault:
            faults.append(f"line {number}: '{column}' {fault}")
    fix = f"correct the file, or choose another {key}.column"
    if lacking:
        listed = ", ".join(map(str, lacking[:NAMED_OFFENDERS])) + (", ..." if len(lacking) > NAMED_OFFENDERS else "")
        found = ", ".join(columns) or "none"
        faults.insert(0, f"{len(lacking)} rows have no column '{column}' (line {listed}); columns: {found}")
    if faults:
        raise DataError("\n".join(_shorten(faults)), where=str(path), fix=fix)


def _parse(line: str) -> dict[str, object] | str:
    """The JSON object in ``line``, or what is wrong with it."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg} at column {error.colno}"
    return row if isinstance(row, dict) else f"is a JSON {type(row).__name__}, not an object"


def _decode_error(path: Path, raw: bytes, error: UnicodeDecodeError, encoding: str, key: str) -> DataError:
    offset = error.start
    line = raw[:offset].decode(error.encoding, errors="ignore").count("\n") + 1
    byte = f"byte 0x{raw[offset]:02x} at offset {offset} (line {line})"
    if 0x80 <= raw[offset] <= 0x9F:
        fix = f"set {key}.encoding: cp1252 (Windows: 0x93 and 0x94 are curly quotes) or latin-1"
    else:
        fix = f"set {key}.encoding: latin-1, cp1252 or utf-16, whichever the file was written in"
    return DataError(f"{byte} is not {encoding}: {error.reason}", where=str(path), fix=fix)


def _nul_error(path: Path, text: str, position: int, encoding: str, key: str) -> DataError:
    before = text[:position]
    offset = len(before.encode(encoding))
    share = text.count("\0") / len(text)
    wide = f"; this looks like UTF-16 without a byte order mark: set {key}.encoding: utf-16-le or utf-16-be"
    return DataError(
        f"NUL byte at offset {offset} (line {before.count(chr(10)) + 1}), {text.count(chr(0))} in the file",
        where=str(path),
        fix=f"remove the NUL bytes{wide if share > 0.2 else ''}",
    )


def _shorten(lines: Sequence[str]) -> list[str]:
    more = len(lines) - NAMED_OFFENDERS
    return [*lines[:NAMED_OFFENDERS], *([f"and {more} more"] if more > 0 else [])]


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _nearest(place: Path) -> str:
    folder = place.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    found = difflib.get_close_matches(place.name, names, n=1, cutoff=0.6)
    return f"; did you mean '{folder / found[0]}'?" if found else ""
