"""The output folder: filled under a temporary name, complete or not there at all; what was there before is safe."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.errors import InputError

MANIFEST = "manifest.json"
FULL = {27: "the file size limit is reached", 28: "the disk is full", 122: "the disk quota is used up"}
"""errno -> what it means: EFBIG, ENOSPC, EDQUOT."""


def check_free(out: Path, overwrite: bool) -> None:
    """InputError if ``out`` cannot be written, or holds something that must not be replaced."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError("this is a file; the output is a folder", where=str(out), fix="choose another --out")
    if not any(out.iterdir()):
        return
    if not (out / MANIFEST).is_file():
        raise InputError(
            "the folder holds something that no run of compress wrote", where=str(out), fix="choose another --out"
        )
    if not overwrite:
        raise InputError(
            "the folder holds an earlier run",
            where=str(out),
            fix="choose another --out, or replace it with --overwrite",
        )


@contextmanager
def workspace(out: Path, overwrite: bool, needed_bytes: int) -> Iterator[Path]:
    """A temporary folder beside ``out`` that takes its name when the context ends well, and vanishes when not.

    A disk that is full becomes an InputError with the path and ``needed_bytes``.
    """
    check_free(out, overwrite)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    except OSError as error:
        raise InputError(
            f"cannot write here: {error.strerror}", where=str(out.parent), fix="choose another --out"
        ) from error
    try:
        with explain_full_disk(out, needed_bytes):
            yield partial
            _sync(partial)
        _replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def explain_full_disk(out: Path, needed_bytes: int) -> Iterator[None]:
    """Turn "no space left" into an InputError that says where, and how much is needed."""
    try:
        yield
    except Exception as error:
        reason = _full(error)
        if reason is None:
            raise
        free = shutil.disk_usage(out.parent).free
        raise InputError(
            f"{reason}: about {needed_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free; nothing was written",
            where=str(out),
            fix="free some space, raise the limit, or choose another --out",
        ) from error


def _full(error: BaseException | None) -> str | None:
    """Why nothing could be written, if that is what ``error`` (or its cause) says. Some libraries give only text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return FULL[error.errno]
        for number, reason in FULL.items():
            if f"os error {number}" in str(error) or os.strerror(number) in str(error):
                return reason
        error = error.__cause__ or error.__context__
    return None


def write_manifest(folder: Path) -> None:
    """``manifest.json``: SHA-256 and size of every file under ``folder``."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(folder).as_posix()] = {"sha256": digest, "bytes": path.stat().st_size}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def folder_bytes(folder: Path) -> int:
    """Size of every file under ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _replace(partial: Path, out: Path) -> None:
    """Give ``partial`` the name ``out``; what was there goes only once the new folder has the name."""
    partial.chmod(0o777 & ~_umask())
    if not out.exists():
        partial.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
    out.rename(old / "run")
    try:
        partial.rename(out)
    except OSError:
        (old / "run").rename(out)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
