"""Which kernels a model runs on, on a GPU (made up here) and where the environment asks for Triton's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_models import SMALL_SPEC

from batchinfer.errors import InputError
from batchinfer.kernels import choice
from batchinfer.kernels.choice import FORCE_VARIABLE, TRITON, TRITON_DETERMINISTIC, choose_kernels
from batchinfer.kernels.cpu import library
from batchinfer.kernels.cpu.choice import TORCH, KernelChoice
from batchinfer.kernels.triton import launch

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (FORCE_VARIABLE, library.FORCE_VARIABLE, choice.INTERPRET_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def use_gpu(monkeypatch: pytest.MonkeyPatch, hip: str | None = None, **properties: object) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))
    launch._gpu.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hopper."""
    use_gpu(monkeypatch, name="H200", major=9, minor=0)
    yield
    launch._gpu.cache_clear()


def test_triton_on_a_gpu(gpu: None) -> None:
    assert choose_kernels(SMALL_SPEC, BF16, GPU) == KernelChoice(TRITON)
    assert choose_kernels(SMALL_SPEC, FP32, GPU) == KernelChoice(TRITON)
    assert choose_kernels(SMALL_SPEC, BF16, GPU, deterministic=True) == KernelChoice(TRITON_DETERMINISTIC)


def test_triton_on_amd(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, hip="6.4", name="MI300X", gcnArchName="gfx942:sramecc+:xnack-")
    assert choose_kernels(SMALL_SPEC, BF16, GPU).name == TRITON
    use_gpu(monkeypatch, hip="6.4", name="Vega", gcnArchName="gfx906")
    assert "gfx906" in str(choose_kernels(SMALL_SPEC, BF16, GPU).reason)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cpu_runs_what_it_ran_before(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There every row's bits are its own whatever is asked."""
    from batchinfer.kernels.cpu import choice as cpu

    assert choose_kernels(SMALL_SPEC, BF16, CPU, deterministic=deterministic) == cpu.choose_kernels(
        SMALL_SPEC, BF16, CPU
    )
    monkeypatch.setenv(library.FORCE_VARIABLE, "none")
    assert choose_kernels(SMALL_SPEC, BF16, CPU, deterministic=deterministic).reason == "BATCHINFER_CPU_KERNELS=none"


def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it raises ImportError


def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, name="T4", major=7, minor=5)


@pytest.mark.parametrize(
    ("spoil", "spec", "reason"),
    [
        (no_triton, SMALL_SPEC, "pip install triton"),
        (old_gpu, SMALL_SPEC, "T4: sm_75 is older than sm_80"),
        (None, replace(SMALL_SPEC, head_dim=512), "head_dim 512"),
        (None, replace(SMALL_SPEC, rope=replace(SMALL_SPEC.rope, dim=7)), "is odd: 7"),
    ],
)
def test_what_triton_cannot_do_runs_on_torch_and_is_told(
    gpu: None, spoil: object, spec: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spoil is not None:
        spoil(monkeypatch)  # type: ignore[operator]
    chosen = choose_kernels(spec, BF16, GPU)  # type: ignore[arg-type]
    assert chosen.name == TORCH
    assert chosen.is_missing, "a GPU that runs plain torch wastes most of its time"
    assert reason in str(chosen.reason)
    with pytest.raises(InputError, match="--deterministic needs the Triton kernels on cuda"):
        choose_kernels(spec, BF16, GPU, deterministic=True)  # type: ignore[arg-type]
    monkeypatch.setenv(FORCE_VARIABLE, TRITON)
    with pytest.raises(InputError, match="BATCHINFER_KERNELS=triton: "):
        choose_kernels(spec, BF16, GPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [CPU, GPU])
def test_plain_torch_can_be_forced(gpu: None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE_VARIABLE, TORCH)
    assert choose_kernels(SMALL_SPEC, BF16, device) == KernelChoice(TORCH, "BATCHINFER_KERNELS=torch")


def test_plain_torch_on_a_gpu_is_not_deterministic(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE_VARIABLE, TORCH)
    with pytest.raises(InputError, match="cannot run: BATCHINFER_KERNELS=torch"):
        choose_kernels(SMALL_SPEC, BF16, GPU, deterministic=True)


def test_triton_on_a_cpu_is_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE_VARIABLE, TRITON)
    with pytest.raises(InputError, match="set TRITON_INTERPRET=1"):
        choose_kernels(SMALL_SPEC, FP32, CPU)
    monkeypatch.setenv(choice.INTERPRET_VARIABLE, "1")
    assert choose_kernels(SMALL_SPEC, FP32, CPU) == KernelChoice(TRITON)
    assert choose_kernels(SMALL_SPEC, FP32, CPU, deterministic=True) == KernelChoice(TRITON_DETERMINISTIC)
    with pytest.raises(InputError, match="no bfloat16 arithmetic: use --dtype float32"):
        choose_kernels(SMALL_SPEC, BF16, CPU)


def test_the_interpreter_is_not_for_a_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.INTERPRET_VARIABLE, "1")
    chosen = choose_kernels(SMALL_SPEC, BF16, GPU)
    assert (chosen.name, chosen.is_missing) == (TORCH, True)
    assert "TRITON_INTERPRET is set" in str(chosen.reason)


def test_the_interpreter_alone_changes_nothing_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.INTERPRET_VARIABLE, "1")
    assert choose_kernels(SMALL_SPEC, FP32, CPU).name == TORCH


def test_a_wrong_name_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE_VARIABLE, "cuda")
    for device in (CPU, GPU):
        with pytest.raises(InputError, match="BATCHINFER_KERNELS must be one of triton, torch; got 'cuda'"):
            choose_kernels(SMALL_SPEC, BF16, device)


def test_fp8_kv_on_a_gpu_changes_no_choice(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernels(SMALL_SPEC, BF16, GPU, has_fp8_kv=True) == KernelChoice(TRITON)
    monkeypatch.setenv(FORCE_VARIABLE, TORCH)
    assert choose_kernels(SMALL_SPEC, BF16, GPU, has_fp8_kv=True).name == TORCH


def test_fp8_kv_on_a_cpu_is_plain_torch_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ kernels have none; nobody gets KV in bf16 instead without hearing of it."""
    from batchinfer.kernels.cpu import choice as cpu

    monkeypatch.setattr(cpu, "choose_kernels", lambda *_: KernelChoice("avx2"))
    assert choose_kernels(SMALL_SPEC, BF16, CPU) == KernelChoice("avx2")
    chosen = choose_kernels(SMALL_SPEC, BF16, CPU, has_fp8_kv=True)
    assert (chosen.name, chosen.is_missing) == (TORCH, True)
    assert "C++ kernels have no fp8 KV" in str(chosen.reason)
    assert "Leave out --kv-dtype fp8" in str(chosen.remedy)
    on_torch = KernelChoice(TORCH, "the dtype is torch.float32, the kernels are bfloat16")
    monkeypatch.setattr(cpu, "choose_kernels", lambda *_: on_torch)
    assert choose_kernels(SMALL_SPEC, FP32, CPU, has_fp8_kv=True) == on_torch, "which loses nothing"
