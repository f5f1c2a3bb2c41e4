"""How fast this machine reads memory and multiplies bf16 matrices, measured in about a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from batchinfer.kernels.cpu.choice import TORCH

BYTES_READ = 256 << 20  # beyond any cache
SIZE = 2048  # of the weight, 8 MB
ROWS = 512
TIME_S = 0.2  # for each figure


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Best of the repetitions: what the machine can, not what neighbours left of it."""

    read_bytes_per_s: float
    torch_flops: float  # bf16 matrix product of torch, FLOP/s
    kernels_flops: float | None  # of the C++ kernels


def measure(kernels: str, free_memory_bytes: int) -> MachineSpeed:
    """With torch's current number of threads.

    Args:
        kernels: instruction set, or "torch".
    """
    x, weight = (torch.randn(rows, SIZE).to(torch.bfloat16) for rows in (ROWS, SIZE))
    flops = 2.0 * ROWS * SIZE * SIZE
    return MachineSpeed(
        read_bytes_per_s=_read_rate(min(BYTES_READ, free_memory_bytes // 4)),
        torch_flops=flops / _best_s(lambda: torch.nn.functional.linear(x, weight)),
        kernels_flops=None if kernels == TORCH else flops / _kernels_s(kernels, x, weight),
    )


def _read_rate(num_bytes: int) -> float:
    data = torch.ones(num_bytes // 8, dtype=torch.int64)
    return data.nbytes / _best_s(data.max)


def _kernels_s(kernels: str, x: torch.Tensor, weight: torch.Tensor) -> float:
    from batchinfer.kernels.cpu.library import load_library

    library = load_library(kernels)
    packed, out = torch.empty_like(weight), torch.empty_like(x)
    library.bi_pack(weight.data_ptr(), packed.data_ptr(), SIZE, SIZE)
    addresses = (x.data_ptr(), packed.data_ptr(), None, out.data_ptr())
    return _best_s(lambda: library.bi_linear(*addresses, ROWS, SIZE, SIZE))


def _best_s(call: Callable[[], object]) -> float:
    call()  # first touch, first threads
    best, end = float("inf"), time.perf_counter() + TIME_S
    while True:
        began = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - began)
        if now >= end:
            return best
