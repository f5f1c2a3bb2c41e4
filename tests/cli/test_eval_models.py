"""`batchinfer eval` of two tiny models: their runs are kept, and used again only while they fit."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from batchinfer.cli.main import app
from batchinfer.eval_job import EvalSettings, run_eval
from batchinfer.evals import EvalOptions
from batchinfer.progress import Snapshot
from batchinfer.settings import job_settings

QUICK = ("--metrics", "accuracy,diversity,length,win_rate")


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama()


@pytest.fixture(scope="module")
def other_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("other") / "llama"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    changed = {name: t + 0.2 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.parquet"
    write_prompts(path, 40)
    return path


def write_prompts(path: Path, num_rows: int, first: str = "Name a colour") -> None:
    columns = {
        "id": list(range(num_rows)),
        "prompt": [f"{first} {i}:" for i in range(num_rows)],
        "reference": ["red"] * num_rows,
        "family": [("warm", "cold")[i % 2] for i in range(num_rows)],
    }
    pq.write_table(pa.table(columns), path)


def evaluate(prompts: Path, before: object, after: object, folder: Path, *args: object) -> Result:
    words = [
        "eval", prompts, "--before", before, "--after", after, "--output", folder,
        "--max-tokens", 6, "--device", "cpu", "--threads", 1, *args,
    ]  # fmt: skip
    return CliRunner().invoke(app, list(map(str, words)))


def runs(folder: Path) -> dict[str, int]:
    """Role and identity -> when it was written."""
    return {path.stem: path.stat().st_mtime_ns for path in (folder / "runs").iterdir()}


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def test_two_models_are_run_and_compared(prompts: Path, model: Path, other_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    result = evaluate(prompts, model, other_model, folder, *QUICK, "--slice-by", "family")
    assert result.exit_code == 0, result.stderr
    found = report(folder)
    assert found["pairing"]["num_pairs"] == 40
    assert found["pairing"]["paired_by"] == "column 'id'"
    assert (found["before"]["model"], found["after"]["model"]) == (str(model), str(other_model))
    assert found["before"]["digests"]["model"] != found["after"]["digests"]["model"]
    assert found["warnings"] == []
    assert {one["value"] for one in found["slices"]} == {"warm", "cold"}
    rows = pq.read_table(folder / "rows.parquet")
    assert rows.column("before_text").to_pylist() != rows.column("after_text").to_pylist()
    assert {name.split("-")[0] for name in runs(folder)} == {"before", "after"}
    stored = pq.read_table(next((folder / "runs").glob("before-*")))
    assert stored.num_rows == 40
    assert "logprobs" in stored.column_names


def test_runs_are_used_again_until_something_changes(
    prompts: Path, model: Path, other_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "report"
    assert evaluate(prompts, model, other_model, folder, *QUICK).exit_code == 0
    first = runs(folder)
    again = evaluate(prompts, model, other_model, folder, *QUICK)
    assert again.exit_code == 0, again.stderr
    assert runs(folder) == first
    assert "using" in again.stderr

    longer = evaluate(prompts, model, other_model, folder, *QUICK, "--max-tokens", 7)
    assert longer.exit_code == 0, longer.stderr
    after_longer = runs(folder)
    assert {name: after_longer[name] for name in first} == first  # kept
    assert len(after_longer) == 4

    write_prompts(prompts, 40, first="Name a shape")  # the same file name, other rows
    changed = evaluate(prompts, model, other_model, folder, *QUICK)
    assert changed.exit_code == 0, changed.stderr
    assert all(runs(folder)[name] > written for name, written in first.items())
    texts = pq.read_table(next(p for p in (folder / "runs").iterdir() if p.stem in first)).column("prompt").to_pylist()
    assert texts[0] == "Name a shape 0:"


def test_new_weights_under_the_same_path_are_noticed(
    prompts: Path, model: Path, other_model: Path, tmp_path: Path
) -> None:
    folder, trained = tmp_path / "report", tmp_path / "trained"
    shutil.copytree(other_model, trained)
    assert evaluate(prompts, model, trained, folder, *QUICK).exit_code == 0
    first = runs(folder)
    shutil.copy(model / "model.safetensors", trained / "model.safetensors")
    assert evaluate(prompts, model, trained, folder, *QUICK).exit_code == 0
    assert set(runs(folder)) - set(first)
    assert "same_model" in [notice["code"] for notice in report(folder)["warnings"]]


def test_a_damaged_run_is_made_anew(prompts: Path, model: Path, other_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    assert evaluate(prompts, model, other_model, folder, *QUICK).exit_code == 0
    path = next((folder / "runs").glob("after-*"))
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2]):
        path.write_bytes(content)
        result = evaluate(prompts, model, other_model, folder, *QUICK)
        assert result.exit_code == 0, result.stderr
        assert pq.read_table(path).num_rows == 40


@pytest.mark.parametrize("more", [(), ("--temperature", 1, "--n", 2)])
def test_a_model_against_itself_in_other_batches_changes_nothing(
    prompts: Path, model: Path, tmp_path: Path, more: tuple
) -> None:
    """The same seed, another order and size of batches: bitwise the same outputs, no metric flagged."""
    for number, batches in enumerate([(256, 2048), (1, 16), (7, 64)]):
        folder = tmp_path / str(number)
        args = ("--max-num-seqs", batches[0], "--max-batch-tokens", batches[1], *more)
        result = evaluate(prompts, model, model, folder, *QUICK, *args, "--policy", ("prefix", "fcfs")[number % 2])
        assert result.exit_code == 0, result.stderr
    runs_ = [next((tmp_path / str(number) / "runs").glob("before-*")) for number in range(3)]
    for number in (1, 2):
        result = CliRunner().invoke(app, ["eval", str(runs_[0]), str(runs_[number]), *QUICK, "--json", "--quiet"])
        found = json.loads(result.stdout)
        assert {metric["verdict"] for metric in found["metrics"]} <= {"no change", "not tested"}
        assert all(metric["wins"] == metric["losses"] == 0 for metric in found["metrics"])


def test_the_noise_floor_is_a_run_of_its_own(prompts: Path, model: Path, other_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    result = evaluate(prompts, model, other_model, folder, *QUICK, "--noise-floor", "--temperature", 1)
    assert result.exit_code == 0, result.stderr
    assert {name.split("-")[0] for name in runs(folder)} == {"before", "after", "noise"}
    floors = {metric["spec"]["name"]: metric["noise_floor"] for metric in report(folder)["metrics"]}
    assert floors["output_tokens"] is not None
    noise, before = (pq.read_table(next((folder / "runs").glob(f"{role}-*"))) for role in ("noise", "before"))
    assert noise.column("output").to_pylist() != before.column("output").to_pylist()  # sampled with another seed
    greedy = evaluate(prompts, model, other_model, tmp_path / "greedy", *QUICK, "--noise-floor")
    assert greedy.exit_code == 0, greedy.stderr
    assert {m["noise_floor"]["size"] for m in report(tmp_path / "greedy")["metrics"] if m["noise_floor"]} <= {0.0, None}


class Recorder:
    """A progress reporter: counts of tokens that fall would show as negative rates."""

    def __init__(self) -> None:
        self.num_tokens: list[int] = []
        self.is_closed = False

    def stage(self, text: str) -> None:
        pass

    def update(self, snapshot: Snapshot) -> None:
        self.num_tokens.append(snapshot.num_output_tokens)

    def close(self) -> None:
        self.is_closed = True


def test_each_run_has_a_progress_of_its_own(prompts: Path, model: Path, tmp_path: Path) -> None:
    job = job_settings({"prompts": str(prompts), "model": str(model), "max_tokens": 4}, {}, None, needs_output=False)
    settings = EvalSettings(
        EvalOptions(), before=job, after=job, noise_floor=True, metrics=["length"], output=tmp_path / "report"
    )
    reporters: list[Recorder] = []

    def make() -> Recorder:
        reporters.append(Recorder())
        return reporters[-1]

    run_eval(settings, make)
    assert [bool(one.num_tokens) for one in reporters] == [True, True, True, False]  # three runs, one comparison
    assert all(one.num_tokens == sorted(one.num_tokens) for one in reporters)
    assert all(one.is_closed for one in reporters)


def test_chat_rows_and_samples(model: Path, other_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.parquet"
    chats = [[{"role": "user", "content": f"Say {i}"}] for i in range(8)]
    pq.write_table(pa.table({"messages": chats, "reference": [str(i) for i in range(8)]}), path)
    folder = tmp_path / "report"
    result = evaluate(path, model, other_model, folder, *QUICK, "--n", 3, "--temperature", 1, "--system", "Be brief")
    assert result.exit_code == 0, result.stderr
    found = report(folder)
    assert (found["pairing"]["num_pairs"], found["pairing"]["num_prompts"]) == (24, 8)
    assert found["pairing"]["paired_by"] == "prompt"
    assert {"pass@2", "pass@3", "maj@3", "self_bleu"} <= {metric["spec"]["name"] for metric in found["metrics"]}
    again = evaluate(path, model, other_model, folder, *QUICK, "--n", 3, "--temperature", 1, "--system", "Be brief")
    assert again.stderr.count("using") == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--reference-column", "nope"), "--reference-column nope: "),
        (("--slice-by", "family", "--slice-by", "nope"), "--slice-by nope: "),
        (("--gate", "accuracy>0"), "METRIC>=NUMBER"),
        (("--prompt-column", "nope"), "--prompt-column nope: there is no such column"),
        (("--max-tokens", "0"), "--max-tokens: max_tokens must be"),
        (("--system", "x"), "--system needs messages"),
    ],
)
def test_what_can_be_known_is_checked_before_anything_runs(
    prompts: Path, model: Path, tmp_path: Path, args: tuple, message: str
) -> None:
    folder = tmp_path / "report"
    result = evaluate(prompts, model, model, folder, *args)
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr
    assert not list(folder.glob("runs/*"))


def test_an_evaluator_that_will_lack_its_column_is_refused_before_anything_runs(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "bare.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), path)
    result = evaluate(path, model, model, tmp_path / "report", "--metrics", "accuracy")
    assert result.exit_code == 2
    assert "--metrics accuracy: it needs right answers" in result.stderr
    assert not list((tmp_path / "report").glob("runs/*"))


def test_an_interrupted_evaluation_keeps_the_run_that_was_done(prompts: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    words = ["eval", prompts, "--before", model, "--after", model, "--output", folder, "--device", "cpu", *QUICK]
    words += ["--max-tokens", 40, "--ignore-eos", "--threads", 1, "--max-num-seqs", 2]
    command = [sys.executable, "-c", "from batchinfer.cli.main import app; app()", *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "after: running" in line:
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130
    runs = [
        path.name for path in (folder / "runs").iterdir() if not path.name.startswith(".")
    ]  # a run that goes on is hidden
    assert [name.split("-")[0] for name in runs] == ["before"]
    assert not (folder / "report.json").exists()


def test_an_unknown_model_is_refused_before_the_other_runs(prompts: Path, model: Path, tmp_path: Path) -> None:
    result = evaluate(prompts, model, tmp_path / "nowhere", tmp_path / "report")
    assert result.exit_code == 2
    assert "no such folder or file" in result.stderr
    assert not list((tmp_path / "report").glob("runs/*"))


def test_a_config_file_may_hold_the_runs_settings(prompts: Path, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "eval.toml"
    config.write_text("[sampling]\nmax_tokens = 3\n[engine]\nmax_num_seqs = 2\n", encoding="utf-8")
    folder = tmp_path / "report"
    words = ["eval", prompts, "--before", model, "--after", model, "--output", folder, "--config", config, *QUICK]
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, result.stderr
    assert report(folder)["before"]["params"]["max_tokens"] == {"value": 3, "origin": "config"}
    config.write_text("[model]\nname = 'x'\n", encoding="utf-8")
    refused = CliRunner().invoke(app, list(map(str, words)))
    assert refused.exit_code == 2
    assert "[model] name has no place in an evaluation" in refused.stderr


def test_a_run_in_which_no_row_succeeds_ends_the_evaluation(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "nulls.parquet"
    pq.write_table(pa.table({"id": [1, 2], "prompt": pa.nulls(2, pa.string())}), path)
    result = evaluate(path, model, model, tmp_path / "report", "--metrics", "length")
    assert result.exit_code == 1
    assert "no row succeeded" in result.stderr
