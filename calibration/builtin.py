"""Text that every Python installation carries: the language reference, docstrings and a little source code.

Technical English, mostly prose, the same wherever the same Python release is installed. No download, no licence to
carry along, and two parts that share no paragraph.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from calibration.errors import DataError

Part = Literal["calibration", "evaluation"]

DOCSTRINGS: Mapping[Part, tuple[str, ...]] = MappingProxyType(
    {
        "calibration": (
            *("argparse.py", "codecs.py", "collections/__init__.py", "configparser.py", "difflib.py"),
            *("email/message.py", "fractions.py", "http/cookiejar.py", "http/server.py", "inspect.py"),
            *("ipaddress.py", "json/__init__.py", "logging/__init__.py", "os.py", "pickle.py", "shutil.py"),
            *("smtplib.py", "statistics.py", "subprocess.py", "tarfile.py", "threading.py", "urllib/parse.py"),
            *("random.py", "urllib/request.py"),
        ),
        "evaluation": (
            *("asyncio/streams.py", "concurrent/futures/_base.py", "email/header.py", "logging/handlers.py"),
            *("mimetypes.py", "optparse.py", "socketserver.py", "tempfile.py", "textwrap.py", "timeit.py"),
            *("traceback.py", "uuid.py"),
        ),
    }
)
"""Modules whose docstrings are prose, by their path in the standard library."""

SOURCES: Mapping[Part, tuple[str, ...]] = MappingProxyType(
    {
        "calibration": ("dataclasses.py", "heapq.py", "sched.py", "shlex.py", "fnmatch.py"),
        "evaluation": ("bisect.py", "calendar.py", "filecmp.py"),
    }
)
"""Modules that are given as source code."""

SECTION_CHARACTERS = 2400
"""Paragraphs are joined to documents of about this length (some 500 tokens), so that shuffling mixes the subjects."""

_SHORTEST_PARAGRAPH_WORDS = 8
_LOWEST_LETTER_SHARE = 0.7


@cache
def builtin_texts(part: Part) -> tuple[str, ...]:
    """The documents of ``part``, in a fixed order; DataError where the standard library has no readable text."""
    return tuple(sorted(_sections(part), key=lambda text: hashlib.sha256(text.encode()).digest()))


def _sections(part: Part) -> Iterator[str]:
    # Both parts are read whichever is asked for: a paragraph that both have stays with the first one only.
    seen: set[str] = set()
    for index, text in enumerate(_topics()):
        fresh = list(_fresh_prose(text, seen))
        if (index % 3 == 2) == (part == "evaluation"):
            yield from _join(fresh)
    for owner, names in DOCSTRINGS.items():
        for name in names:
            fresh = [paragraph for text in _docstrings(name) for paragraph in _fresh_prose(text, seen)]
            if owner == part:
                yield from _join(fresh)
    for name in SOURCES[part]:
        yield from _join(_without_licence(_read(name)).split("\n\n"))


def _topics() -> list[str]:
    """The language reference by topic, longest first."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python has no pydoc_data.topics, which the builtin text is made of",
            fix="give your own text: {source: text, path: FILE}",
        ) from error
    return [topics[name] for name in sorted(topics, key=lambda name: (-len(topics[name]), name))]


def _read(name: str) -> str:
    path = Path(sysconfig.get_path("stdlib")) / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"the standard library's {name} cannot be read ({error.strerror})",
            where=str(path),
            fix="give your own text: {source: text, path: FILE}",
        ) from error


def _docstrings(name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(_read(name))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def _fresh_prose(text: str, seen: set[str]) -> Iterator[str]:
    """The paragraphs that are prose and not in ``seen``, which they join."""
    for paragraph in re.split(r"\n\s*\n", text):
        plain = " ".join(paragraph.split())
        if plain in seen or not _is_prose(plain):
            continue
        seen.add(plain)
        yield paragraph.strip("\n").rstrip()


def _is_prose(plain: str) -> bool:
    if "::=" in plain or ">>>" in plain or plain.count(" ") < _SHORTEST_PARAGRAPH_WORDS - 1:
        return False
    letters = sum(character.isalpha() or character == " " for character in plain)
    return letters >= _LOWEST_LETTER_SHARE * len(plain)


def _join(paragraphs: list[str]) -> Iterator[str]:
    section: list[str] = []
    length = 0
    for paragraph in paragraphs:
        section.append(paragraph)
        length += len(paragraph) + 2
        if length >= SECTION_CHARACTERS:
            yield "\n\n".join(section)
            section, length = [], 0
    if section:
        yield "\n\n".join(section)


def _without_licence(source: str) -> str:
    lines = source.splitlines()
    first = next((number for number, line in enumerate(lines) if line.strip() and not line.startswith("#")), 0)
    return "\n".join(lines[first:])
