"""The machine's rates: of each dtype, with and without kernels, in little memory."""

from __future__ import annotations

import pytest
import torch
from tiny_models import INSTRUCTION_SETS

from batchinfer import machine_speed
from batchinfer.machine_speed import measure


@pytest.fixture(autouse=True)
def quick_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "TIME_S", 0.001)
    monkeypatch.setattr(machine_speed, "BYTES_READ", 1 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch(dtype: torch.dtype) -> None:
    speed = measure("torch", 1 << 30, dtype)
    assert speed.kernels_flops is None
    assert speed.flops_per_s == speed.torch_flops > 1e7
    assert speed.read_bytes_per_s > 1e7


@pytest.mark.parametrize("kernels", ["triton", "triton-deterministic"])
def test_kernels_of_a_gpu_are_not_looked_for_among_those_of_the_cpu(kernels: str) -> None:
    assert measure(kernels, 1 << 30).kernels_flops is None


@pytest.mark.parametrize("kernels", INSTRUCTION_SETS)
def test_each_build_of_the_kernels(kernels: str) -> None:
    speed = measure(kernels, 1 << 30)
    assert speed.kernels_flops is not None
    assert speed.kernels_flops > 1e7
    assert speed.flops_per_s == max(speed.kernels_flops, speed.torch_flops)


@pytest.mark.parametrize("kernels", ["torch", *INSTRUCTION_SETS[:1]])
def test_little_free_memory(kernels: str) -> None:
    """A quarter of what is free is read: far less than one weight of the kernels has."""
    assert measure(kernels, 1 << 16).read_bytes_per_s > 0
