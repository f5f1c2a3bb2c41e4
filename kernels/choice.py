"""Which kernels a model runs on, and why: Triton's on a GPU, C++ on a CPU, plain torch where neither can."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from batchinfer.errors import InputError
from batchinfer.kernels.cpu import choice as cpu
from batchinfer.kernels.cpu.choice import TORCH, KernelChoice

if TYPE_CHECKING:
    import torch

    from batchinfer.models.spec import DecoderSpec

#: Names one of FORCED instead of the best: for tests and for comparing.
FORCE_VARIABLE = "BATCHINFER_KERNELS"
INTERPRET_VARIABLE = "TRITON_INTERPRET"
#: Products by cuBLAS (rocBLAS on AMD), whose sums may depend on the number of rows.
TRITON = "triton"
#: Products by Triton too: a row's bits depend on that row alone.
TRITON_DETERMINISTIC = "triton-deterministic"
TRITON_KERNELS = (TRITON, TRITON_DETERMINISTIC)
FORCED = (TRITON, TORCH)


def choose_kernels(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
    has_fp8_kv: bool = False,
) -> KernelChoice:
    """The fastest kernels that can run the model on the device.

    Args:
        deterministic: a row's bits must not depend on its company. On a CPU they never do.
        has_fp8_kv: KV is kept in fp8, which the C++ kernels cannot.

    Raises:
        InputError: the environment names kernels that cannot run here, or nothing here is deterministic.
    """
    forced = forced_kernels()
    if device.type == "cpu":
        if forced is None:
            chosen = cpu.choose_kernels(spec, dtype, device)
            return chosen if chosen.name == TORCH or not has_fp8_kv else _NO_FP8_KV
        if forced == TORCH:
            return KernelChoice(TORCH, f"{FORCE_VARIABLE}={TORCH}")
    reason = f"{FORCE_VARIABLE}={TORCH}" if forced == TORCH else unsupported(spec, dtype, device)
    if reason is None:
        return KernelChoice(TRITON_DETERMINISTIC if deterministic else TRITON)
    if forced == TRITON:
        raise InputError(f"{FORCE_VARIABLE}={TRITON}: {reason}")
    if deterministic:
        raise InputError(f"--deterministic needs the Triton kernels on {device}, which cannot run: {reason}")
    return KernelChoice(TORCH, reason, is_missing=forced is None)


#: Where the C++ kernels would have run.
_NO_FP8_KV = KernelChoice(
    TORCH,
    "the C++ kernels have no fp8 KV",
    is_missing=True,
    remedy="Leave out --kv-dtype fp8 to use them: on a CPU it saves memory alone",
)


def forced_kernels() -> str | None:
    """What the environment asks for. Raises InputError for a name that does not exist."""
    forced = os.environ.get(FORCE_VARIABLE) or None
    if forced is not None and forced not in FORCED:
        raise InputError(f"{FORCE_VARIABLE} must be one of {', '.join(FORCED)}; got {forced!r}")
    return forced


def is_interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU. It reads the variable when a kernel is defined."""
    return os.environ.get(INTERPRET_VARIABLE, "").lower() in ("1", "true", "on", "yes")


def unsupported(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the Triton kernels cannot run this model on this device; None: they can."""
    import torch

    if device.type not in ("cuda", "cpu"):
        return f"the device is {device}"
    if device.type == "cuda" and is_interpreted():
        return f"{INTERPRET_VARIABLE} is set, so Triton would interpret its kernels on the CPU: unset it"
    if device.type == "cpu" and not is_interpreted():
        return f"on a CPU Triton only interprets its kernels, very slowly, for tests: set {INTERPRET_VARIABLE}=1"
    if device.type == "cpu" and dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16 arithmetic: use --dtype float32"
    problem = _import_problem()
    if problem is not None:
        return f"triton cannot be imported, install it with pip install triton ({problem})"
    from batchinfer.kernels.triton.launch import chip_of

    try:
        chip_of(device)
    except ValueError as error:
        return str(error)
    return unsupported_shape(spec)


def unsupported_shape(spec: DecoderSpec) -> str | None:
    """Why the Triton kernels cannot run a model of these sizes."""
    if spec.head_dim % 8 or not 16 <= spec.head_dim <= 256:
        return f"head_dim {spec.head_dim} is not a multiple of 8 from 16 to 256"
    if spec.rope.dim % 2:
        return f"the rotated part of a head is odd: {spec.rope.dim}"
    return None


def _import_problem() -> str | None:
    try:
        import triton  # noqa: F401
    except Exception as error:  # a build for another driver fails in its own ways
        return f"{type(error).__name__}: {error}"
    return None
