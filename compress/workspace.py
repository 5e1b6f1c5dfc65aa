"""The output folder: filled under a temporary name, complete or not there at all; what was there before is safe."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from compress.errors import FullDiskError, InputError, ParityError
from compress.journal import Journal, sha256_of, steps_done, sync
from compress.lock import LOCK, held, refuse_if_held
from compress.units import size

MANIFEST = "manifest.json"
RESULT, STATE, SCRATCH = "result", "state", "scratch"
"""What is in the partial folder, beside the lock."""
FULL = {27: "the file size limit is reached", 28: "the disk is full", 122: "the disk quota is used up"}
"""errno -> what it means: EFBIG, ENOSPC, EDQUOT."""


def check_free(out: Path, overwrite: bool, resume: bool = False, *, mine: bool = False) -> None:
    """InputError if ``out`` cannot be written, or it or its partial folder holds what must not be replaced.

    ``mine``: this process works in the partial folder itself.
    """
    place = out.resolve()
    _check_parent(place)
    _check_partial(partial_of(out), overwrite or resume, mine)
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


def _check_partial(partial: Path, allowed: bool, mine: bool) -> None:
    if not partial.is_dir():
        return
    if not mine:
        refuse_if_held(partial)
    foreign = sorted({path.name for path in partial.iterdir()} - {RESULT, STATE, SCRATCH, LOCK})
    if foreign:
        raise InputError(
            f"the folder holds something that no run of compress wrote: {foreign[0]}",
            where=str(partial),
            fix="move it away, or choose another --out",
        )
    if not allowed and (steps := steps_done(partial / STATE)):
        raise InputError(
            f"an interrupted run has left {steps} finished steps",
            where=str(partial),
            fix="go on with it with --resume, or remove it and start anew with --overwrite",
        )


def _check_parent(place: Path) -> None:
    parent = next(folder for folder in place.parents if folder.exists())
    if not parent.is_dir():
        raise InputError("this is a file, not a folder to write into", where=str(parent), fix="choose another --out")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError("this folder may not be written to", where=str(parent), fix="choose another --out")


@dataclass(frozen=True)
class Workspace:
    """The folders of a run. ``result`` becomes the output; ``state`` stays when the run is interrupted."""

    result: Path
    state: Path
    scratch: Path
    journal: Journal
    """What was finished, under ``state``."""


@contextmanager
def workspace(
    out: Path,
    overwrite: bool,
    needed_bytes: int,
    *,
    resume: bool = False,
    fingerprint: Mapping[str, str] | None = None,
) -> Iterator[Workspace]:
    """A folder beside ``out``, whose result takes that name when the context ends well.

    When not, what the journal has is kept for another run with ``resume``, and a note on the exception says so; where
    it has nothing, or the run would fail again, the folder vanishes. Where ``out`` is a link, what it points to is
    replaced. A disk that is full becomes a FullDiskError with the path and ``needed_bytes``.
    """
    check_free(out, overwrite, resume)
    place = out.resolve()
    made = [folder for folder in place.parents if not folder.exists()]
    partial = partial_of(out)
    try:
        with held(partial, lambda: steps_done(partial / STATE) > 0):
            _finish_replacing(place)
            check_free(out, overwrite, resume, mine=True)
            _clear(partial, keep_state=resume and steps_done(partial / STATE) > 0)
            journal = Journal(partial / STATE, fingerprint)
            finished = False
            try:
                with explain_full_disk(out, needed_bytes):
                    yield _folders(partial, journal)
                    _sync_files(partial / RESULT)
                finished = True
                # Hours may have passed: another run may have taken the name.
                check_free(out, overwrite, resume=True, mine=True)
                _replace(partial / RESULT, place)
            except BaseException as error:
                # What failed for the user's input or for a wrong artifact would fail again.
                again = isinstance(error, (InputError, ParityError)) and not isinstance(error, FullDiskError)
                _clear(partial, keep_state=finished or not again)
                if steps := steps_done(partial / STATE):
                    error.add_note(f"{steps} finished steps are kept in {partial}: go on with --resume")
                raise
            # In one move: half a state would look damaged.
            (partial / STATE).rename(partial / SCRATCH / STATE)
    finally:
        if not place.exists() and not partial.exists():
            _remove_empty(made)


def partial_of(out: Path) -> Path:
    """Where a run into ``out`` works until it is finished."""
    place = out.resolve()
    return place.with_name(f".{place.name}.partial")


def interrupted(out: Path) -> int:
    """How many steps an interrupted run into ``out`` has left."""
    return steps_done(partial_of(out) / STATE)


def _folders(partial: Path, journal: Journal) -> Workspace:
    found = Workspace(partial / RESULT, partial / STATE, partial / SCRATCH, journal)
    for folder in (found.result, found.scratch):
        folder.mkdir()
    return found


def _clear(partial: Path, keep_state: bool) -> None:
    """Remove what an earlier run has left, or what another run would make anew."""
    for name in (RESULT, SCRATCH) if keep_state else (RESULT, SCRATCH, STATE):
        shutil.rmtree(partial / name, ignore_errors=True)


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
        raise FullDiskError(
            f"{reason}: about {size(needed_bytes)} needed, {size(free)} were free; it is as it was before",
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
        files[path.relative_to(folder).as_posix()] = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def folder_bytes(folder: Path) -> int:
    """Size of every file under ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _sync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)


def _replace(result: Path, out: Path) -> None:
    """Give ``result`` the name ``out``; what was there goes only once the new folder has the name."""
    old = _replaced(out)
    if out.exists():
        out.rename(old)
    try:
        result.rename(out)
    except BaseException:
        _finish_replacing(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _replaced(out: Path) -> Path:
    return out.with_name(f".{out.name}.replaced")


def _finish_replacing(out: Path) -> None:
    """Put right what a run killed in the middle of :func:`_replace` has left."""
    old = _replaced(out)
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        old.rename(out)
