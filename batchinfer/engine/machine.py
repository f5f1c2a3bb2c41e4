"""What the machine offers: cores, free memory, native dtypes."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from batchinfer.config import Dtype, KVDtype
from batchinfer.engine import cgroups
from batchinfer.errors import InputError
from batchinfer.kernels.fp8_kv import FP8


def cores() -> list[set[int]]:
    """The CPUs of each physical core, of those that this process may use."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return [{cpu} for cpu in range(os.cpu_count() or 1)]
    cores: dict[str, set[int]] = {}
    for cpu in sorted(allowed):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            name = siblings.read_text().strip()
        except OSError:
            name = str(cpu)
        cores.setdefault(name, set()).add(cpu)
    return list(cores.values())


def num_physical_cores() -> int:
    """Physical cores among the CPUs this process may use, no more than a container's CPU time fills."""
    quota = cgroups.cpu_quota()
    return max(1, len(cores()) if quota is None else min(len(cores()), math.ceil(quota)))


def free_memory_bytes() -> int:
    """Memory that can be had without swapping, the limit of a container included."""
    limit = cgroups.free_memory_bytes()
    free = _meminfo_available()
    return free if limit is None else min(free, limit)


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def choose_device(name: str) -> torch.device:
    """Raises InputError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name!r} is no device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {name}: torch {torch.__version__} finds no GPU here; use --device cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {name}: there are {torch.cuda.device_count()} GPUs, numbered from 0")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    return device


def fallback_note(asked: str, device: torch.device) -> str | None:
    """What to tell somebody whose --device auto came to the CPU."""
    if asked != "auto" or device.type != "cpu":
        return None
    return f"torch {torch.__version__} finds no GPU here: running on the CPU"


def choose_dtype(name: Dtype, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """`auto`: the checkpoint's own dtype where the device computes it natively, else float32.

    A quantised checkpoint (None) counts as bfloat16.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.float16 if checkpoint == "float16" else torch.bfloat16
    is_native = checkpoint in (None, "bfloat16") and _cpu_has_bfloat16()
    return torch.bfloat16 if is_native else torch.float32


def choose_kv_dtype(name: KVDtype, dtype: torch.dtype) -> torch.dtype:
    """Of the KV of a model whose weights are of this dtype."""
    return dtype if name == "auto" else FP8


def _cpu_has_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any(flag in flags for flag in (" avx512_bf16", " amx_bf16", " bf16"))
