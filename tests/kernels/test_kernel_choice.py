"""Which kernels a model runs on, and what is said when there are none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import INSTRUCTION_SETS, SMALL_SPEC

from batchinfer.errors import InputError
from batchinfer.kernels.cpu import build, library
from batchinfer.kernels.cpu.choice import TORCH, KernelChoice, choose_kernels

CPU = torch.device("cpu")
BF16 = torch.bfloat16
needs_kernels = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ kernels were built")


@pytest.fixture(autouse=True)
def forget_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(library.FORCE_VARIABLE, raising=False)
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries are looked for: empty."""
    monkeypatch.setattr(library, "library_path", lambda name: tmp_path / f"libbatchinfer_{name}.so")
    return tmp_path


def copy_library(instruction_set: str, folder: Path) -> Path:
    source = Path(build.__file__).parent / f"libbatchinfer_{instruction_set}.so"
    return Path(shutil.copy(source, folder))


@needs_kernels
def test_the_best_that_is_built_is_used() -> None:
    assert choose_kernels(SMALL_SPEC, BF16, CPU) == KernelChoice(INSTRUCTION_SETS[0])


@needs_kernels
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_forced_instruction_set_is_used(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.FORCE_VARIABLE, instruction_set)
    assert choose_kernels(SMALL_SPEC, BF16, CPU) == KernelChoice(instruction_set)


def test_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.FORCE_VARIABLE, "none")
    assert choose_kernels(SMALL_SPEC, BF16, CPU) == KernelChoice(TORCH, "BATCHINFER_CPU_KERNELS=none")


@pytest.mark.parametrize(
    ("spec", "dtype", "device", "reason"),
    [
        (SMALL_SPEC, torch.float32, CPU, "the dtype is torch.float32"),
        (SMALL_SPEC, BF16, torch.device("meta"), "the device is meta"),
        (replace(SMALL_SPEC, hidden_size=40), BF16, CPU, "hidden_size 40 is no multiple of 16"),
        (replace(SMALL_SPEC, head_dim=272), BF16, CPU, "head_dim 272 is above 256"),
    ],
)
def test_what_kernels_cannot_do_runs_on_torch_without_noise(
    spec: object, dtype: torch.dtype, device: torch.device, reason: str, folder: Path
) -> None:
    """Whether they are built or not: nobody is told of kernels that would not have run."""
    chosen = choose_kernels(spec, dtype, device)  # type: ignore[arg-type]
    assert chosen.name == TORCH
    assert reason in str(chosen.reason)
    assert not chosen.is_missing


def test_nothing_built(folder: Path) -> None:
    chosen = choose_kernels(SMALL_SPEC, BF16, CPU)
    assert chosen.name == TORCH
    assert chosen.is_missing
    for name in library.supported_instruction_sets():
        assert f"the {name} kernels are not built" in str(chosen.reason)


@needs_kernels
def test_a_lesser_version_is_used_where_the_best_is_missing(folder: Path) -> None:
    copy_library(INSTRUCTION_SETS[-1], folder)
    chosen = choose_kernels(SMALL_SPEC, BF16, CPU)
    assert chosen.name == INSTRUCTION_SETS[-1]
    assert not chosen.is_missing
    assert (chosen.reason is None) == (len(library.supported_instruction_sets()) == 1)


def test_a_broken_library_is_not_used(folder: Path) -> None:
    (folder / "libbatchinfer_portable.so").write_bytes(b"not a library")
    chosen = choose_kernels(SMALL_SPEC, BF16, CPU)
    assert chosen.is_missing
    assert "the portable kernels do not load" in str(chosen.reason)


@needs_kernels
def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its structs may lie otherwise: it would read and write anywhere."""
    monkeypatch.setattr(library, "sources_digest", lambda: "0123456789abcdef")
    chosen = choose_kernels(SMALL_SPEC, BF16, CPU)
    assert chosen.name == TORCH
    assert "built from other sources, build them again" in str(chosen.reason)


def test_digest_follows_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(build.SOURCE.parent, tmp_path / "src")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "src" / "kernels.cpp")
    seen = {build.sources_digest()}
    for path in sorted((tmp_path / "src").iterdir()):
        path.write_text(path.read_text() + "\n")
        seen.add(build.sources_digest())
    assert len(seen) == 1 + len(list((tmp_path / "src").iterdir()))


def test_a_wrong_name_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.FORCE_VARIABLE, "avx1024")
    with pytest.raises(InputError, match=r"must be one of avx512_bf16, avx2, portable, none; got 'avx1024'"):
        choose_kernels(SMALL_SPEC, BF16, CPU)


def test_a_forced_version_that_cannot_run_is_the_users_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.FORCE_VARIABLE, "portable")
    with pytest.raises(InputError, match="BATCHINFER_CPU_KERNELS=portable: the portable kernels are not built"):
        choose_kernels(SMALL_SPEC, BF16, CPU)
    monkeypatch.setenv(library.FORCE_VARIABLE, "avx2")
    monkeypatch.setattr(library, "supported_instruction_sets", lambda: ["portable"])
    with pytest.raises(InputError, match="BATCHINFER_CPU_KERNELS=avx2: this processor cannot run it"):
        choose_kernels(SMALL_SPEC, BF16, CPU)


def test_no_compiler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(build.CHOOSE_VARIABLE, raising=False)
    monkeypatch.setenv("CXX", "/nonexistent")
    (line,) = build.build(tmp_path)
    assert "no C++ compiler" in line
    assert not list(tmp_path.iterdir())


def test_a_failing_compiler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.CHOOSE_VARIABLE, "portable")
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'error: out of order' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build.build(tmp_path / "out") == ["portable: error: out of order"]
    assert not list((tmp_path / "out").iterdir())
