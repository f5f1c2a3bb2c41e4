"""What a container or a service manager lets this process use: cgroups of version 2 and 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def free_memory_bytes(root: Path = ROOT, own: Path = OWN) -> int | None:
    """What the tightest limit above this process leaves; None: there is no limit."""
    found = [_free_v2(folder) for folder in _folders(root, own, None)]
    found += [_free_v1(folder) for folder in _folders(root, own, "memory")]
    free = [value for value in found if value is not None]
    return max(0, min(free)) if free else None


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """CPUs' worth of time that this process may use, such as 1.5; None: there is no limit."""
    found = [_quota_v2(folder) for folder in _folders(root, own, None)]
    found += [_quota_v1(folder) for folder in _folders(root, own, "cpu")]
    quotas = [value for value in found if value is not None]
    return min(quotas) if quotas else None


def _folders(root: Path, own: Path, controller: str | None) -> Iterator[Path]:
    """The process's cgroup and those above it. In a container the named path may not be there, its root is."""
    for line in (_text(own) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == (controller or "") or controller in controllers.split(","):
            mount = root / controllers if controllers else root
            folder = mount / path.lstrip("/")
            yield folder
            while folder != mount:
                folder = folder.parent
                yield folder


def _free_v2(folder: Path) -> int | None:
    return _free(folder, "memory.max", "memory.current", "inactive_file")


def _free_v1(folder: Path) -> int | None:
    return _free(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _free(folder: Path, limit_file: str, used_file: str, cache_key: str) -> int | None:
    limit, used = (_number(_text(folder / name)) for name in (limit_file, used_file))
    if limit is None or used is None or limit >= 1 << 60:  # version 1 writes "no limit" as a huge number
        return None
    # The cache of files that were read counts as used, and is given up when memory is asked for.
    statistics = dict(line.split() for line in (_text(folder / "memory.stat") or "").splitlines())
    return int(limit - used + min(used, int(statistics.get(cache_key, 0))))


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = (_text(folder / "cpu.max") or "").strip().partition(" ")  # such as "max 100000"
    return _quotient(_number(quota), _number(period))


def _quota_v1(folder: Path) -> float | None:
    quota, period = (_number(_text(folder / name)) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return _quotient(quota, period)


def _quotient(quota: float | None, period: float | None) -> float | None:
    if quota is None or period is None or quota <= 0 or period <= 0:  # version 1 writes "no limit" as -1
        return None
    return quota / period


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
