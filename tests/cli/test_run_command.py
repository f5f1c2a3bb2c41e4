"""`batchinfer run`: bad input, streams and exit codes, with an engine that echoes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModelSource
from typer.testing import CliRunner, Result

from batchinfer.cli.main import app
from batchinfer.config import EngineConfig
from batchinfer.settings import SETTINGS, job_settings, load_config
from batchinfer.types import DEFAULT_MAX_TOKENS

ALL_OPTIONS = """
    --prompt-column text --id-column key --priority-column urgency --policy priority --limit 1
    --max-tokens 9 --min-tokens 1 --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --n 2
    --repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --include-stop --ignore-eos
    --stop END --stop STOP --stop-token-id 7 --stop-token-id 8 --logprobs 2 --logprobs-mode processed
    --prompt-logprobs --dtype float32 --device cpu --threads 1 --max-batch-tokens 64 --max-num-seqs 4
    --kv-memory 1MiB --block-size 16 --no-prefix-sharing --max-model-len 100 --deterministic --output-prefix bi_
    --overwrite --strict --json --quiet
"""


class Command:
    """Runs the command in a folder with p.parquet; `loads` counts what was done with the weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prompts = folder / "p.parquet"
        self.output = folder / "out.parquet"
        self.loads: list[str] = []
        self.write(prompt=["one", "two"])

    def write(self, **columns: Any) -> None:
        pq.write_table(pa.table(columns), self.prompts)

    def __call__(self, *args: str) -> Result:
        return CliRunner().invoke(app, ["run", *args])

    def run(self, *args: str) -> Result:
        return self(str(self.prompts), "--model", "m", "--output", str(self.output), *args)

    def refused(self, result: Result, *words: str) -> None:
        """A clean refusal, before the weights were touched."""
        assert result.exit_code == 2, result.stderr
        assert result.stderr.startswith("error: ")
        for word in words:
            assert word in result.stderr
        assert "Traceback" not in result.stderr
        assert result.stdout == ""
        assert self.loads == []


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    command = Command(tmp_path)

    def load(model: Any, config: EngineConfig) -> FakeEngine:
        command.loads.append(model.name)
        return FakeEngine(model, config)

    monkeypatch.setattr("batchinfer.job._load_engine", load)
    monkeypatch.setattr("batchinfer.models.source.resolve_model", lambda name: FakeModelSource(name))
    return command


