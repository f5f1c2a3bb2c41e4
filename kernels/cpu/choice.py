"""Which kernels a model runs on if its device is a CPU, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchinfer.kernels.cpu.library import (
    FORCE_VARIABLE,
    LibraryError,
    forced_instruction_set,
    load_library,
    supported_instruction_sets,
)

if TYPE_CHECKING:
    import torch

    from batchinfer.models.spec import DecoderSpec

#: Every op in plain torch.
TORCH = "torch"
HOW_TO_BUILD = "install a C++ compiler (g++ or clang++) and then batchinfer once more"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What the ops of a model run on."""

    name: str  # an instruction set of the C++ kernels, or TORCH
    reason: str | None = None  # why it is not the best that there is
    is_missing: bool = False  # kernels could have run, were they there: the user should hear of it
    remedy: str | None = None  # what to do about it


def choose_kernels(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> KernelChoice:
    """The C++ kernels where they can run the model, else plain torch.

    Raises InputError if BATCHINFER_CPU_KERNELS names kernels that cannot run here.
    """
    from batchinfer.kernels.cpu.decoder import unsupported

    forced = forced_instruction_set()
    if forced == TORCH:
        return KernelChoice(TORCH, f"{FORCE_VARIABLE}=none")
    reason = unsupported(spec, dtype, device)
    if reason is not None:
        return KernelChoice(TORCH, reason)
    return KernelChoice(forced) if forced else best_built()


def best_built() -> KernelChoice:
    """The first instruction set, best first, whose library loads."""
    problems = []
    for name in supported_instruction_sets():
        try:
            load_library(name)
        except LibraryError as error:
            problems.append(str(error))
        else:
            return KernelChoice(name, "; ".join(problems) or None)
    return KernelChoice(TORCH, "; ".join(problems), is_missing=True, remedy=f"To build them: {HOW_TO_BUILD}")
