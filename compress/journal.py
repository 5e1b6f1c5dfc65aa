"""What a run has finished, on disk: one file a step, so that a run that was killed goes on after the last of them.

Each file is written whole or not at all, and holds its own checksum and those of the files that the step made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.errors import InputError

ENTRIES = "journal"
"""Subfolder with a file for each step."""
PARTIAL = ".partial"
FORMAT = 1
_START = "start"
SHOWN = 20


class Journal:
    """Steps by name, each with what it found (plain JSON values), under ``root``; without one nothing is kept.

    The first step is the run's fingerprint: what its results depend on, name -> value.
    """

    def __init__(self, root: Path | None = None, fingerprint: Mapping[str, str] | None = None) -> None:
        self.root = root
        self._steps: dict[str, Any] = {}
        if root is None:
            return
        (root / ENTRIES).mkdir(parents=True, exist_ok=True)
        kept = self._read(root)
        # What a killed process had not finished writing; libraries have their own names for that.
        for path in root.rglob("*"):
            if path.is_file() and path not in kept:
                path.unlink()
        wanted = {"format": str(FORMAT), **(fingerprint or {})}
        if _START in self._steps:
            _require_same(root, self._steps[_START], wanted)
        else:
            self.add(_START, wanted)

    def get(self, step: str) -> Any:
        """What ``step`` found, or None if it was not finished."""
        return self._steps.get(step)

    def add(self, step: str, found: Any, files: Sequence[Path] = ()) -> None:
        """Note that ``step`` is finished. ``files``, under the root, are already whole and on disk."""
        self._steps[step] = found
        if self.root is None:
            return
        digests = {path.relative_to(self.root).as_posix(): sha256_of(path) for path in files}
        text = json.dumps({"step": step, "found": found, "files": digests})
        path = _entry_path(self.root, len(self._steps) - 1)
        partial = path.with_suffix(PARTIAL)
        partial.write_text(f"{_digest(text)}\n{text}", encoding="utf-8")
        put_in_place(partial, path)

    def _read(self, root: Path) -> set[Path]:
        """Every file that belongs to a finished step; InputError names those that are damaged."""
        damaged, kept = [], set(entries(root))
        for number, path in enumerate(entries(root)):
            if path != _entry_path(root, number):
                damaged.append(f"{_entry_path(root, number)}: missing")
                break
            digest, _, text = path.read_bytes().decode(errors="replace").partition("\n")
            if digest != _digest(text):
                damaged.append(f"{path}: not what was written")
                continue
            entry = json.loads(text)
            self._steps[entry["step"]] = entry["found"]
            kept |= {root / name for name in entry["files"]}
            damaged += _damaged_files(root, entry["files"])
        if damaged:
            shown = damaged[:SHOWN] + ([f"... and {len(damaged) - SHOWN} more"] if damaged[SHOWN:] else [])
            raise InputError("what an interrupted run left is damaged\n" + "\n".join(shown), fix=START_ANEW)
        return kept


START_ANEW = "start anew with --overwrite and without --resume: the interrupted run is then removed"


def entries(root: Path) -> list[Path]:
    """The files of the steps that were finished under ``root``, in order."""
    return sorted((root / ENTRIES).glob("*.step"))


def steps_done(root: Path) -> int:
    """How many steps were finished under ``root``; to have begun is none."""
    return max(len(entries(root)) - 1, 0)


def put_in_place(partial: Path, path: Path) -> None:
    """Give a written file its name once its content is on the disk: whatever happens, ``path`` is whole or old."""
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry_path(root: Path, number: int) -> Path:
    return root / ENTRIES / f"{number:06}.step"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _damaged_files(root: Path, digests: Mapping[str, str]) -> Iterator[str]:
    for name, digest in digests.items():
        path = root / name
        if not path.is_file():
            yield f"{path}: missing"
        elif sha256_of(path) != digest:
            yield f"{path}: not what was written"


def _require_same(root: Path, was: Mapping[str, str], now: Mapping[str, str]) -> None:
    differ = [
        f"{name}: was {was.get(name, 'not there')}, is {now.get(name, 'not there')}"
        for name in {**was, **now}
        if was.get(name) != now.get(name)
    ]
    if differ:
        raise InputError(
            "the interrupted run was another one\n" + "\n".join(differ),
            where=str(root.parent),
            fix=f"give --resume the recipe and the model that it had, or {START_ANEW}",
        )
