from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress.errors import InputError
from compress.runner.threads import available_cpus, resolve_threads

CPUS = len(os.sched_getaffinity(0))


def machine(root: Path, mountinfo: str, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(mountinfo)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 30 0:27 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)


@pytest.mark.usefixtures("many_cpus")
@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"a/b": "300000 100000"}, 3),
        ({"a/b": "max 100000"}, 16),
        ({"a/b": "max 100000", "a": "200000 100000"}, 2),
        ({"a/b": "250000 100000", "a": "900000 100000"}, 2),
        ({"a/b": "50000 100000"}, 1),
        ({"a/b": "9900000 100000"}, 16),
        ({}, 16),
    ],
)
def test_quotas_of_all_enclosing_groups_count(tmp_path: Path, quotas: dict[str, str], expected: int) -> None:
    files = {f"sys/fs/cgroup/{group}/cpu.max": text + "\n" for group, text in quotas.items()}
    assert available_cpus(machine(tmp_path, V2, "0::/a/b\n", files)) == expected


@pytest.mark.usefixtures("many_cpus")
@pytest.mark.parametrize(("quota", "expected"), [("400000", 4), ("-1", 16), ("99999", 1)])
def test_quotas_of_the_first_version_of_control_groups_count(tmp_path: Path, quota: str, expected: int) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct/docker/c1"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000\n"}
    cgroup = "5:cpuset:/elsewhere\n3:cpu,cpuacct:/docker/c1\n1:name=systemd:/\n0::/\n"
    assert available_cpus(machine(tmp_path, V1, cgroup, files)) == expected


@pytest.mark.usefixtures("many_cpus")
def test_a_container_that_sees_only_its_own_group_finds_its_quota(tmp_path: Path) -> None:
    mountinfo = "30 23 0:26 /docker/c1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    root = machine(tmp_path, mountinfo, "0::/docker/c1/inner\n", {"sys/fs/cgroup/cpu.max": "600000 100000\n"})
    assert available_cpus(root) == 6


@pytest.mark.usefixtures("many_cpus")
def test_a_machine_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert available_cpus(tmp_path) == 16


def test_affinity_counts_and_not_the_machine() -> None:
    one = min(os.sched_getaffinity(0))
    code = "from compress.runner.threads import *; print(available_cpus(), resolve_threads('auto'))"
    command = ["taskset", "-c", str(one), sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["1", "1"]


def test_a_number_within_what_is_available_is_kept() -> None:
    assert resolve_threads(1) == 1
    assert resolve_threads(available_cpus()) == available_cpus() <= CPUS


@pytest.mark.parametrize("requested", [0, -1, 9999])
def test_other_numbers_are_refused_with_both_numbers(requested: int) -> None:
    with pytest.raises(InputError, match=f"{requested} threads .* {available_cpus()} CPUs") as caught:
        resolve_threads(requested)
    assert caught.value.exit_code == 2
