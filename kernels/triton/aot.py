"""Compiles kernels ahead of time, with no GPU: what they need of a chip, and whether they fit it.

A module of kernels lists what to compile in `aot_variants(chip)`; MODULES names the modules. This must run
in a process without TRITON_INTERPRET: see recipes/triton_aot.py.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from batchinfer.kernels.triton.launch import CHIPS, Chip, is_interpreted
from batchinfer.kernels.triton.variants import Variant

#: Modules of this package that have `aot_variants(chip: Chip) -> list[Variant]`.
MODULES: tuple[str, ...] = ("activation", "attention", "copy", "head", "linear", "norm", "rope", "sample")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a chip has to give a program of the kernel."""

    name: str
    label: str
    chip: str
    num_warps: int
    num_stages: int
    registers: int  # of a thread; on AMD vector registers, accumulation registers included
    shared_bytes: int
    spilled_bytes: int  # of a thread: stores to memory that stand for registers; on AMD four for each register
    matrix_instructions: tuple[str, ...]  # the distinct ones, whatever their number of columns
    product: str  # see Variant


def variants(chip: Chip, modules: tuple[str, ...] = MODULES) -> Iterator[Variant]:
    for module in modules:
        yield from importlib.import_module(f"batchinfer.kernels.triton.{module}").aot_variants(chip)


def representative(chip: Chip) -> list[Variant]:
    """The first variant of each kernel."""
    first: dict[str, Variant] = {}
    for variant in variants(chip):
        first.setdefault(variant.name, variant)
    return list(first.values())


def compile_variant(variant: Variant, chip: Chip) -> Compiled:
    """Raises what Triton raises if the kernel does not compile for the chip."""
    if is_interpreted():
        raise RuntimeError("kernels are interpreted in this process: unset TRITON_INTERPRET")
    target = GPUTarget(chip.backend, chip.arch, chip.warp_size)
    kernel = triton.compile(_source(variant), target=target, options=variant.options)
    needs = _nvidia_needs(kernel.asm["ptx"], chip) if chip.backend == "cuda" else _amd_needs(kernel.asm["amdgcn"])
    return Compiled(
        name=variant.name,
        label=variant.label,
        chip=chip.name,
        num_warps=variant.options["num_warps"],
        num_stages=variant.options["num_stages"],
        shared_bytes=kernel.metadata.shared,
        product=variant.product,
        **needs,
    )


def faults(found: Iterable[Compiled]) -> list[str]:
    """What must not be: a sentence for each kernel that does not fit its chip, or may break the invariance."""
    said = []
    products: dict[tuple[str, str], Compiled] = {}
    for one in found:
        what = f"{one.name} ({one.label}) on {one.chip}"
        limit = CHIPS[one.chip].max_shared_bytes
        if one.shared_bytes > limit:
            said.append(f"{what} needs {one.shared_bytes} bytes of shared memory, the chip has {limit}")
        if one.spilled_bytes:
            said.append(f"{what} spills {one.spilled_bytes} bytes of registers")
        other = products.setdefault((one.product, one.chip), one) if one.product else one
        if one.matrix_instructions != other.matrix_instructions:
            said.append(f"{what} multiplies by {one.matrix_instructions}, {other.label} by {other.matrix_instructions}")
    return said


def _source(variant: Variant) -> ASTSource:
    names = list(variant.kernel.arg_names)
    unknown = (set(variant.signature) | set(variant.constexprs)) ^ set(names)
    if unknown:
        raise ValueError(f"{variant.name} ({variant.label}): no such parameter, or one without a type: {unknown}")
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        if name in variant.constexprs:
            signature[name] = "constexpr"
            continue
        kind, _, multiple = variant.signature[name].partition(":")
        signature[name] = kind
        if multiple == "16" or (kind.startswith("*") and not multiple):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(variant.kernel, signature, variant.constexprs, attributes)


def _nvidia_needs(ptx: str, chip: Chip) -> dict[str, Any]:
    """What ptxas says of the assembly, compiled as Triton does."""
    arch = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        command = [
            get_ptxas(int(chip.arch)).path,
            "-v",
            "--fmad=false",
            f"--gpu-name={arch}",
            str(source),
            "-o",
            f"{source}.o",
        ]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    matrix = set(re.findall(r"\b(wgmma\.mma_async|mma)\.sync[.\w]*?\.(m\d+n\d+k\d+)([.\w]*)", ptx))
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        "matrix_instructions": tuple(sorted({_without_columns(*found) for found in matrix})),
    }


def _without_columns(name: str, shape: str, types: str) -> str:
    """ "wgmma.mma_async m64k16 f32.bf16.bf16": how many columns it has does not touch the order of sums."""
    rows, depth = re.findall(r"m(\d+)n\d+k(\d+)", shape)[0]
    kinds = [part for part in types.split(".") if part and part not in ("row", "col")]
    return f"{name} m{rows}k{depth} {'.'.join(kinds)}"


def _amd_needs(assembly: str) -> dict[str, Any]:
    """What the metadata behind the assembly say."""

    def number(name: str) -> int:
        return sum(map(int, re.findall(rf"\.{name}:\s+(\d+)", assembly)))

    return {
        # .vgpr_count holds both files of registers where they are one, as on gfx942.
        "registers": number("vgpr_count"),
        "spilled_bytes": max(4 * number("vgpr_spill_count"), number("private_segment_fixed_size")),
        "matrix_instructions": tuple(sorted(set(re.findall(r"\b(v_mfma_\w+)", assembly)))),
    }