def plain(text: str) -> str:
    """Help without borders, colours and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", "", text).split())


def test_a_run_prints_its_summary_and_writes_the_file(command: Command) -> None:
    result = command.run("--max-tokens", "2")
    assert result.exit_code == 0, result.stderr
    assert "rows           ok: 2 · truncated: 2 · failed: 0" in result.stdout
    assert str(command.output) in result.stdout
    assert [row["output"] for row in pq.read_table(command.output).to_pylist()] == ["on", "tw"]
    assert "batchinfer: loading m\n" in result.stderr


def test_json_is_one_object_and_nothing_else_on_stdout(command: Command) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    result = command.run("--json", "--temperature", "0.5")
    value = json.loads(result.stdout, parse_constant=refuse)
    assert value["num_rows_ok"] == 2
    assert value["output"] == str(command.output)
    assert value["params"]["temperature"] == {"value": 0.5, "origin": "flag"}
    assert value["sharing_achieved_of_possible"] is None
    assert set(value["seconds"]) == {"load", "read", "plan", "run", "journal", "write"}
    assert "ok: 2" in result.stderr


def test_off_a_terminal_there_is_no_carriage_return_and_few_lines(command: Command) -> None:
    command.write(prompt=[f"row {i}" for i in range(2000)])
    result = command.run()
    assert "\r" not in result.stderr + result.stdout
    assert len(result.stderr.splitlines()) <= 4


def test_quiet_says_nothing_on_stderr(command: Command) -> None:
    assert command.run("--quiet").stderr == ""
    assert command.run("--quiet", "--json", "--overwrite").stderr == ""


def test_options_come_from_the_config_file_and_flags_win(command: Command) -> None:
    config = command.folder / "run.toml"
    config.write_text(
        f"""
        [input]
        prompts = "{command.prompts}"
        limit = 1
        [model]
        name = "from-file"
        [sampling]
        max_tokens = 1
        seed = 4
        [output]
        path = "{command.output}"
        """
    )
    result = command("--config", str(config), "--max-tokens", "2", "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    assert command.loads == ["from-file"]
    assert value["num_rows"] == 1
    assert value["params"]["max_tokens"] == {"value": 2, "origin": "flag"}
    assert value["params"]["seed"] == {"value": 4, "origin": "config"}


def test_every_option_reaches_its_setting(command: Command) -> None:
    """All at once, each with a value that is not its default."""
    command.write(text=["one", "two"], key=["a", "b"], urgency=[1, 2])
    result = command.run(*ALL_OPTIONS.split())
    assert result.exit_code == 0, result.stderr
    params = json.loads(result.stdout)["params"]
    assert {name for name, said in params.items() if said["origin"] == "flag"} == set(params)
    assert params["stop"]["value"] == ["END", "STOP"]
    assert params["stop_token_ids"]["value"] == [7, 8]
    metadata = json.loads(pq.read_metadata(command.output).metadata[b"batchinfer"])
    engine = metadata["engine"]
    assert engine["kv_memory_bytes"] == 1 << 20
    assert (engine["policy"], engine["prefix_sharing"], engine["max_model_len"]) == ("priority", False, 100)
    assert metadata["input"]["columns"] == {"prompt": "text", "id": "key", "priority": "urgency"}
    assert "bi_output" in pq.read_schema(command.output).names


# What can be known before the model loads.


def test_missing_file(command: Command) -> None:
    missing = command.folder / "none.parquet"
    command.refused(command(str(missing), "--model", "m", "--output", str(command.output)), str(missing))


def test_not_parquet(command: Command) -> None:
    command.prompts.write_text("hello")
    command.refused(command.run(), str(command.prompts), "not a Parquet file")


def test_empty_dataset(command: Command) -> None:
    command.write(prompt=pa.array([], pa.string()))
    command.refused(command.run(), "no rows")


def test_missing_column(command: Command) -> None:
    command.write(question=["one"])
    command.refused(command.run(), "--prompt-column", "question")
    command.refused(
        command.run("--prompt-column", "promt"), "--prompt-column promt: there is no such column", "question"
    )


def test_wrong_typed_column(command: Command) -> None:
    command.write(prompt=[1.5, 2.5])
    command.refused(command.run(), "'prompt'", "double")


def test_output_column_that_is_taken(command: Command) -> None:
    command.write(prompt=["one"], output=["mine"])
    command.refused(command.run(), "'output'", "--output-prefix")


def test_existing_output(command: Command) -> None:
    command.output.write_text("mine")
    command.refused(command.run(), str(command.output), "--overwrite")
    assert command.output.read_text() == "mine"


def test_missing_output_folder(command: Command) -> None:
    path = command.folder / "no" / "such" / "out.parquet"
    command.refused(command(str(command.prompts), "--model", "m", "--output", str(path)), str(path.parent))


def test_output_path_that_is_a_folder(command: Command) -> None:
    command.refused(command(str(command.prompts), "--model", "m", "--output", str(command.folder)), str(command.folder))


def test_unwritable_folder(command: Command) -> None:
    """/proc refuses files even to root, whom a read-only folder would not stop."""
    command.refused(command(str(command.prompts), "--model", "m", "--output", "/proc/out.parquet"), "/proc")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--top-p", "1.5"], "--top-p: top_p must be between 0.0 and 1.0, got 1.5"),
        (["--temperature", "-1"], "--temperature: temperature must be between"),
        (["--temperature", "nan"], "--temperature: temperature must be between"),
        (["--max-tokens", "0"], "--max-tokens: max_tokens must be between 1"),
        (["--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["--stop", ""], "--stop: stop must be non-empty strings"),
        (["--kv-memory", "lots"], "--kv-memory: not a size: 'lots'"),
        (["--block-size", "7"], "--block-size: block_size must be one of 16"),
        (["--policy", "best"], "--policy: policy must be one of prefix"),
        (["--min-tokens", "5", "--max-tokens", "4"], "min_tokens (5) is above max_tokens (4)"),
        (["--temprature", "1"], "--temprature"),
        (["--max-model-len", "100000"], "--max-model-len 100000 is above the 512 tokens"),
    ],
)
def test_impossible_values(command: Command, args: list[str], message: str) -> None:
    command.refused(command.run(*args), message)


def test_unknown_config_key(command: Command) -> None:
    config = command.folder / "run.toml"
    config.write_text("[sampling]\ntemprature = 1\n")
    command.refused(command.run("--config", str(config)), str(config), "'temprature'", "did you mean 'temperature'?")


@pytest.mark.parametrize("args", [[], ["p.parquet"], ["p.parquet", "--model", "m"]])
def test_missing_arguments(command: Command, args: list[str]) -> None:
    command.refused(command(*args), "is missing; give it, or [")


def test_values_are_looked_at_before_files(command: Command) -> None:
    command.refused(command("none.parquet", "--model", "m", "--output", "o.parquet", "--n", "0"), "--n: n must be")


# What happens to the run itself.


def test_row_errors_are_exit_code_0_or_3_under_strict(command: Command) -> None:
    command.write(prompt=["one", None])
    result = command.run()
    assert result.exit_code == 0
    assert "failed: 1 (prompt_null: 1)" in result.stdout
    assert command.run("--overwrite", "--strict").exit_code == 3


def test_too_many_row_errors_are_exit_code_6_and_can_be_continued(command: Command) -> None:
    command.write(prompt=["one", None, None, "two"])
    result = command.run("--max-row-errors", "1")
    assert result.exit_code == 6
    assert "error: 2 rows failed (prompt_null: 2), --max-row-errors allows 1; " in result.stderr
    assert "rows are kept in" in result.stderr
    assert command.run("--max-row-errors", "2").exit_code == 0
    assert [row["output"] for row in pq.read_table(command.output).to_pylist()] == ["one", None, None, "two"]


def test_nothing_succeeded_is_exit_code_1(command: Command) -> None:
    command.write(prompt=["", None])
    result = command.run("--strict")
    assert result.exit_code == 1
    assert command.output.exists()


def test_an_unexpected_error_is_one_line_and_exit_code_1(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: Any, config: EngineConfig) -> FakeEngine:
        def on_row(row: int) -> None:
            raise RuntimeError("device lost")

        return FakeEngine(model, config, on_row)

    monkeypatch.setattr("batchinfer.job._load_engine", load)
    result = command.run()
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if not line.startswith("batchinfer: ")]
    assert errors == [
        f"error: RuntimeError: device lost; nothing was written to {command.output}",
        "Run again with --debug to see the traceback",
    ]
    debugged = command.run("--debug")
    assert debugged.exit_code == 1
    assert "Traceback" in debugged.stderr
    assert not command.output.exists()


def test_the_default_length_is_documented_and_not_tiny(command: Command) -> None:
    assert DEFAULT_MAX_TOKENS > 16
    text = plain(command("--help").output)
    assert f"Default: the model's, else {DEFAULT_MAX_TOKENS}." in text
    assert json.loads(command.run("--json").stdout)["params"]["max_tokens"] == {
        "value": DEFAULT_MAX_TOKENS,
        "origin": "default",
    }


def test_the_help_groups_all_options_and_has_an_example(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = command("--help")
    assert result.exit_code == 0
    for panel in ("Input", "Model", "Sampling", "Engine", "Output"):
        assert f"─ {panel} ─" in result.output
    text = plain(result.output)
    for setting in SETTINGS.values():
        for flag in setting.flag.split("/"):
            assert flag in text
    assert "batchinfer run prompts.parquet --model smollm2-135m --max-tokens 64 --output completions.parquet" in text


def test_the_help_cuts_no_name_on_80_columns(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = command("--help").output
    assert "…" not in text
    for setting in SETTINGS.values():
        assert f" {setting.flag.split('/')[0]} " in text
    assert command("--no-prefix-sharing", "--help").output == text, "switches work as before"


def test_every_option_is_in_the_documentation(repo_root: Path) -> None:
    text = (repo_root / "docs" / "run.md").read_text(encoding="utf-8")
    for setting in SETTINGS.values():
        for flag in setting.flag.split("/"):
            assert f"`{flag}" in text, flag
        assert f"| `{setting.key}` |" in text, setting.config_name


def test_the_documented_config_file_is_valid_and_has_every_key(repo_root: Path, tmp_path: Path) -> None:
    text = (repo_root / "docs" / "run.md").read_text(encoding="utf-8")
    example = text.split("```toml\n")[1].split("```")[0]
    (tmp_path / "run.toml").write_text(re.sub(r"(?m)^# (?=\w+ = )", "", example))
    assert set(load_config(tmp_path / "run.toml")) == set(SETTINGS)
    (tmp_path / "run.toml").write_text(example)
    job_settings({}, load_config(tmp_path / "run.toml"), tmp_path / "run.toml")
