"""Which chip's configurations a device gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from batchinfer.kernels.triton import launch
from batchinfer.kernels.triton.launch import CHIPS, cdiv, chip_of, is_interpreted, next_power_of_2, options


def pretend(monkeypatch: pytest.MonkeyPatch, hip: str | None = None, **properties: object) -> None:
    """A GPU with these properties."""
    launch._gpu.cache_clear()
    monkeypatch.setattr(torch.version, "hip", hip)
    found = SimpleNamespace(name="Some GPU", **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)


@pytest.fixture(autouse=True)
def forget_the_gpu() -> object:
    yield
    launch._gpu.cache_clear()


@pytest.mark.parametrize(
    ("major", "minor", "name"),
    [(8, 0, "sm_80"), (8, 6, "sm_80"), (8, 9, "sm_80"), (9, 0, "sm_90"), (10, 0, "sm_90"), (12, 0, "sm_80")],
)
def test_configurations_by_capability(monkeypatch: pytest.MonkeyPatch, major: int, minor: int, name: str) -> None:
    pretend(monkeypatch, major=major, minor=minor)
    assert chip_of(torch.device("cuda", 0)) is CHIPS[name]


def test_an_amd_chip_is_known_by_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, hip="6.4", gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    assert chip_of(torch.device("cuda", 0)) is CHIPS["gfx942"]


def test_chips_without_configurations_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, major=7, minor=5)
    with pytest.raises(ValueError, match="Some GPU: sm_75 is older than sm_80"):
        chip_of(torch.device("cuda", 0))
    pretend(monkeypatch, hip="6.4", gcnArchName="gfx90a:xnack-", major=9, minor=0)
    with pytest.raises(ValueError, match="no configurations for gfx90a"):
        chip_of(torch.device("cuda", 0))


def test_a_cpu_is_for_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_interpreted():
        assert chip_of(torch.device("cpu")) is CHIPS["sm_80"]
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    with pytest.raises(ValueError, match="not on cpu"):
        chip_of(torch.device("cpu"))


def test_every_launch_says_how_sums_are_contracted() -> None:
    """Triton's releases differ in what they do by default."""
    for chip in CHIPS.values():
        chosen = options(chip, 4, 2)
        assert chosen["enable_fp_fusion"] is False
        assert ("matrix_instr_nonkdim" in chosen) == (chip.backend == "hip")


def test_sizes() -> None:
    assert [cdiv(value, 4) for value in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(value) for value in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
