"""A job over a stream of Hugging Face: no number of rows, no second reading; it goes on all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModelSource

from batchinfer.job import run_job
from batchinfer.settings import job_settings
from batchinfer.summary import JobSummary

datasets = pytest.importorskip("datasets")


def run(spec: str, output: Path, on_row: Callable[[int], None] = lambda row: None, **flags: Any) -> JobSummary:
    given = {"prompts": spec, "model": "m", "output": str(output), "window": 3, "flush_rows": 1, **flags}
    return run_job(
        job_settings(given, {}, None),
        engine_factory=lambda model, config: FakeEngine(model, config, on_row),  # type: ignore[arg-type]
        resolve=lambda name: FakeModelSource(),  # type: ignore[arg-type, return-value]
    )


@pytest.fixture
def spec(tmp_path: Path) -> str:
    """Eleven rows in two files."""
    (tmp_path / "data").mkdir()
    table = pa.table(
        {
            "prompt": [None if i == 4 else f"prompt {i}" for i in range(11)],
            "wide": pa.array([bytes([i]) * 100 for i in range(11)]),
        }
    )
    pq.write_table(table.slice(0, 7), tmp_path / "data" / "train-0.parquet")
    pq.write_table(table.slice(7), tmp_path / "data" / "train-1.parquet")
    return f"hf-stream:{tmp_path / 'data'}@train"


@pytest.mark.parametrize("n", [1, 2])
def test_all_rows_and_columns_come_out(spec: str, tmp_path: Path, n: int) -> None:
    summary = run(spec, tmp_path / "out.parquet", n=n)
    assert (summary.num_rows, summary.num_rows_ok) == (11, 10)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    first = [row for row in rows if row["sample_index"] == 0]
    assert [row["wide"] for row in first] == [bytes([i]) * 100 for i in range(11)]
    assert [row["output"] for row in first] == [None if i == 4 else f"prompt {i}" for i in range(11)]
    assert len(rows) == 10 * n + 1


@pytest.mark.parametrize("name", ["out.parquet", "out"])
def test_a_stopped_job_goes_on(spec: str, tmp_path: Path, name: str) -> None:
    ran: list[int] = []

    def stop(row: int) -> None:
        ran.append(row)
        if row == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(spec, tmp_path / name, stop)
    done = set(ran) - {7}
    again: list[int] = []
    run(spec, tmp_path / name, again.append)
    assert done.isdisjoint(again)
    assert sorted(done | set(again)) == list(range(11))
    whole = run(spec, tmp_path / f"whole-{name}")
    assert whole.num_rows == 11
    assert pq.read_table(tmp_path / name) == pq.read_table(tmp_path / f"whole-{name}")


def test_limit(spec: str, tmp_path: Path) -> None:
    assert run(spec, tmp_path / "out.parquet", limit=5).num_rows == 5
