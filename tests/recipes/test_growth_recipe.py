"""The growth recipe at tiny scale, and its fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture
def recipe(bench_recipe: Callable[[str], ModuleType]) -> ModuleType:
    return bench_recipe("growth")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": [f"Say {number} in words" for number in range(8)]}), path)
    return path


def test_the_exponent_of_a_power_law(recipe: ModuleType) -> None:
    assert recipe.exponent({rows: 0.5 * rows for rows in (100, 200, 400)}) == pytest.approx(1.0)
    assert recipe.exponent({rows: 0.1 * rows**1.5 for rows in (100, 200, 400)}) == pytest.approx(1.5)


def test_points_are_interleaved_and_written(
    recipe: ModuleType,
    prompts: Path,
    tiny_model: Path,
    in_process: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = prompts.with_name("performance.md")
    document.write_text("# Performance\n")
    command = [str(prompts), "--model", str(tiny_model), "--max-tokens", "4", "--rows", "8,4", "--kv-rows", "6"]
    command += ["--kv-memory", "64KB,1MB", "--rounds", "2", "--option=--threads=1", "--write", str(document)]
    recipe.main(command)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    limits = [arguments[arguments.index("--limit") + 1] for arguments in in_process]
    assert limits == ["4", "8", "6", "6"] * 2
    assert [of["num_output_tokens"] for of in result["rows"].values()] == [16, 32]
    assert all(len(of["rounds_s"]) == 2 for of in (*result["rows"].values(), *result["kv_memory"].values()))
    assert result["kv_memory"]["64KB"]["kv_pool_bytes"] < result["kv_memory"]["1MB"]["kv_pool_bytes"] <= 1e6
    text = document.read_text()
    assert f"Time grows as rows to the power {result['exponent']:.2f}." in text
    assert "| 64KB |" in text
    assert "(performance/growth.svg)" in text
    assert "<svg" in (document.parent / "performance/growth.svg").read_text()
    assert json.loads((document.parent / "performance/growth.json").read_text()) == result


def test_too_few_rows_in_the_file(
    recipe: ModuleType, prompts: Path, tiny_model: Path, in_process: list[list[str]]
) -> None:
    command = [str(prompts), "--model", str(tiny_model), "--max-tokens", "2", "--rows", "9,10", "--kv-memory", "1MB"]
    with pytest.raises(SystemExit, match="8 rows could run, 9 were asked for"):
        recipe.main([*command, "--rounds", "1"])


@pytest.mark.parametrize("bad", [["--rows", "100"], ["--rows", "0,5"], ["--rounds", "0"], ["--rows", "many"]])
def test_bad_arguments_are_refused(
    recipe: ModuleType, prompts: Path, in_process: list[list[str]], bad: list[str]
) -> None:
    with pytest.raises(SystemExit):
        recipe.main([str(prompts), *bad])
    assert in_process == []
