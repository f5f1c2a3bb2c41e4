"""`batchinfer plan` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeModelSource
from typer.testing import CliRunner, Result

from batchinfer.cli.main import app


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("batchinfer.models.source.resolve_model", FakeModelSource)
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["same beginning a", "same beginning b", "same beginning b"]}), path)
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, args)])


def test_a_plan_is_printed_on_stdout(prompts: Path) -> None:
    result = run(prompts, "--model", "m", "--dtype", "float32", "--max-tokens", 4)
    assert result.exit_code == 0, result.stderr
    assert "rows           3 · duplicates: 1 · cannot run: 0" in result.stdout
    assert '"same beginning "' in result.stdout
    assert result.stderr == ""


def test_json_is_one_object(prompts: Path) -> None:
    result = run(prompts, "--model", "m", "--dtype", "bfloat16", "--json")
    value = json.loads(result.stdout)
    assert (value["num_rows"], value["num_duplicate_rows"], value["dtype"]) == (3, 1, "bfloat16")


def test_the_config_of_a_run_serves_a_plan(prompts: Path) -> None:
    config = prompts.parent / "run.toml"
    config.write_text(
        f"[input]\nprompts = '{prompts}'\n[model]\nname = 'm'\n[sampling]\nmax_tokens = 3\ntemperature = 0.5\n"
        "[engine]\ndtype = 'float32'\n[output]\npath = 'o.parquet'\n"
    )
    result = run("--config", config, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["max_output_tokens"] == 9


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "m", "--max-tokens", "0"], "error: --max-tokens: max_tokens must be"),
        ([], "error: --model is missing"),
        (["--model", "m", "--prompt-column", "nope"], "error: --prompt-column nope: there is no such column"),
    ],
)
def test_bad_input_is_a_clean_message(prompts: Path, args: list[str], message: str) -> None:
    result = run(prompts, *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert "Traceback" not in result.stderr
