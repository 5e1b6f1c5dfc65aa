"""Where calibration and evaluation text comes from, and how it is read."""

from __future__ import annotations

import hashlib
import logging
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from calibration.builtin import Part, builtin_texts
from calibration.chat import Render
from calibration.errors import DataError
from calibration.files import Rows, check_encoding, find_files, read_documents, read_json_lines

Source = Literal["builtin", "text", "jsonl", "hub", "self"]

HUB_CHARACTERS = 20_000_000
"""A data set of the hub may be larger than any disk: reading stops after this many characters, with a warning."""

RECIPE_KEYS: Mapping[str, str] = {"calibration": "calibration", "evaluation": "evaluate"}
"""The recipe's key for each part, so that an error can say what to write."""


@dataclass(frozen=True)
class TextSource:
    """One source of text, as a recipe writes it.

    ``builtin`` needs nothing else. ``text`` takes ``path``: a file, a folder (every ``*.txt`` under it) or a pattern;
    each file is one document. ``jsonl`` takes ``path`` likewise (``*.jsonl``); each row is one document, in ``column``.
    ``hub`` takes ``name`` (a data set's id on the hub, or a folder in one of its layouts), ``split``, and ``config``
    where the data set has several. With ``chat_template`` the rows of ``jsonl`` and ``hub`` are chats, lists of
    messages with role and content, or what a user says. ``self`` is no text: the model writes it
    (:mod:`calibration.writing`).
    """

    source: Source = "builtin"
    path: Path | None = None
    name: str | None = None
    split: str = "train"
    column: str | None = None
    """None: ``messages`` with ``chat_template``, ``text`` without."""
    encoding: str = "utf-8"
    config: str | None = None
    chat_template: bool = False

    @property
    def text_column(self) -> str:
        """Where in a row the text is."""
        return self.column or ("messages" if self.chat_template else "text")


@dataclass(frozen=True)
class Texts:
    """Documents in a fixed order. ``sha256`` is over their UTF-8 bytes; ``dropped`` counts unusable rows by kind."""

    texts: tuple[str, ...]
    origin: str
    sha256: str
    dropped: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def load_texts(source: TextSource, part: Part, render: Render | None = None) -> Texts:
    """Read all documents of ``source``. ``part`` chooses the half of the builtin text, and the key that errors name.

    ``render`` is the model's chat template, which a source with ``chat_template`` needs.

    Raises:
        DataError: the text cannot be read, is in another encoding, or there is none. All offenders are listed.
    """
    if source.chat_template and render is None:
        raise ValueError("a source with chat_template needs the template")
    key = RECIPE_KEYS[part]
    warnings: tuple[str, ...] = ()
    if source.source == "builtin":
        rows, origin = Rows(list(builtin_texts(part))), f"builtin {part} text of Python {platform.python_version()}"
    elif source.source == "hub":
        origin = f"hub {source.name}{f' ({source.config})' if source.config else ''}, split {source.split}"
        rows, warnings = _read_hub(source, key, render)
    elif source.source in ("text", "jsonl"):
        rows, origin = _read_local(source, key, render)
    else:
        raise DataError(
            f"there is no text in the source '{source.source}'", where=key, fix="builtin, text, jsonl or hub"
        )
    if not rows.texts:
        dropped = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in rows.dropped.items())
        raise DataError(
            f"holds no text{f' ({dropped})' if dropped else ''}",
            where=str(source.path or origin),
            fix=f"point {key} at text, or use {key}: {{source: builtin}}",
        )
    origin += ", rendered by the chat template" if source.chat_template else ""
    return Texts(tuple(rows.texts), origin, _digest(rows.texts), dict(rows.dropped), warnings)


def _read_local(source: TextSource, key: str, render: Render | None) -> tuple[Rows, str]:
    if not source.path:
        raise DataError(f"source: {source.source} needs a path", where=key, fix=f"add {key}.path")
    check_encoding(source.encoding, key)
    files = find_files(str(source.path), ".txt" if source.source == "text" else ".jsonl", key)
    origin = f"{source.source} {source.path}" + (f" ({len(files)} files)" if len(files) > 1 else "")
    if source.source == "text":
        return read_documents(files, source.encoding, key), origin
    return read_json_lines(files, source.text_column, source.encoding, key, _wanted(source, render)), origin


def _wanted(source: TextSource, render: Render | None) -> Render | None:
    return render if source.chat_template else None


def _read_hub(source: TextSource, key: str, render: Render | None) -> tuple[Rows, tuple[str, ...]]:
    if not source.name:
        raise DataError("source: hub needs a name", where=key, fix=f"add {key}.name: the data set's id on the hub")
    import datasets

    with _quiet(), tempfile.TemporaryDirectory() as cache:
        try:
            stream = datasets.load_dataset(
                source.name, source.config, split=source.split, streaming=True, cache_dir=cache
            )
            return _take(stream, source, key, Rows(render=_wanted(source, render)))
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise _hub_error(error, source, key) from error


def _take(
    stream: Iterator[Mapping[str, object]], source: TextSource, key: str, rows: Rows
) -> tuple[Rows, tuple[str, ...]]:
    column, characters = source.text_column, 0
    for number, row in enumerate(stream):
        if column not in row:
            raise DataError(
                f"there is no column '{column}'; columns: {', '.join(row)}",
                where=str(source.name),
                fix=f"set {key}.column to one of the columns",
            )
        known = len(rows.texts)
        fault = rows.add(row[column])
        if fault:
            raise DataError(f"row {number}: '{column}' {fault}", where=str(source.name))
        characters += sum(map(len, rows.texts[known:]))
        if characters >= HUB_CHARACTERS:
            return rows, (f"{source.name}: only the first {number + 1} rows ({characters:,} characters) were read",)
    return rows, ()


def _hub_error(error: Exception, source: TextSource, key: str) -> DataError:
    if isinstance(error, ConnectionError):
        return DataError(
            f"the data set cannot be reached ({error}); source: hub needs the network",
            where=f"{source.name}",
            fix=f"go online (and unset HF_HUB_OFFLINE), or give a local file: {key}: {{source: text, path: FILE}}",
        )
    return DataError(
        f"the data set cannot be read: {error}",
        where=f"{source.name}",
        fix=f"correct {key}.name, {key}.config or {key}.split, or give a local file: {{source: text, path: FILE}}",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's retries and progress bars off the terminal; what matters comes back as an exception."""
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    level, hub_level = datasets.logging.get_verbosity(), hub_logging.get_verbosity()
    bars = datasets.utils.is_progress_bar_enabled()
    datasets.logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if bars:
            datasets.enable_progress_bars()


def _digest(texts: list[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()
