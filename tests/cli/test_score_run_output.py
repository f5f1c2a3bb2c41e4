"""`batchinfer score` on what a run wrote: the same prompts' ids, the sampled ids, and the run's own logprobs back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from batchinfer.cli.main import app

MakeModel = Callable[..., Path]
CHAT = [{"role": "user", "content": "say something"}]


@pytest.fixture(scope="module")
def model(tiny_llama: MakeModel) -> Path:
    return tiny_llama()


def command(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words), "--device", "cpu", "--threads", "1"])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def run(model: Path, folder: Path, columns: dict[str, Any], *args: object) -> Path:
    pq.write_table(pa.table(columns), folder / "prompts.parquet")
    options = ("--max-tokens", 9, "--temperature", 0.7, "--logprobs", 0, *args)
    result = command("run", folder / "prompts.parquet", "--model", model, "--output", folder / "run.parquet", *options)
    assert result.exit_code == 0, result.stderr
    return folder / "run.parquet"


@pytest.mark.parametrize(
    ("columns", "args"),
    [
        ({"prompt": ["one prompt", "another", "one prompt"], "id": [1, 2, 3]}, ("--n", 2)),
        ({"messages": [CHAT, CHAT[:1] * 1], "id": ["a", "b"]}, ("--system", "Be brief.")),
        ({"q": [[0, 70, 71], [9]]}, ("--prompt-column", "q", "--output-prefix", "x_")),
        ({"prompt": ["stop early"]}, ("--stop", "\u00e9", "--seed", 3)),
    ],
)
def test_a_run_is_scored_as_it_was_sampled(
    columns: dict[str, Any], args: tuple[object, ...], model: Path, tmp_path: Path
) -> None:
    """At these tokens the model's own log-probabilities are what the run stored: bitwise."""
    output = run(model, tmp_path, columns, *args)
    result = command("score", output, "--model", model, "--output", tmp_path / "s.parquet", "--token-logprobs")
    assert result.exit_code == 0, result.stderr
    prefix = "x_" if "x_" in args else ""
    rows = rows_of(tmp_path / "s.parquet")
    assert len(rows) == len(columns[next(iter(columns))]) * (2 if "--n" in args else 1)
    for row in rows:
        assert row["score_error"] is None
        assert row["score_scored_token_ids"] == row[prefix + "output_token_ids"]
        assert row["score_token_logprobs"] == row[prefix + "logprobs"]
    metadata = pq.read_schema(tmp_path / "s.parquet").metadata
    assert json.loads(metadata[b"batchinfer"])["params"]["temperature"]["value"] == 0.7, "the run's own is kept"
    assert json.loads(metadata[b"batchinfer.score.score_"])["policy"]["bos"] == "as in the run"


def test_rows_without_output_are_rows_without_scores(model: Path, tmp_path: Path) -> None:
    output = run(model, tmp_path, {"prompt": ["fine", None, "x" * 300]})
    assert command("score", output, "--model", model, "--output", tmp_path / "s.parquet").exit_code == 0
    codes = [row["score_error"] and row["score_error"]["code"] for row in rows_of(tmp_path / "s.parquet")]
    assert codes == [None, "no_output", "no_output"]


def test_scores_of_two_models_stand_side_by_side(model: Path, tiny_llama: MakeModel, tmp_path: Path) -> None:
    other = tiny_llama(config={"rope_theta": 500.0})
    output = run(model, tmp_path, {"prompt": ["one prompt", "another"]})
    before, both = tmp_path / "before.parquet", tmp_path / "both.parquet"
    assert command("score", output, "--model", model, "--output", before, "--output-prefix", "b_").exit_code == 0
    assert command("score", before, "--model", other, "--output", both, "--output-prefix", "a_").exit_code == 0
    for row in rows_of(both):
        assert row["a_nll"] != row["b_nll"]
        assert row["a_num_scored_tokens"] == row["b_num_scored_tokens"] == row["num_output_tokens"]
    assert {b"batchinfer.score.a_", b"batchinfer.score.b_"} <= set(pq.read_schema(both).metadata)
    clash = command("score", before, "--model", other, "--output", tmp_path / "c.parquet", "--output-prefix", "b_")
    assert clash.exit_code == 2
    assert "--output-prefix" in clash.stderr


def test_another_tokenizer_is_a_warning_and_its_rows_are_errors_where_it_matters(
    model: Path, tiny_llama: MakeModel, tmp_path: Path
) -> None:
    output = run(model, tmp_path, {"messages": [CHAT, CHAT]})
    longer = tiny_llama()
    config = json.loads((longer / "tokenizer_config.json").read_text())
    config["chat_template"] = "!" + config["chat_template"]
    (longer / "tokenizer_config.json").write_text(json.dumps(config))
    result = command("score", output, "--model", longer, "--output", tmp_path / "s.parquet", "--json", "--quiet")
    assert result.exit_code == 1, result.stderr
    summary = json.loads(result.stdout)
    assert "another tokenizer or chat template" in summary["warnings"][0]
    assert summary["failed_by_code"] == {"prompt_differs": 2}
    message = rows_of(tmp_path / "s.parquet")[0]["score_error"]["message"]
    assert "tokens and has" in message

    mapped = tiny_llama(chat=True)  # as many tokens, other texts
    tokenizer = json.loads((mapped / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["!"], vocab["~"] = vocab["~"], vocab["!"]
    for low, high in zip("abcdefghijklm", "nopqrstuvwxyz", strict=True):
        vocab[low], vocab[high] = vocab[high], vocab[low]
    (mapped / "tokenizer.json").write_text(json.dumps(tokenizer))
    texts = run(model, tmp_path, {"prompt": ["one", "two", "three", "four"]}, "--overwrite", "--max-tokens", 40)
    command("score", texts, "--model", mapped, "--output", tmp_path / "m.parquet")
    messages = [row["score_error"] and row["score_error"]["message"] for row in rows_of(tmp_path / "m.parquet")]
    assert any(message and "another text" in message for message in messages)


def test_a_run_without_its_metadata_or_prompts_is_refused(model: Path, tmp_path: Path) -> None:
    output = run(model, tmp_path, {"prompt": ["one prompt"]})
    table = pq.read_table(output)
    pq.write_table(table.replace_schema_metadata(None), tmp_path / "bare.parquet")
    result = command("score", tmp_path / "bare.parquet", "--model", model, "--output", tmp_path / "s.parquet")
    assert (result.exit_code, "no metadata" in result.stderr) == (2, True)
    pq.write_table(table.drop_columns(["prompt"]), tmp_path / "cut.parquet")
    result = command("score", tmp_path / "cut.parquet", "--model", model, "--output", tmp_path / "s.parquet")
    assert (result.exit_code, "'prompt', which is not there" in result.stderr) == (2, True)
    options = ("--text-column", "output", "--output-prefix", "t_")
    result = command("score", output, "--model", model, "--output", tmp_path / "s.parquet", *options)
    assert result.exit_code == 0, "a column that is named counts before what the run stored"
    assert "t_nll" in rows_of(tmp_path / "s.parquet")[0]
