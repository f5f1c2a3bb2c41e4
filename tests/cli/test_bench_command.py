"""`batchinfer bench` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from batchinfer import machine_speed
from batchinfer.cli.main import app


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["same beginning a", "same beginning b", "c"]}), path)
    return path


@pytest.fixture(autouse=True)
def quick_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "TIME_S", 0.001)
    monkeypatch.setattr(machine_speed, "BYTES_READ", 1 << 20)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, args)])


def test_a_table_and_json_last(prompts: Path, tiny_llama: Callable[..., Path]) -> None:
    result = run(prompts, "--model", tiny_llama(), "--max-tokens", 4, "--limit", 2, "--threads", 1)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert " % of the optimum: matmul " in lines[0]
    value = json.loads(lines[-1])
    assert (value["num_rows_ok"], value["num_output_tokens"]) == (2, 8)
    assert value["params"]["ignore_eos"] is True
    assert value["engine"]["threads"] == 1
    assert "running" in result.stderr
    assert list(prompts.parent.iterdir()) == [prompts]  # nothing is written


def test_json_alone(prompts: Path, tiny_llama: Callable[..., Path]) -> None:
    result = run(prompts, "--model", tiny_llama(), "--max-tokens", 4, "--honour-eos", "--json", "--quiet")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert len(result.stdout.splitlines()) == 1
    assert json.loads(result.stdout)["params"]["ignore_eos"] is False


def test_the_config_of_a_run_serves(prompts: Path, tiny_llama: Callable[..., Path]) -> None:
    config = prompts.parent / "run.toml"
    config.write_text(
        f"[input]\nprompts = '{prompts}'\n[model]\nname = '{tiny_llama()}'\n"
        "[sampling]\nmax_tokens = 3\nignore_eos = false\n[output]\npath = 'o.parquet'\n"
    )
    result = run("--config", config, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["params"]["ignore_eos"] is False


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "m", "--max-tokens", "0"], "error: --max-tokens: max_tokens must be"),
        ([], "error: --model is missing"),
        (["--model", "m", "--prompt-column", "nope"], "error: --prompt-column nope: there is no such column"),
        (["--model", "m", "--kv-memory", "much"], "error: --kv-memory: not a size: 'much'"),
        (["--model", "m", "--limit", "0"], "error: --limit must be at least 1"),
        (["--model", "m"], "error: model 'm': no such folder or file"),
    ],
)
def test_bad_input_is_a_clean_message(prompts: Path, args: list[str], message: str) -> None:
    result = run(prompts, *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(message), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_missing_prompts(tmp_path: Path) -> None:
    result = run(tmp_path / "none.parquet", "--model", "m")
    assert result.exit_code == 2
    assert "none.parquet" in result.stderr
