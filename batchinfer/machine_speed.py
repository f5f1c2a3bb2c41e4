"""How fast this machine reads memory and multiplies matrices, measured in about two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from batchinfer.kernels.cpu.library import INSTRUCTION_SETS

BYTES_READ = 256 << 20  # beyond any cache
#: (rows, outputs, inputs) of products at which kernels come near their best.
SHAPES = ((256, 576, 1536), (512, 2048, 2048))
GPU_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192))
TIME_S = 0.15  # for each thing tried
#: Parts of the memory that are read. Each thread reads one piece of it; pieces that begin a power of two apart
#: would be in the same bank of memory all the way.
_READ_SHARES = (1.0, 0.93, 0.79)


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Best of the repetitions and of what was tried: what the machine can, not what neighbours left of it."""

    read_bytes_per_s: float
    torch_flops: float  # matrix product of torch, FLOP/s
    kernels_flops: float | None  # of the C++ kernels; None: others multiply with torch

    @property
    def flops_per_s(self) -> float:
        """Of whichever is faster."""
        return max(self.torch_flops, self.kernels_flops or 0.0)

    def best_with(self, other: MachineSpeed) -> MachineSpeed:
        """Of two measurements on the same machine."""
        kernels = [speed.kernels_flops for speed in (self, other) if speed.kernels_flops is not None]
        return MachineSpeed(
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.torch_flops, other.torch_flops),
            max(kernels, default=None),
        )


def measure(
    kernels: str,
    free_memory_bytes: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> MachineSpeed:
    """With torch's current number of threads.

    Args:
        kernels: an instruction set, which multiplies bfloat16 alone; or any others.
        dtype: of the matrices.
    """
    device = torch.device(device)
    shapes = GPU_SHAPES if device.type == "cuda" else SHAPES
    operands = [_operands(shape, dtype, device) for shape in shapes]
    is_cpp = kernels in INSTRUCTION_SETS
    ours = [_kernels_product(kernels, *pair) for pair in operands] if is_cpp else None
    return MachineSpeed(
        read_bytes_per_s=_read_rate(kernels, min(BYTES_READ, free_memory_bytes // 4), device),
        torch_flops=_best_flops([partial(torch.nn.functional.linear, *pair) for pair in operands], shapes, device),
        kernels_flops=None if ours is None else _best_flops(ours, shapes, device),
    )


def _operands(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    rows, outputs, inputs = shape
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    return x.to(device, dtype), weight.to(device, dtype)


def _best_flops(
    products: Iterable[Callable[[], object]], shapes: Iterable[tuple[int, int, int]], device: torch.device
) -> float:
    seconds = (_best_s(product, device) for product in products)
    return max(2.0 * m * n * k / s for (m, n, k), s in zip(shapes, seconds, strict=True))


def _read_rate(kernels: str, num_bytes: int, device: torch.device) -> float:
    data = torch.ones(num_bytes // 4, device=device)
    parts = [data[: int(len(data) * share)] for share in _READ_SHARES]
    rates = [part.nbytes / _best_s(part.sum, device) for part in parts]
    outputs, inputs = data.nbytes // (2 * 16 * 2048) * 16, 2048
    if kernels in INSTRUCTION_SETS and outputs:
        # A product of one row reads the weight and does little else.
        weight = data.view(torch.bfloat16)[: outputs * inputs].view(outputs, inputs)
        x = torch.ones((1, inputs), dtype=torch.bfloat16)
        rates.append(weight.nbytes / _best_s(_kernels_product(kernels, x, weight, is_packed=True), device))
    return max(rates)


def _kernels_product(
    kernels: str, x: torch.Tensor, weight: torch.Tensor, *, is_packed: bool = False
) -> Callable[[], object]:
    from batchinfer.kernels.cpu.library import load_library

    library = load_library(kernels)
    outputs, inputs = weight.shape
    packed, out = weight, torch.empty((len(x), outputs), dtype=x.dtype)
    if not is_packed:
        packed = torch.empty_like(weight)
        library.bi_pack(weight.data_ptr(), packed.data_ptr(), outputs, inputs)

    def product() -> None:
        library.bi_linear(x.data_ptr(), packed.data_ptr(), None, out.data_ptr(), len(x), outputs, inputs)

    return product


def _best_s(call: Callable[[], object], device: torch.device) -> float:
    call()  # first touch, first threads
    best, end = float("inf"), time.perf_counter() + TIME_S
    while True:
        _wait_for(device)
        began = time.perf_counter()
        call()
        _wait_for(device)
        now = time.perf_counter()
        best = min(best, now - began)
        if now >= end:
            return best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
