"""What the kernels are launched for: the chip, its limits, and the options that every launch has.

Kernels run on a GPU, or in Triton's interpreter on CPU tensors when TRITON_INTERPRET=1 was set before
Triton was imported. Configurations are chosen from shapes and chip alone: nothing is timed, so the bits of
a result never depend on what a timing found.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton


@dataclass(frozen=True, slots=True)
class Chip:
    """What a configuration is chosen for."""

    name: str
    backend: str  # "cuda" or "hip", as Triton calls them
    arch: int | str  # as triton.backends.compiler.GPUTarget takes it
    warp_size: int
    max_shared_bytes: int  # of one program


CHIPS = {
    # sm_80 has 163 KiB. What is compiled for it also runs on sm_86, sm_89 and sm_120, which have less.
    "sm_80": Chip("sm_80", "cuda", 80, 32, 99 * 1024),
    "sm_90": Chip("sm_90", "cuda", 90, 32, 227 * 1024),
    "gfx942": Chip("gfx942", "hip", "gfx942", 64, 64 * 1024),
}


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def chip_of(device: torch.device) -> Chip:
    """The chip whose configurations suit the device. Raises ValueError if there is none."""
    if device.type == "cuda":
        return _gpu(device.index if device.index is not None else torch.cuda.current_device())
    if device.type == "cpu" and is_interpreted():
        return CHIPS["sm_80"]
    raise ValueError(f"Triton kernels run on a GPU (or on CPU tensors with TRITON_INTERPRET=1), not on {device}")


@cache
def _gpu(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
        if name not in CHIPS:
            raise ValueError(f"{properties.name}: there are no configurations for {name}, only for gfx942")
        return CHIPS[name]
    if properties.major < 8:
        raise ValueError(f"{properties.name}: sm_{properties.major}{properties.minor} is older than sm_80")
    # sm_12x has matrix instructions and shared memory like sm_8x, for all its number says.
    return CHIPS["sm_90" if properties.major in (9, 10, 11) else "sm_80"]


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors (compute units) of the device; few in the interpreter, where programs run in turn."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def options(chip: Chip, num_warps: int, num_stages: int = 1) -> dict[str, Any]:
    """Keyword arguments of a launch, and of `triton.compile`, beside the kernel's own.

    Products and sums are not contracted, which Triton's releases differ in by default; on AMD all matrix
    products use the 16-row instruction, so that the order of their sums does not depend on the tile.
    """
    chosen: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    if chip.backend == "hip":
        chosen["matrix_instr_nonkdim"] = 16
    return chosen


def cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
