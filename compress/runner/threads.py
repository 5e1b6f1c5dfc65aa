"""How many threads to run with: what this process may use, not what the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from compress.errors import InputError


def resolve_threads(requested: int | Literal["auto"]) -> int:
    """The thread count to use; ``auto`` is :func:`available_cpus`. InputError below 1 or above what is available."""
    available = available_cpus()
    if requested == "auto":
        return available
    if not 1 <= requested <= available:
        raise InputError(
            f"{requested} threads were asked for, and this process may use {available} CPUs",
            where="threads",
            fix=f"write auto, or a number from 1 to {available}",
        )
    return requested


def available_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may use at once: its affinity mask, and the CPU quota of its control groups.

    A quota counts in whole CPUs, rounded down but at least one: a thread that the quota stops holds up all others.
    ``root`` is where ``proc`` and the control groups' file systems are looked for.
    """
    quotas = [max(1, int(quota)) for quota in _quotas(root)]
    return min([len(os.sched_getaffinity(0)), *quotas])


@dataclass(frozen=True)
class _Mount:
    """A control group file system: ``group`` is the group that lies at ``folder``."""

    folder: PurePosixPath
    group: PurePosixPath
    version: int


def _quotas(root: Path) -> Iterator[float]:
    """The CPU quota, in CPUs, of each control group around this process that has one.

    Formats: Linux Documentation, admin-guide/cgroup-v2.rst (cpu.max), scheduler/sched-bwc.rst (cpu.cfs_*); proc_pid(5).
    """
    try:
        mounts = list(_mounts((root / "proc/self/mountinfo").read_text()))
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, group = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and "cpu" not in controllers.split(","):
            continue
        for mount in mounts:
            if mount.version == version:
                for folder in _folders(root, mount, PurePosixPath(group)):
                    yield from _quota(folder, version)


def _mounts(text: str) -> Iterator[_Mount]:
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        group, folder = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            yield _Mount(PurePosixPath(folder), PurePosixPath(group), 2)
        elif kind == "cgroup" and "cpu" in options.split(","):
            yield _Mount(PurePosixPath(folder), PurePosixPath(group), 1)


def _folders(root: Path, mount: _Mount, group: PurePosixPath) -> Iterator[Path]:
    """The folder of ``group`` and those of the groups around it, as far as the mount shows them."""
    # In a container the mount's root may be the process's own group, seen from elsewhere: then only it is there.
    below = group.relative_to(mount.group) if group.is_relative_to(mount.group) else PurePosixPath()
    top = root / mount.folder.relative_to("/")
    for part in (below, *below.parents):
        yield top / part


def _quota(folder: Path, version: int) -> Iterator[float]:
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except OSError:
        # The root group has no such file, and groups without the cpu controller have none either.
        return
    if quota not in ("max", "-1"):
        yield int(quota) / int(period)
