"""What `batchinfer doctor` finds: on this machine, on made-up ones, and when kernels are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import INSTRUCTION_SETS
from torch import Tensor
from typer.testing import CliRunner

from batchinfer import doctor, machine_speed, self_test
from batchinfer.cli.main import app
from batchinfer.kernels.cpu import library
from batchinfer.kernels.triton import launch
from batchinfer.models import source
from batchinfer.models.decoder import Decoder


@pytest.fixture(scope="module")
def report() -> doctor.Report:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(library.FORCE_VARIABLE, raising=False)
        patch.setattr(machine_speed, "TIME_S", 0.01)
        patch.setattr(machine_speed, "BYTES_READ", 1 << 24)
        found = doctor.examine()
    torch.set_num_threads(threads)
    return found


def test_this_machine_is_sound(report: doctor.Report) -> None:
    assert report.is_sound
    tested = [(found.kernels, found.dtype) for found in report.invariance]
    assert tested == [
        ("torch", "float32"),
        ("torch", "bfloat16"),
        *((name, "bfloat16") for name in INSTRUCTION_SETS),
    ]
    assert all(found.torch_difference < 0.1 for found in report.invariance[2:])  # type: ignore[operator]
    assert not [line for line in report.advice if "relied" in line]


LOADS_EVERY_LIBRARY = """
import torch
from batchinfer import doctor
from batchinfer.kernels.cpu import library
for name in library.supported_instruction_sets():
    if library.library_path(name).exists():
        library.load_library(name)
torch.ones(1 << 20).sum()
print(*doctor.openmp_runtimes(), sep="\\n")
"""


def test_one_openmp_runtime() -> None:
    """The kernels run on the one that torch brings: two would take the cores from each other.

    In a process of its own: other tests load libraries that bring another one.
    """
    found = subprocess.run([sys.executable, "-c", LOADS_EVERY_LIBRARY], capture_output=True, text=True, check=True)
    assert len(found.stdout.split("\n")) == 2, found.stdout  # one, and what is behind its line's end


def test_kernels_in_use_are_the_best_usable(report: doctor.Report) -> None:
    assert report.kernels.in_use == (INSTRUCTION_SETS or ["torch"])[0]
    assert [name for name, state in report.kernels.state.items() if state == "usable"] == INSTRUCTION_SETS
    assert report.speed.read_bytes_per_s > 1e8
    assert report.speed.torch_flops > 1e8
    assert (report.speed.kernels_flops is not None) == bool(INSTRUCTION_SETS)


def test_report_as_json_and_as_text(report: doctor.Report) -> None:
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["is_sound"] is True
    assert values["invariance"][0]["holds"] is True
    assert values["versions"]["torch"] == torch.__version__
    text = report.to_text()
    for label in ("processor", "cores", "threads", "memory", "kernels", "invariance", "bf16 product", "versions"):
        assert f"\n{label} " in f"\n{text}"
    assert "DOES NOT HOLD" not in text


# When it is not sound


class DependsOnCompany(Decoder):
    """Off by a thousandth for each row of the step."""

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        logits[:, ::2] += 1e-3 * len(hidden)
        return logits


class Wrong(Decoder):
    """The same wrong logits in any company; NaN where a prompt is scored."""

    def target_logprobs(self, hidden: Tensor, targets: Tensor) -> Any:
        return super().target_logprobs(hidden * float("nan"), targets)


def checked(kind: type[Decoder], monkeypatch: pytest.MonkeyPatch) -> self_test.Invariance:
    right = self_test._model

    def model(kernels: str, dtype: torch.dtype, device: torch.device) -> Any:
        found = right("torch", dtype, device)
        if kernels == "made up":
            found.__class__ = kind
        return found

    monkeypatch.setattr(self_test, "_model", model)
    return list(self_test.check_invariance(["made up"]))[-1]


def test_self_test_finds_dependence_on_company(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(DependsOnCompany, monkeypatch)
    assert not found.holds
    assert "in company" in found.differing
    assert self_test.FROM_TORCH not in found.differing


def test_self_test_finds_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(Wrong, monkeypatch)
    assert self_test.FROM_TORCH in found.differing


def test_what_is_not_promised_is_no_fault(report: doctor.Report) -> None:
    """Without --deterministic a GPU's products may depend on the number of rows."""
    loose = self_test.Invariance("triton", "bfloat16", ("in company",), 0.01, is_promised=False)
    assert not loose.holds
    assert loose.is_sound
    assert "not promised in company" in replace(report, invariance=(loose,)).to_text()
    assert not replace(loose, is_promised=True).is_sound
    assert not replace(loose, differing=(self_test.FROM_TORCH,)).is_sound, "wrong is wrong"


