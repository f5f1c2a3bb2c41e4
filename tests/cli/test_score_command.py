"""`batchinfer score` with a tiny random Llama: every kind of input, its columns, its figures, its refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from batchinfer.cli.main import app
from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.scoring.output import DEFINITIONS, KIND
from batchinfer.scoring.settings import SCORE_SETTINGS

MakeModel = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_llama: MakeModel) -> Path:
    return tiny_llama()


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def score(texts: object, model: object, output: object, *args: object) -> Result:
    words = ["score", texts, "--model", model, "--output", output, "--device", "cpu", "--threads", 1, *args]
    return CliRunner().invoke(app, list(map(str, words)))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def metadata_of(path: Path, key: bytes = b"batchinfer.score") -> dict[str, Any]:
    return json.loads(pq.read_schema(path).metadata[key])


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.stderr
    message = result.stderr.rsplit("error: ", 1)[1]
    for word in words:
        assert word in message, message
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


TEXTS = ["some text to score", "some text of another kind", "", None, "x", "é🙂 汉字 " * 10]


def test_texts_get_scores_and_keep_their_columns(model: Path, tmp_path: Path) -> None:
    texts = write(tmp_path / "t.parquet", id=pa.array(range(6), pa.uint8()), text=pa.array(TEXTS, pa.large_string()))
    output = tmp_path / "out.parquet"
    result = score(texts, model, output, "--json", "--token-logprobs", "--entropies")
    assert result.exit_code == 0, result.stderr
    rows = rows_of(output)
    assert [row["id"] for row in rows] == list(range(6))
    assert [row["text"] for row in rows] == TEXTS
    schema = pq.read_schema(output)
    assert (schema.field("id").type, schema.field("text").type) == (pa.uint8(), pa.large_string())
    codes = [row["error"]["code"] if row["error"] else None for row in rows]
    assert codes == [None, None, "nothing_to_score", "prompt_null", None, None]
    for row in rows:
        if row["error"]:
            assert (row["num_scored_tokens"], row["nll"], row["perplexity"], row["is_greedy"]) == (0, None, None, None)
            assert row["token_logprobs"] is None
            continue
        num = len(row["text"].encode())  # one token per byte, and BOS before it
        assert (row["num_scored_tokens"], row["num_scored_bytes"]) == (num, num)
        assert len(row["token_logprobs"]) == len(row["token_entropies"]) == len(row["scored_token_ids"]) == num
        assert row["nll"] == pytest.approx(-math.fsum(row["token_logprobs"]))
        assert row["perplexity"] == pytest.approx(math.exp(row["nll"] / num))
        assert row["bits_per_byte"] == pytest.approx(row["nll"] / math.log(2) / num)
        assert row["sees_all"] is True
    summary = strict_json(result.stdout)
    good = [row for row in rows if not row["error"]]
    nll, num_tokens = (math.fsum(row[name] for row in good) for name in ("nll", "num_scored_tokens"))
    assert summary["perplexity"] == pytest.approx(math.exp(nll / num_tokens))
    assert summary["bits_per_byte"] == pytest.approx(nll / math.log(2) / num_tokens)
    words = sum(len(row["text"].split()) for row in good)
    assert summary["word_perplexity"] == pytest.approx(math.exp(nll / words))
    assert summary["mean_of_row_perplexities"] == pytest.approx(sum(row["perplexity"] for row in good) / len(good))
    assert (summary["num_rows"], summary["num_rows_ok"]) == (6, 4)
    assert (summary["num_rows_nothing_to_score"], summary["failed_by_code"]) == (1, {"prompt_null": 1})


def test_scores_are_those_of_the_engine(model: Path, tmp_path: Path) -> None:
    texts = [text for text in TEXTS if text]
    path = write(tmp_path / "t.parquet", text=texts)
    assert score(path, model, tmp_path / "out.parquet").exit_code == 0
    expected = Engine(str(model), EngineConfig(device="cpu", threads=1)).score(texts)
    assert [row["nll"] for row in rows_of(tmp_path / "out.parquet")] == [row.nll for row in expected]


def test_the_metadata_says_what_was_scored_and_how(model: Path, tmp_path: Path) -> None:
    texts = write(tmp_path / "t.parquet", text=["some text"])
    assert score(texts, model, tmp_path / "out.parquet", "--window", 9, "--stride", 4).exit_code == 0
    metadata = metadata_of(tmp_path / "out.parquet")
    policy = metadata["policy"]
    assert (policy["window"], policy["stride"], policy["min_context"]) == (9, 4, 6)
    assert "context, never scored" in policy["bos"]
    assert metadata["head_dtype"] == "float32"
    assert set(metadata["digests"]) == {"model", "tokenizer", "chat_template"}
    assert metadata["corpus"]["num_scored_tokens"] == 9
    for name, definition in metadata["columns"].items():
        assert definition == DEFINITIONS[name]
    fields = [field for field in pq.read_schema(tmp_path / "out.parquet") if field.metadata]
    assert [field.metadata[b"batchinfer"].decode() for field in fields] == [KIND + name for name in metadata["columns"]]
    assert score(texts, model, tmp_path / "2.parquet", "--bos", "never").exit_code == 0
    assert metadata_of(tmp_path / "2.parquet")["policy"]["bos"] == "none"
    assert metadata_of(tmp_path / "2.parquet")["corpus"]["num_scored_tokens"] == 8


def test_continuations_share_their_context(model: Path, tmp_path: Path) -> None:
    context, answers = "a question of some length? " * 6, [" yes", " no", " perhaps", " yes"]
    pairs = write(tmp_path / "p.parquet", context=[context] * 4, continuation=answers)
    result = score(pairs, model, tmp_path / "out.parquet", "--json")
    assert result.exit_code == 0, result.stderr
    rows = rows_of(tmp_path / "out.parquet")
    assert [row["num_scored_tokens"] for row in rows] == [len(answer) for answer in answers]
    assert rows[0]["nll"] == rows[3]["nll"]
    summary = json.loads(result.stdout)
    # BOS and context once; of the answers, " " once, and the last token of each never
    assert summary["num_prompt_tokens_computed"] == 1 + len(context) + 1 + len("ye") + len("n") + len("perhap")
    named = write(tmp_path / "n.parquet", q=[context] * 4, a=answers, text=["other"] * 4)
    options = ("--context-column", "q", "--continuation-column", "a")
    assert score(named, model, tmp_path / "out2.parquet", *options).exit_code == 0
    assert [row["nll"] for row in rows_of(tmp_path / "out2.parquet")] == [row["nll"] for row in rows]


@pytest.mark.parametrize(("turns", "num_scored"), [("assistant", [5, 0]), ("all", [18, 5])])
def test_messages(turns: str, num_scored: list[int], model: Path, tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": "hi"}, {"role": "a", "content": "x"}, {"role": "assistant", "content": "abcd"}],
        [{"role": "user", "content": "hi"}],
    ]
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
    template = (
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    config = json.loads((model / "tokenizer_config.json").read_text())
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    result = score(path, folder, tmp_path / "out.parquet", "--score", turns)
    assert result.exit_code == 0, result.stderr
    assert [row["num_scored_tokens"] for row in rows_of(tmp_path / "out.parquet")] == num_scored
    assert metadata_of(tmp_path / "out.parquet")["policy"]["turns"] == turns


def test_token_ids_are_scored_as_they_are(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", text=[[0, 50, 60, 70], [50], [50, 999]])
    result = score(path, model, tmp_path / "out.parquet", "--strict")
    assert result.exit_code == 3
    rows = rows_of(tmp_path / "out.parquet")
    assert [row["num_scored_tokens"] for row in rows] == [3, 0, 0]
    assert rows[2]["error"]["code"] == "invalid_prompt"


def test_long_rows_go_in_windows_and_the_summary_says_so(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", text=["abc " * 200, "short"])
    result = score(path, model, tmp_path / "out.parquet", "--stride", 100)
    assert result.exit_code == 0, result.stderr
    assert "1 rows are longer than the window of 256 tokens; every scored token saw at least 157" in result.stdout
    rows = rows_of(tmp_path / "out.parquet")
    assert [row["sees_all"] for row in rows] == [False, True]
    assert rows[0]["num_scored_tokens"] == 800


def test_options_from_a_file(model: Path, tmp_path: Path) -> None:
    texts = write(tmp_path / "t.parquet", body=["some text"])
    config = tmp_path / "job.toml"
    config.write_text(
        f'[input]\nprompts = "{texts}"\ntext_column = "body"\n[model]\nname = "{model}"\n'
        '[score]\nbos = "never"\nwindow = 5\nstride = 2\ntoken_logprobs = true\n'
        f'[output]\npath = "{tmp_path / "out.parquet"}"\n'
    )
    result = CliRunner().invoke(app, ["score", "--config", str(config), "--stride", "3"])
    assert result.exit_code == 0, result.stderr
    policy = metadata_of(tmp_path / "out.parquet")["policy"]
    assert (policy["window"], policy["stride"], policy["bos_option"]) == (5, 3, "never")
    assert "token_logprobs" in rows_of(tmp_path / "out.parquet")[0]


def test_several_windows_of_rows_are_one_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.parquet", text=[f"text number {i}" for i in range(23)])
    assert score(path, model, tmp_path / "1.parquet").exit_code == 0
    monkeypatch.setattr("batchinfer.dataset.source.WINDOW_ROWS", 5)
    result = score(path, model, tmp_path / "2.parquet", "--json")
    assert rows_of(tmp_path / "1.parquet") == rows_of(tmp_path / "2.parquet")
    assert json.loads(result.stdout)["perplexity"] == metadata_of(tmp_path / "1.parquet")["corpus"]["perplexity"]


def test_no_row_with_a_score_is_exit_code_1(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", text=["", None])
    result = score(path, model, tmp_path / "out.parquet", "--json")
    assert result.exit_code == 1
    assert strict_json(result.stdout)["perplexity"] is None


@pytest.mark.parametrize(
    ("columns", "args", "words"),
    [
        ({"x": ["a"]}, (), ("nothing to score was found", "--text-column", "x (string)")),
        ({"text": [1]}, (), ("--text-column text", "int64")),
        ({"text": ["a"], "messages": [[{"role": "user", "content": "x"}]]}, (), ("--text-column text or --messages",)),
        ({"text": ["a"]}, ("--text-column", "b"), ("--text-column b", "no such column")),
        ({"text": ["a"]}, ("--text-column", "text", "--messages-column", "m"), ("do not go together",)),
        ({"text": ["a"]}, ("--context-column", "text"), ("--continuation-column continuation", "no such column")),
        ({"context": ["a"], "continuation": [[1]]}, (), ("must both hold text",)),
        ({"text": ["a"], "nll": [1]}, (), ("'nll'", "--output-prefix")),
        ({"text": ["a"]}, ("--window", 0), ("--window must be at least 1",)),
        ({"text": ["a"]}, ("--window", 257), ("--window must be between 1 and the 256 tokens",)),
        ({"text": ["a"]}, ("--window", 8, "--stride", 9), ("--stride must be between 1 and the window of 8",)),
        ({"text": ["a"]}, ("--bos", "maybe"), ("--bos must be one of auto, always, never",)),
        ({"text": ["a"]}, ("--score", "user"), ("--score must be one of assistant, all",)),
        ({"text": ["a"]}, ("--system", "x"), ("--system needs messages",)),
        ({"text": ["a"]}, ("--score", "all"), ("--score all is about messages",)),
        ({"text": [[1, 2]]}, ("--bos", "always"), ("--bos always is about texts", "token ids")),
        ({"messages": [[{"role": "user", "content": "x"}]]}, ("--bos", "never"), ("--bos never is about texts",)),
        ({"text": []}, (), ("has no rows",)),
    ],
)
def test_what_cannot_work_is_refused(
    columns: dict[str, Any], args: tuple[object, ...], words: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    texts = write(tmp_path / "t.parquet", **columns)
    refused(score(texts, model, tmp_path / "out.parquet", *args), *words)
    assert not (tmp_path / "out.parquet").exists()


def test_places_that_cannot_work_are_refused(model: Path, tmp_path: Path) -> None:
    texts = write(tmp_path / "t.parquet", text=["a"])
    refused(score(texts, model, texts), "exists")
    refused(score(texts, model, texts, "--overwrite"), "is a file of the input")
    refused(score(tmp_path / "none.parquet", model, tmp_path / "o.parquet"), "does not exist")
    refused(score(texts, tmp_path / "no", tmp_path / "o.parquet"), "no such folder")
    result = CliRunner().invoke(app, ["score", str(texts), "--model", str(model)])
    refused(result, "--output is missing")
    assert "TEXTS is missing" in CliRunner().invoke(app, ["score"]).stderr


def test_figures_that_are_not_finite_are_null_in_json(model: Path, tmp_path: Path) -> None:
    """A model so sure of something else that the perplexity of a wrong token is beyond a float."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).symlink_to(file)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] *= 3000
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = write(tmp_path / "t.parquet", text=["abc"])
    result = score(path, folder, tmp_path / "out.parquet", "--json")
    assert result.exit_code == 0, result.stderr
    summary = strict_json(result.stdout)
    assert summary["perplexity"] is None
    assert "perplexity" in summary["not_finite"]
    assert rows_of(tmp_path / "out.parquet")[0]["perplexity"] == math.inf
    assert metadata_of(tmp_path / "out.parquet")["corpus"]["perplexity"] is None


def test_every_option_is_in_the_documentation_and_in_the_help(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = (repo_root / "docs" / "score.md").read_text(encoding="utf-8")
    shown = CliRunner().invoke(app, ["score", "--help"]).output
    for name, setting in SCORE_SETTINGS.items():
        for flag in ("TEXTS",) if name == "prompts" else setting.flag.split("/"):
            assert f"`{flag}" in text, flag
            assert flag in shown, flag
        if setting.section in ("input", "score"):
            assert f"| `{setting.config_name}` |" in text, setting.config_name
    for name in DEFINITIONS:
        assert f"| `{name}` |" in text, name
