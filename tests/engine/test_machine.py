"""Cores and memory that a process may use, from made-up machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchinfer.engine import cgroups, machine

GIB = 1 << 30


class Cgroups:
    """A made-up /sys/fs/cgroup and /proc/self/cgroup."""

    def __init__(self, folder: Path, own: str) -> None:
        self.root = folder / "fs"
        self.own = folder / "own"
        self.own.write_text(own)

    def write(self, path: str, **files: object) -> None:
        (self.root / path).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (self.root / path / name.replace("__", ".")).write_text(f"{value}\n")

    def quota(self) -> float | None:
        return cgroups.cpu_quota(self.root, self.own)

    def free(self) -> int | None:
        return cgroups.free_memory_bytes(self.root, self.own)


def test_no_cgroups_no_limits(tmp_path: Path) -> None:
    assert cgroups.cpu_quota(tmp_path / "a", tmp_path / "b") is None
    assert cgroups.free_memory_bytes(tmp_path / "a", tmp_path / "b") is None


def test_version_2_takes_the_tightest_limit_above(tmp_path: Path) -> None:
    found = Cgroups(tmp_path, "0::/slice/job\n")
    found.write("slice/job", cpu__max="max 100000", memory__max="max", memory__current=GIB)
    assert (found.quota(), found.free()) == (None, None)
    found.write("slice", cpu__max="150000 100000", memory__max=4 * GIB, memory__current=3 * GIB)
    assert (found.quota(), found.free()) == (1.5, GIB)
    found.write("", cpu__max="50000 100000", memory__max=8 * GIB, memory__current=7.5 * GIB)
    assert (found.quota(), found.free()) == (0.5, GIB // 2)


def test_path_of_the_host_is_not_there_in_a_container(tmp_path: Path) -> None:
    found = Cgroups(tmp_path, "0::/docker/0123\n")
    found.write("", cpu__max="200000 100000", memory__max=GIB, memory__current=0)
    assert (found.quota(), found.free()) == (2.0, GIB)


def test_version_1(tmp_path: Path) -> None:
    found = Cgroups(tmp_path, "4:memory:/job\n3:cpuset:/\n1:cpu,cpuacct:/job\n0::/\n")
    found.write("memory/job", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    found.write("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    found.write("cpu,cpuacct/job", **{"cpu__cfs_quota_us": 300000, "cpu__cfs_period_us": 100000})
    found.write("cpu,cpuacct", **{"cpu__cfs_quota_us": -1, "cpu__cfs_period_us": 100000})
    assert (found.quota(), found.free()) == (3.0, GIB)


def test_cache_of_files_is_free(tmp_path: Path) -> None:
    """Reading the model's weights fills it; without this, a container seemed to have no memory left."""
    found = Cgroups(tmp_path, "0::/\n")
    statistics = f"anon {GIB}\ninactive_file {5 * GIB}\nactive_file 7"
    found.write("", memory__max=8 * GIB, memory__current=7 * GIB, memory__stat=statistics)
    assert found.free() == 6 * GIB


def test_used_above_the_limit_is_nothing_free(tmp_path: Path) -> None:
    found = Cgroups(tmp_path, "0::/\n")
    found.write("", memory__max=GIB, memory__current=2 * GIB)
    assert found.free() == 0


@pytest.mark.parametrize(("quota", "expected"), [(None, None), (0.3, 1), (1.0, 1), (1.5, 2), (1000.0, None)])
def test_cores_are_no_more_than_a_quota_fills(
    quota: float | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: None)
    every = machine.num_physical_cores()
    assert 1 <= every <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: quota)
    assert machine.num_physical_cores() == min(every, expected or every)


def test_cores_follow_the_affinity_mask() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert machine.num_physical_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_free_memory_is_the_lesser_of_machine_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "free_memory_bytes", lambda: None)
    whole = machine.free_memory_bytes()
    assert whole > 0
    monkeypatch.setattr(cgroups, "free_memory_bytes", lambda: 12345)
    assert machine.free_memory_bytes() == 12345