def test_unsound_machine_is_exit_code_1(report: doctor.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = self_test.Invariance("avx9", "bfloat16", ("in chunks",), float("inf"))
    unsound = replace(report, invariance=(bad,), advice=tuple(doctor._invariance_advice([bad])))
    monkeypatch.setattr("batchinfer.cli.doctor.examine", lambda: unsound)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "DOES NOT HOLD in chunks" in result.stdout
    assert "with avx9 in bfloat16 results cannot be relied on: rows differ in chunks" in result.stdout
    values = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert (values["is_sound"], values["invariance"][0]["torch_difference"]) == (False, None)


# Made-up machines


def test_openmp_runtimes_by_their_files(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    files = [
        "/lib/libgomp.so.1.0.0",
        "/opt/my env/lib/libiomp5.so",
        "/lib/libomp.so.5",
        "/x/torch.libs/libgomp-a34b3233.so.1",
        "/lib/libcomp.so",
        "/lib/libgompress.so",
        "/lib/libc.so.6",
    ]
    rows = [f"7f00-7f01 r-xp 00000000 fe:00 123   {path}" for path in files for _ in range(3)]
    maps.write_text("\n".join(["7f00-7f01 rw-p 00000000 00:00 0", *rows]))
    assert set(doctor.openmp_runtimes(maps)) == set(files[:4])
    assert doctor.openmp_runtimes(tmp_path / "none") == ()


def test_advice() -> None:
    assert doctor.machine_advice(("a",), (), has_gpu_device=False) == []
    (line,) = doctor.machine_advice(("/a/libgomp.so", "/b/libiomp5.so"), (), has_gpu_device=False)
    assert "2 OpenMP runtimes are loaded (/a/libgomp.so, /b/libiomp5.so)" in line
    (line,) = doctor.machine_advice(("a",), (), has_gpu_device=True)
    assert "GPU that this build of torch cannot use" in line
    gpu = doctor.Gpu("H100", 80 << 30, "9.0", "triton", None)
    assert doctor.machine_advice(("a",), (gpu,), has_gpu_device=True) == []
    old = replace(gpu, name="T4", kernels="torch", reason="sm_75 is older than sm_80")
    (line,) = doctor.machine_advice(("a",), (gpu, old), has_gpu_device=True)
    assert line == "T4 runs plain torch, which is slower: sm_75 is older than sm_80"


def test_no_gpu_is_told_with_what_auto_comes_to(report: doctor.Report) -> None:
    if report.gpus:
        pytest.skip("there is one")
    assert f"none that torch {torch.__version__} can use · --device auto: cpu" in report.to_text()


class H200:
    name, total_memory, major, minor = "NVIDIA H200", 141 << 30, 9, 0


def test_a_gpu_is_told_with_its_kernels(report: doctor.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: H200())
    monkeypatch.setattr(torch.version, "hip", None)
    for name in ("BATCHINFER_KERNELS", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    launch._gpu.cache_clear()
    try:
        gpus = doctor.examine_gpus()
    finally:
        launch._gpu.cache_clear()
    assert gpus == (doctor.Gpu("NVIDIA H200", 141 << 30, "9.0", "triton", None),) * 2
    text = replace(report, gpus=gpus, device="cuda").to_text()
    assert text.count("NVIDIA H200 · 141 GiB · 9.0 · kernels: triton") == 2
    assert "--device auto: cuda" in text


def test_models_that_are_not_installed_are_named_with_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = source._PackagedModel("no_such_package", "a.gguf", "pip install it")
    monkeypatch.setitem(source.ALIASES, "missing-1m", missing)
    models = doctor.find_models()
    assert models["missing-1m"] is None
    assert "missing-1m: not installed (pip install it)" in doctor._models_text(models)


def test_missing_kernels_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.FORCE_VARIABLE, raising=False)
    monkeypatch.setattr(library, "library_path", lambda name: tmp_path / name)
    library.load_library.cache_clear()
    try:
        kernels = doctor.examine_kernels()
    finally:
        library.load_library.cache_clear()
    assert kernels.in_use == "torch"
    assert "the portable kernels are not built" in str(kernels.reason)
    assert kernels.state["portable"] == "the portable kernels are not built"


def test_kernels_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.FORCE_VARIABLE, "none")
    kernels = doctor.examine_kernels()
    assert (kernels.in_use, kernels.reason, kernels.forced) == ("torch", None, "torch")


def test_wrong_name_in_the_environment_is_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.FORCE_VARIABLE, "mmx")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 2
    assert "BATCHINFER_CPU_KERNELS must be one of" in result.stderr
