"""Resident memory of this process, and its peak within one phase of the work."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_STATUS = Path("/proc/self/status")
_SMAPS = Path("/proc/self/smaps")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_SAMPLE_S = 0.002


@dataclass(frozen=True)
class Resident:
    """Resident bytes of this process."""

    total: int
    peak: int
    """Highest total since the process started or the peak was last reset."""


def resident() -> Resident:
    """What is resident now, from /proc/self/status (elsewhere from psutil, where the peak is not known)."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        import psutil

        total = psutil.Process().memory_info().rss
        return Resident(total, total)
    fields = {key: int(value.split()[0]) * 1024 for key, _, value in (x.partition(":") for x in lines) if "kB" in value}
    return Resident(fields["VmRSS"], fields["VmHWM"])


def mapped_bytes(files: Sequence[Path]) -> int | None:
    """Resident bytes that are pages of these files, mapped into this process; the kernel may drop them at will.

    From /proc/self/smaps, see proc_pid_smaps(5); None where there is none.
    """
    names = {str(file.resolve()) for file in files}
    try:
        lines = _SMAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    total, wanted = 0, False
    for line in lines:
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            # The head of a mapping: addresses, permissions, offset, device, inode, path.
            wanted = line.split(maxsplit=5)[-1] in names
        elif wanted and key == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total


@dataclass
class Phase:
    """The peak of one phase in bytes, known once the phase is over, and how it was found."""

    peak: int = 0
    how: str = ""


@contextmanager
def peak_of_phase() -> Iterator[Phase]:
    """Find the highest resident size within the block, not counting what came before it.

    The kernel's own high-water mark is reset at the start (``5`` into /proc/self/clear_refs, see proc(5)); where that
    is not permitted a thread samples every 2 ms, and ``how`` says so. ``ru_maxrss`` would not do: it is inherited
    from the parent process across fork and exec.
    """
    phase = Phase()
    if _reset_high_water_mark():
        phase.how = "kernel high-water mark, reset at the start of the phase"
        try:
            yield phase
        finally:
            phase.peak = resident().peak
        return
    phase.how = f"sampled every {_SAMPLE_S * 1000:.0f} ms (the kernel's high-water mark cannot be reset here)"
    over = threading.Event()

    def sample() -> None:
        while not over.wait(_SAMPLE_S):
            phase.peak = max(phase.peak, resident().total)

    sampler = threading.Thread(target=sample, daemon=True)
    phase.peak = resident().total
    sampler.start()
    try:
        yield phase
    finally:
        over.set()
        sampler.join()
        phase.peak = max(phase.peak, resident().total)


def _reset_high_water_mark() -> bool:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def cached_share(files: Sequence[Path]) -> float | None:
    """Share of the files' bytes that is in the page cache (mincore(2)), or None where that cannot be asked."""
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (OSError, AttributeError, TypeError):
        return None
    pages = cached = 0
    for file in files:
        size = file.stat().st_size
        if size == 0:
            continue
        flags = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            # numpy gives the mapping's address; ACCESS_COPY makes it writable without touching the file.
            view = np.frombuffer(mapped, dtype=np.uint8)
            failed = mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(flags.ctypes.data)
            )
            del view
        if failed:
            return None
        pages += len(flags)
        cached += int((flags & 1).sum())
    return cached / pages if pages else None


def available_bytes() -> int:
    """Bytes that can be allocated without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)
