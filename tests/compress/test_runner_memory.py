"""Resident memory by phases, pages of files, and the machine's bandwidth."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from compress.runner import bandwidth, memory

MIB = 1 << 20
SIZE = 48 * MIB


def filled() -> np.ndarray:
    return np.ones(SIZE // 8, dtype=np.int64)


@pytest.fixture(params=["kernel", "sampled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    if request.param == "sampled":
        monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    return str(request.param)


def test_each_phase_has_its_own_peak(way: str) -> None:
    start = memory.resident().total
    # A mapping of its own: malloc may serve a large array from free memory that is resident already.
    with memory.peak_of_phase() as large, mmap.mmap(-1, SIZE) as block:
        for _ in range(SIZE // MIB):
            block.write(bytes(MIB))
        time.sleep(0.2)  # many samples
    with memory.peak_of_phase() as small:
        pass
    assert large.peak - start == pytest.approx(SIZE, rel=0.1)
    assert small.peak - start < SIZE / 4


def test_the_way_is_told_apart(way: str) -> None:
    with memory.peak_of_phase() as phase:
        pass
    assert phase.how.startswith({"kernel": "kernel high-water mark", "sampled": "sampled every"}[way])


def test_a_large_parent_does_not_inflate_the_child() -> None:
    """ru_maxrss would show the parent's size: it survives fork and exec."""
    block = filled()
    code = "from compress.runner.memory import resident; print(resident().peak)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < SIZE < memory.resident().total
    assert block[0] == 1


def test_pages_of_a_mapped_file_are_counted_once_touched(tmp_path: Path) -> None:
    file = tmp_path / "a file with spaces"
    file.write_bytes(os.urandom(4 * MIB))
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert memory.mapped_bytes([tmp_path / "other"]) == 0
        total = sum(mapped[:: mmap.PAGESIZE])
        assert total > 0
        assert memory.mapped_bytes([file]) == 4 * MIB
    assert memory.mapped_bytes([file]) == 0


def test_a_file_just_written_is_in_the_page_cache(tmp_path: Path) -> None:
    file, empty = tmp_path / "weights", tmp_path / "empty"
    file.write_bytes(os.urandom(MIB + 1))
    empty.touch()
    assert memory.cached_share([file, empty]) == 1.0
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    share = memory.cached_share([file])
    assert share is not None
    assert share <= 1.0
    assert memory.cached_share([empty]) is None


@pytest.mark.parametrize("threads", [1, 2])
def test_bandwidth_reads_more_than_the_cache_holds(threads: int) -> None:
    found = bandwidth.measure_bandwidth(threads, runs=2)
    assert found.buffer_bytes >= 2 * bandwidth.last_level_cache_bytes()
    assert found.bytes_per_s > 1e8
    assert (found.threads, found.runs) == (threads, 2)
    assert f"{threads} threads" in str(found)


def test_little_free_memory_limits_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "available_bytes", lambda: 40 * MIB)
    assert bandwidth.measure_bandwidth(1, runs=1).buffer_bytes == 10 * MIB
