"""A folder for one process at a time. The lock is the system's: a process that is killed leaves none."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn

from compress.errors import InputError

LOCK = "lock"
"""The file in the folder that is locked; it has the process id of its owner."""
ATTEMPTS = 5


@contextmanager
def held(folder: Path, keep: Callable[[], bool]) -> Iterator[None]:
    """Make ``folder`` and keep it from other processes; at the end it is removed unless ``keep`` says so.

    InputError if another process holds it, or nothing can be written there.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
    except OSError as error:
        raise InputError(
            f"cannot write here: {error.strerror}", where=str(folder.parent), fix="choose another --out"
        ) from error
    with lock:
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            if not keep():
                shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> IO[str]:
    for _ in range(ATTEMPTS):
        folder.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            file = (folder / LOCK).open("a+", encoding="ascii")
            if _is_mine(file, folder / LOCK):
                return file
            file.close()
        time.sleep(0.1)
    return _refuse_second(folder)


def _is_mine(file: IO[str], path: Path) -> bool:
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A run that has just finished has removed the file that was opened.
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    return False


def refuse_if_held(folder: Path) -> None:
    """InputError if a process that is alive holds ``folder``."""
    with suppress(FileNotFoundError), (folder / LOCK).open(encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            _refuse_second(folder)


def _refuse_second(folder: Path) -> NoReturn:
    owner = ""
    with suppress(OSError):
        owner = f" (process {(folder / LOCK).read_text(encoding='ascii')})"
    raise InputError(
        f"another run{owner} is writing this output now",
        where=str(folder),
        fix="wait for it, end it, or choose another --out",
    )
