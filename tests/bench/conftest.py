"""The machine is measured in a moment: how well is of no matter here."""

from __future__ import annotations

import pytest

from batchinfer import machine_speed


@pytest.fixture(autouse=True)
def quick_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "TIME_S", 0.001)
    monkeypatch.setattr(machine_speed, "BYTES_READ", 1 << 20)
    monkeypatch.setattr(machine_speed, "SHAPES", ((16, 32, 64),))
