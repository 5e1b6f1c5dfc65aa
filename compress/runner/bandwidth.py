"""How fast this machine reads memory: the ceiling of decoding, which reads every weight once a token."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compress.runner.memory import available_bytes

_MIB = 1 << 20
_SMALLEST_BUFFER = 128 * _MIB
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second that ``threads`` threads read from a buffer of ``buffer_bytes``; best of ``runs``."""

    bytes_per_s: float
    threads: int
    buffer_bytes: int
    runs: int
    spread: float
    """(max - min) / median over the runs."""

    def __str__(self) -> str:
        return (
            f"{self.bytes_per_s / 1e9:.1f} GB/s read by {self.threads} threads"
            f" from {self.buffer_bytes / _MIB:.0f} MiB, best of {self.runs}"
        )


def measure_bandwidth(threads: int, runs: int = 5) -> Bandwidth:
    """Read a buffer much larger than the last-level cache with ``threads`` threads (numpy releases the lock)."""
    size = _buffer_bytes()
    # Ones, not zeros: pages that were never written all map to one zero page, which stays in the cache.
    parts = np.array_split(np.ones(size // 8, dtype=np.int64), threads)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_read, parts))
        for _ in range(runs):
            start = time.perf_counter()
            list(pool.map(_read, parts))
            rates.append(size / (time.perf_counter() - start))
    spread = (max(rates) - min(rates)) / float(np.median(rates))
    return Bandwidth(max(rates), threads, size, runs, spread)


def _read(part: NDArray[np.int64]) -> int:
    # An integer maximum is one load and one cheap instruction an element, so memory is what limits it.
    return int(part.max())


def _buffer_bytes() -> int:
    """Twice the last-level cache or 128 MiB, which is more; at most a quarter of the memory that is free."""
    wanted = max(_SMALLEST_BUFFER, 2 * last_level_cache_bytes())
    return min(wanted, available_bytes() // 4) // 8 * 8


def last_level_cache_bytes() -> int:
    """Size of the largest cache that CPU 0 sees; 0 where the system does not tell."""
    sizes = [0]
    for file in _CACHES.glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG") or 0) * unit)
    return max(sizes)
