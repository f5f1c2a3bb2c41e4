"""The benchmark script runs, and a small copy of its promise holds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "recipes" / "bench" / "planner.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planner_bench_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_small_run_prints_its_figures_as_json_last(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--rows", "2000", "--length", "1000"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["num_rows"], result["num_tokens"], result["token_bytes"]) == (2000, 2_000_000, 8_000_000)
    # 20 s and 1 GB are promised for 50 times as many rows; the tests' machine may be busy.
    assert result["plan_s"] < 5
    assert result["peak_traced_bytes"] < 100_000_000


def test_prompts_share_as_described(bench: ModuleType) -> None:
    rows = bench.few_shot_prompts(400, 100, 1)
    assert {len(row) for row in rows} == {100}
    assert len({row[:60].tobytes() for row in rows}) <= 50
    assert len({row.tobytes() for row in rows}) <= 360
    assert all(row.dtype == np.int32 for row in rows)


def test_prompts_of_a_file(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"text": ["One two three", "One two four", None, "One two three"]}), path)
    bench.main(["--prompts", str(path), "--column", "text"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["num_rows"] == 3
    assert result["num_unique_tokens"] == 4


def test_bad_arguments_are_refused(bench: ModuleType) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--rows", "0"])
