"""What this machine offers, what is used of it, what is missing, and whether the results can be relied on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.version import __version__

if TYPE_CHECKING:
    from batchinfer.machine_speed import MachineSpeed
    from batchinfer.self_test import Invariance

#: What the kernels, or torch's, are written for.
FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16", "i8mm")
#: There if the system has a GPU, whatever torch makes of it: NVIDIA's and AMD's.
GPU_DEVICES = ("/dev/nvidia0", "/dev/kfd")
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "pyarrow", "numpy", "huggingface-hub", "triton")
_OPENMP = re.compile(r"/lib(?:gomp|iomp5|omp)(?:-\w+)?\.so[.\d]*$")


@dataclass(frozen=True, slots=True)
class Processor:
    name: str
    features: tuple[str, ...]
    num_physical_cores: int  # that this process may use, and has the time for
    num_cpus: int  # that this process may run on
    cpu_quota: float | None  # CPUs' worth of time of a container
    huge_pages: str | None  # "always", "madvise" or "never"


@dataclass(frozen=True, slots=True)
class Kernels:
    in_use: str  # for a bf16 model on the CPU: an instruction set, or "torch"
    reason: str | None  # why not better
    forced: str | None  # by the environment
    state: dict[str, str]  # each instruction set: "usable", or why not


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: str  # "9.0"; on AMD the architecture, "gfx942"
    kernels: str  # of a bf16 model there: "triton" or "torch"
    reason: str | None  # why not Triton's


@dataclass(frozen=True, slots=True)
class Report:
    """See `examine`."""

    processor: Processor
    free_memory_bytes: int
    threads: int
    openmp: tuple[str, ...]  # files of the runtimes in this process
    dtype: str  # what --dtype auto comes to for a bf16 checkpoint
    kernels: Kernels
    gpus: tuple[Gpu, ...]
    device: str  # what --device auto comes to
    models: dict[str, str | None]  # alias -> its package's folder, or None: not installed
    versions: dict[str, str | None]
    invariance: tuple[Invariance, ...]
    speed: MachineSpeed
    advice: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        return all(found.is_sound for found in self.invariance)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        for found, tested in zip(values["invariance"], self.invariance, strict=True):
            found["holds"] = tested.holds
            found["is_sound"] = tested.is_sound
            if tested.torch_difference == math.inf:  # JSON has no infinity
                found["torch_difference"] = None
        return {"version": __version__, "is_sound": self.is_sound, **values}

    def to_text(self) -> str:
        lines = [*_machine_lines(self), *_kernels_lines(self), *_speed_lines(self)]
        lines += [("models", _models_text(self.models))]
        lines += [("versions", ", ".join(f"{name} {version or 'missing'}" for name, version in self.versions.items()))]
        width = max(len(label) for label, _ in lines)
        text = [f"{label:<{width}}  {value}" for label, value in lines]
        return "\n".join([*text, *(f"- {advice}" for advice in self.advice)])


def examine() -> Report:
    """Look, run the invariance self-test on all kernels, and measure; takes some seconds."""
    import torch

    from batchinfer.engine.machine import choose_device, choose_dtype, free_memory_bytes, num_physical_cores
    from batchinfer.kernels.choice import TRITON
    from batchinfer.kernels.cpu.choice import TORCH
    from batchinfer.machine_speed import measure
    from batchinfer.self_test import check_invariance

    torch.set_num_threads(num_physical_cores())
    kernels = examine_kernels()
    usable = [name for name, state in kernels.state.items() if state == "usable"]
    gpus = examine_gpus()
    can_test = bool(gpus) and gpus[0].kernels == TRITON
    invariance = tuple(check_invariance(usable, torch.device("cuda:0") if can_test else None))
    speed = measure(kernels.in_use, free_memory_bytes())
    processor, openmp, models = examine_processor(), openmp_runtimes(), find_models()
    return Report(
        processor=processor,
        free_memory_bytes=free_memory_bytes(),
        threads=torch.get_num_threads(),
        openmp=openmp,
        dtype=str(choose_dtype("auto", "bfloat16", torch.device("cpu"))).removeprefix("torch."),
        kernels=kernels,
        gpus=gpus,
        device=str(choose_device("auto")),
        models=models,
        versions={name: _version(name) for name in PACKAGES},
        invariance=invariance,
        speed=speed,
        advice=(
            *_invariance_advice(invariance),
            *([f"plain torch is used: {kernels.reason}"] if kernels.in_use == TORCH and not kernels.forced else []),
            *machine_advice(openmp, gpus, has_gpu_device=any(Path(path).exists() for path in GPU_DEVICES)),
        ),
    )


def examine_kernels() -> Kernels:
    """Raises InputError if the environment names kernels that cannot run."""
    from batchinfer.kernels.cpu.choice import best_built
    from batchinfer.kernels.cpu.library import (
        INSTRUCTION_SETS,
        LibraryError,
        forced_instruction_set,
        load_library,
        supported_instruction_sets,
    )

    forced, supported = forced_instruction_set(), supported_instruction_sets()
    state = {}
    for name in INSTRUCTION_SETS:
        try:
            if name in supported:
                load_library(name)
            state[name] = "usable" if name in supported else "this processor cannot run it"
        except LibraryError as error:
            state[name] = str(error)
    best = best_built()
    return Kernels(forced or best.name, None if forced else best.reason, forced, state)


def examine_gpus() -> tuple[Gpu, ...]:
    """Those that torch can use. Raises InputError if the environment names kernels that cannot run there."""
    import torch

    from batchinfer.kernels.choice import choose_kernels
    from batchinfer.self_test import SPEC

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        chosen = choose_kernels(SPEC, torch.bfloat16, torch.device("cuda", index))
        capability = f"{properties.major}.{properties.minor}"
        if torch.version.hip is not None:
            capability = str(properties.gcnArchName).split(":")[0]
        found.append(Gpu(properties.name, properties.total_memory, capability, chosen.name, chosen.reason))
    return tuple(found)


def examine_processor() -> Processor:
    from batchinfer.engine.cgroups import cpu_quota
    from batchinfer.engine.machine import num_physical_cores

    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        lines = []
    values = {key.strip(): value.strip() for key, _, value in reversed(lines)}  # of the first processor
    flags = values.get("flags", values.get("Features", "")).split()
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Processor(
        name=values.get("model name") or platform.processor() or platform.machine(),
        features=tuple(name for name in FEATURES if name in flags),
        num_physical_cores=num_physical_cores(),
        num_cpus=affinity,
        cpu_quota=cpu_quota(),
        huge_pages=_huge_pages(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
    )


def openmp_runtimes(maps: Path = Path("/proc/self/maps")) -> tuple[str, ...]:
    """Files of the OpenMP runtimes that are loaded. More than one: their threads take the cores from each other."""
    try:
        paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    except OSError:
        return ()
    return tuple(sorted(path for path in paths if _OPENMP.search(path)))


def find_models() -> dict[str, str | None]:
    """Models that come in packages. Nothing is imported."""
    from batchinfer.models.source import ALIASES

    found: dict[str, str | None] = {}
    for alias, packaged in ALIASES.items():
        spec = importlib.util.find_spec(packaged.package)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        found[alias] = next((folder for folder in folders if (Path(folder) / packaged.file).exists()), None)
    return found


def _invariance_advice(invariance: Sequence[Invariance]) -> list[str]:
    return [
        f"with {found.kernels} in {found.dtype} results cannot be relied on: rows differ "
        f"{', '.join(found.differing)}. Please report this with the output of batchinfer doctor --json"
        for found in invariance
        if not found.is_sound
    ]


def machine_advice(openmp: tuple[str, ...], gpus: Sequence[Gpu], *, has_gpu_device: bool) -> list[str]:
    """What would make runs faster."""
    advice = []
    if len(openmp) > 1:
        advice.append(
            f"{len(openmp)} OpenMP runtimes are loaded ({', '.join(openmp)}), their threads take the cores from each "
            "other: use torch and batchinfer from one source, pip or conda"
        )
    if has_gpu_device and not gpus:
        advice.append("there is a GPU that this build of torch cannot use: https://pytorch.org/get-started")
    advice += [f"{gpu.name} runs plain torch, which is slower: {gpu.reason}" for gpu in gpus if gpu.reason]
    return advice


def _huge_pages(path: Path) -> str | None:
    try:
        chosen = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return None
    return chosen[1] if chosen else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine_lines(report: Report) -> list[tuple[str, str]]:
    processor = report.processor
    quota = "" if processor.cpu_quota is None else f", time of {processor.cpu_quota:g}"
    openmp = ", ".join(report.openmp) or "none found"
    return [
        ("processor", f"{processor.name} · {' '.join(processor.features) or 'no features known'}"),
        ("cores", f"{processor.num_physical_cores} physical of {processor.num_cpus} CPUs{quota}"),
        ("threads", f"{report.threads} by default · OpenMP: {openmp}"),
        (
            "memory",
            f"{report.free_memory_bytes / 2**30:.1f} GiB free · huge pages: {processor.huge_pages or 'unknown'}",
        ),
        *_gpu_lines(report),
    ]


def _gpu_lines(report: Report) -> list[tuple[str, str]]:
    auto = f"--device auto: {report.device}"
    if not report.gpus:
        return [("GPU", f"none that torch {report.versions['torch']} can use · {auto}")]
    lines = []
    for gpu in report.gpus:
        why = f" ({gpu.reason})" if gpu.reason else ""
        lines.append(
            f"{gpu.name} · {gpu.memory_bytes / 2**30:.0f} GiB · {gpu.capability} · kernels: {gpu.kernels}{why}"
        )
    return [("GPU", lines[0]), *(("", line) for line in lines[1:]), ("", auto)]


def _kernels_lines(report: Report) -> list[tuple[str, str]]:
    kernels = report.kernels
    why = " (forced)" if kernels.forced else f" ({kernels.reason})" if kernels.reason else ""
    lines = [
        ("kernels", f"{kernels.in_use}{why} for bfloat16 on the CPU · --dtype auto there: {report.dtype}"),
        ("", ", ".join(f"{name}: {state}" for name, state in kernels.state.items())),
    ]
    for index, found in enumerate(report.invariance):
        verdict = "holds"
        if not found.holds:
            verdict = f"{'not promised' if found.is_sound else 'DOES NOT HOLD'} {', '.join(found.differing)}"
        near = "" if found.torch_difference is None else f" · {found.torch_difference:.2g} nats from torch at most"
        lines.append(("invariance" if index == 0 else "", f"{found.kernels} {found.dtype}: {verdict}{near}"))
    return lines


def _speed_lines(report: Report) -> list[tuple[str, str]]:
    speed = report.speed
    ours = "" if speed.kernels_flops is None else f" · kernels {speed.kernels_flops / 1e12:.2f}"
    return [
        ("memory read", f"{speed.read_bytes_per_s / 1e9:.0f} GB/s"),
        ("bf16 product", f"torch {speed.torch_flops / 1e12:.2f}{ours} TFLOP/s"),
    ]


def _models_text(models: dict[str, str | None]) -> str:
    from batchinfer.models.source import ALIASES

    return ", ".join(
        f"{alias}: {'found' if folder else f'not installed ({ALIASES[alias].install})'}"
        for alias, folder in models.items()
    )
