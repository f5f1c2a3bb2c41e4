"""`batchinfer eval` on files of outputs: usage, streams, exit codes, files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from batchinfer.cli.main import app

NUM_ROWS = 40


def evaluate(*args: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, args)])


def write(path: Path, outputs: list[str | None], **columns: Any) -> Path:
    ids = {"id": list(range(len(outputs)))}
    pq.write_table(pa.table({**ids, **columns, "output": pa.array(outputs, pa.string())}), path)
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """30 of 40 right before, 20 after."""
    references = ["yes"] * NUM_ROWS
    before = write(tmp_path / "before.parquet", ["yes"] * 30 + ["no"] * 10, reference=references)
    after = write(tmp_path / "after.parquet", ["yes"] * 20 + ["no"] * 20, reference=references)
    return before, after


QUICK = ("--metrics", "accuracy,length")


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.stderr
    message = result.stderr.rsplit("error: ", 1)[1]
    for word in words:
        assert word in message
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_two_files_are_compared_and_written(files, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    result = evaluate(*files, *QUICK, "--output", folder)
    assert result.exit_code == 0, result.stderr
    assert "accuracy" in result.stdout
    assert "worse" in result.stdout
    assert f"written   {folder / 'report.json'}" in result.stdout
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    accuracy = next(metric for metric in report["metrics"] if metric["spec"]["name"] == "accuracy")
    assert accuracy["difference"]["mean"] == pytest.approx(-0.25)
    assert accuracy["verdict"] == "worse"
    assert pq.read_table(folder / "rows.parquet").num_rows == NUM_ROWS


def test_json_on_stdout_parses_whole(files) -> None:
    result = evaluate(*files, *QUICK, "--json")
    report = json.loads(result.stdout)
    assert report["pairing"]["num_pairs"] == NUM_ROWS
    assert "accuracy" in result.stderr


def test_quiet_says_nothing_on_stderr(files) -> None:
    result = evaluate(*files, *QUICK, "--quiet", "--json")
    assert result.stderr == ""


def test_a_gate_that_fails_has_its_own_exit_code(files) -> None:
    failed = evaluate(*files, *QUICK, "--gate", "accuracy>=-0.01", "--gate", "empty<=0.5")
    assert failed.exit_code == 5, failed.stderr
    assert "gate      accuracy>=-0.01: FAILED" in failed.stdout
    assert "gate      empty<=0.5: passed" in failed.stdout
    assert evaluate(*files, *QUICK, "--gate", "accuracy>=-0.6").exit_code == 0
    same = evaluate(files[0], files[0], *QUICK, "--gate", "accuracy>=-0.01")
    assert same.exit_code == 0


def test_no_pairs_has_its_own_exit_code_and_still_a_report(files, tmp_path: Path) -> None:
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"id": [100, 101], "output": ["a", "b"]}), other)
    result = evaluate(files[0], other, "--output", tmp_path / "report")
    assert result.exit_code == 4, result.stderr
    assert "no pairs" in result.stdout
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert report["pairing"]["num_pairs"] == 0
    assert report["metrics"] == []


def test_options_reach_the_evaluators(files, tmp_path: Path) -> None:
    result = evaluate(
        *files, "--metrics", "accuracy", "--match", "regex", "--pattern", "y(es)", "--slice-by", "output_kind"
    )
    refused(result, "--slice-by output_kind", "no such column")
    score = tmp_path / "score.py"
    score.write_text("def score(output, reference, row):\n    return len(output)\n", encoding="utf-8")
    result = evaluate(
        *files, "--metrics", "accuracy", "--score-function", f"{score}:score", "--json", "--cluster-column", "reference"
    )
    (metric,) = json.loads(result.stdout)["metrics"]
    assert metric["before"]["mean"] == pytest.approx((30 * 3 + 10 * 2) / 40)
    assert metric["num_clusters"] == 1
    assert metric["verdict"] == "not tested"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["BEFORE and AFTER, with or without", "one file of PROMPTS", "got 1 files"]),
        (["{after}", "{after}"], ["got 3 files"]),
        (["{after}", "--before", "m"], ["--before m and --after None"]),
        (["{after}", "--before", "m", "--after", "m", "--seed", "1"], ["--seed is about running models"]),
        (["{after}", "--before", "{missing}", "--after", "m"], ["missing.parquet"]),
        (["{after}", "--temperature", "0.5"], ["--temperature is about running models"]),
        (["{after}", "--gate", "accuracy>0"], ["--gate 'accuracy>0'", "METRIC>=NUMBER"]),
        (["{after}", "--gate", "acuracy>=0"], ["gives a metric 'acuracy'"]),
        (["{after}", "--metrics", "acuracy"], ["did you mean 'accuracy'"]),
        (["{after}", "--match", "fuzzy"], ["--match fuzzy"]),
        (["{after}", "--reference-column", "nope"], ["--reference-column nope", "Columns: id, reference"]),
        (["{after}", "--noise-floor"], ["--noise-run"]),
        (["{after}", "--noise-run", "nope.parquet"], ["nope.parquet"]),
        (["{missing}"], ["missing.parquet does not exist"]),
        (["--before", "m", "--after", "m"], ["--output FOLDER is missing"]),
        (["{after}", "--output", "{after}"], ["is a file: name a folder"]),
    ],
)
def test_wrong_usage_is_refused_with_what_to_do(files, tmp_path: Path, args: list[str], words: list[str]) -> None:
    names = {"after": files[1], "missing": tmp_path / "missing.parquet"}
    refused(evaluate(files[0], "--quiet", *(arg.format(**names) for arg in args)), *words)


def test_a_report_in_a_log_has_no_bars_and_bad_input_is_told_at_once(files, tmp_path: Path) -> None:
    def run(*args: object) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-c", "from batchinfer.cli.main import app; app()", "eval", *map(str, args)]
        return subprocess.run(command, capture_output=True, timeout=120)

    done = run(*files, *QUICK)
    assert done.returncode == 0, done.stderr
    assert b"\r" not in done.stderr + done.stdout
    assert b"\x1b" not in done.stderr + done.stdout
    assert len(done.stderr.splitlines()) < 10
    start_s = time.perf_counter()
    assert run(*files, "--gate", "nonsense").returncode == 2
    assert time.perf_counter() - start_s < 10  # well under 2 s on an idle machine


def test_bad_usage_loads_no_heavy_module() -> None:
    code = (
        "import sys\n"
        "from batchinfer.cli.main import app\n"
        "try:\n    app(['eval', 'a.parquet', 'b.parquet', '--gate', 'nonsense'])\n"
        "except SystemExit as error:\n    assert error.code == 2, error.code\n"
        "heavy = ('torch', 'transformers', 'scipy', 'matplotlib', 'sentence_transformers', 'sacrebleu', 'datasets')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
