"""`batchinfer status`: what it prints of jobs in each state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModelSource
from typer.testing import CliRunner, Result

from batchinfer.cli.main import app


def call(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output of a job that was broken off at row 3 of 10."""
    pq.write_table(pa.table({"prompt": [None, *(f"row {i}" for i in range(9))]}), tmp_path / "p.parquet")

    def on_row(row: int) -> None:
        if row == 5:
            raise RuntimeError("device lost")

    monkeypatch.setattr("batchinfer.job._load_engine", lambda model, config: FakeEngine(model, config, on_row))
    monkeypatch.setattr("batchinfer.models.source.resolve_model", FakeModelSource)
    output = tmp_path / "out"
    result = call("run", tmp_path / "p.parquet", "--model", "m", "--output", output, "--window", 4, "--seed", 8)
    assert result.exit_code == 1
    return output


def test_text_and_json_of_a_stopped_job(stopped: Path) -> None:
    result = call("status", stopped)
    assert result.exit_code == 0, result.stderr
    assert "state          stopped: the command that began it continues it" in result.stdout
    assert "rows           6 of 10 (60.0 %) · truncated: 0 · failed: 1 (prompt_null: 1)" in result.stdout
    assert "windows        1 of 3 written, of 4 rows each · window 1: 2 rows journaled" in result.stdout
    assert "identity       params.seed: 8" in result.stdout

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    value = json.loads(call("status", stopped, "--json").stdout, parse_constant=refuse)
    assert (value["state"], value["process"], value["num_rows_done"]) == ("stopped", None, 6)
    assert value["failed_by_code"] == {"prompt_null": 1}
    assert [window["is_written"] for window in value["windows"]] == [True, False]


def test_it_changes_nothing(stopped: Path) -> None:
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    call("status", stopped)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["none", "none.parquet", "p.parquet"])
def test_no_job_is_wrong_usage(stopped: Path, name: str) -> None:
    result = call("status", stopped.parent / name)
    assert result.exit_code == 2
    assert f"{stopped.parent / name}: there is no job with this output" in result.stderr
