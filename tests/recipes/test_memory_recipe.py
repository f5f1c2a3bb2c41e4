"""The memory recipe at tiny scale."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def recipe(bench_recipe: Callable[[str], ModuleType]) -> ModuleType:
    return bench_recipe("memory")


def test_growth_is_of_the_most_rows_beside_the_fewest(recipe: ModuleType) -> None:
    runs = {200: recipe.Measured(105, 2.0, []), 10: recipe.Measured(100, 1.0, [])}
    assert recipe.growth(runs) == pytest.approx(0.05)


@pytest.mark.slow
def test_two_runs_are_measured_and_written(
    recipe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "jobs.md"
    document.write_text("# Jobs\n")
    recipe.main(["--rows", "20,60", "--window", "16", "--write", str(document)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["rows"]) == {"20", "60"}
    assert all(of["peak_bytes"] > 50 * 2**20 for of in result["rows"].values())
    text = document.read_text()
    assert "| 60 | " in text
    assert "](jobs/memory.svg)" in text
    assert (tmp_path / "jobs" / "memory.svg").read_text().startswith("<?xml")
