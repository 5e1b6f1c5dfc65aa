"""The output folder: filled under a temporary name, complete or not there at all; what was there before is safe."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from compress.errors import InputError
from compress.units import size

MANIFEST = "manifest.json"
FULL = {27: "the file size limit is reached", 28: "the disk is full", 122: "the disk quota is used up"}
"""errno -> what it means: EFBIG, ENOSPC, EDQUOT."""


def check_free(out: Path, overwrite: bool) -> None:
    """InputError if ``out`` cannot be written, or holds something that must not be replaced."""
    place = out.resolve()
    _check_parent(place)
    if not place.exists():
        return
    if not place.is_dir():
        raise InputError("this is a file; the output is a folder", where=str(out), fix="choose another --out")
    if place.is_mount():
        raise InputError(
            "this is a mount point, and a finished run takes its name by a rename",
            where=str(out),
            fix=f"choose a folder in it, as in --out {out / 'run'}",
        )
    if not any(place.iterdir()):
        return
    if not (place / MANIFEST).is_file():
        raise InputError(
            "the folder holds something that no run of compress wrote", where=str(out), fix="choose another --out"
        )
    if not overwrite:
        raise InputError(
            "the folder holds an earlier run",
            where=str(out),
            fix="choose another --out, or replace it with --overwrite",
        )


def _check_parent(place: Path) -> None:
    parent = next(folder for folder in place.parents if folder.exists())
    if not parent.is_dir():
        raise InputError("this is a file, not a folder to write into", where=str(parent), fix="choose another --out")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError("this folder may not be written to", where=str(parent), fix="choose another --out")


@contextmanager
def workspace(out: Path, overwrite: bool, needed_bytes: int) -> Iterator[Path]:
    """A temporary folder beside ``out`` that takes its name when the context ends well, and vanishes when not.

    Where ``out`` is a link, what it points to is replaced. A disk that is full becomes an InputError with the path
    and ``needed_bytes``.
    """
    check_free(out, overwrite)
    place = out.resolve()
    made = [folder for folder in place.parents if not folder.exists()]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.partial-", dir=place.parent))
    except OSError as error:
        _remove_empty(made)
        raise InputError(
            f"cannot write here: {error.strerror}", where=str(place.parent), fix="choose another --out"
        ) from error
    try:
        with explain_full_disk(out, needed_bytes):
            yield partial
            _sync(partial)
        # Hours may have passed: another run may have taken the name.
        check_free(out, overwrite)
        _replace(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not place.exists():
            _remove_empty(made)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Take back ``folders``, innermost first, as far as nobody has put anything into them."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def explain_full_disk(out: Path, needed_bytes: int) -> Iterator[None]:
    """Turn "no space left" into an InputError that says where, how much is needed, and how much was free before."""
    free = shutil.disk_usage(out.resolve().parent).free
    try:
        yield
    except Exception as error:
        reason = _full(error)
        if reason is None:
            raise
        raise InputError(
            f"{reason}: about {size(needed_bytes)} needed, {size(free)} were free; nothing was written",
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
    except BaseException:
        if not out.exists():
            (old / "run").rename(out)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
