"""The arithmetic of the throughput recipe, what it writes, and a run of it as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

LINE = {"load_s": 1.0, "gen_s": 2.0, "prompt_tokens": 3, "output_tokens": 8}


@pytest.fixture
def recipe(bench_recipe: Callable[[str], ModuleType]) -> ModuleType:
    return bench_recipe("throughput")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"id": ["a", "b", "c"], "prompt": ["One two", "One three", "One three"]}), path)
    return path


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    path = tmp_path / "peer.sh"
    path.write_text(f"#!/bin/sh\necho noise\necho '{json.dumps(LINE)}'\n")
    path.chmod(0o755)
    return path


def test_ratios_are_taken_within_rounds(recipe: ModuleType) -> None:
    """The second round ran on a machine half as fast: the ratio is that of the first."""
    runs = [
        [recipe.Run("batchinfer", 1.0, 10.0, 12.0, 50, 100), recipe.Run("peer", 5.0, 20.0, 30.0, 50, 100)],
        [recipe.Run("batchinfer", 2.0, 20.0, 24.0, 50, 100), recipe.Run("peer", 9.0, 40.0, 60.0, 50, 100)],
        [recipe.Run("batchinfer", 1.0, 10.0, 12.0, 50, 100), recipe.Run("peer", 5.0, 30.0, 30.0, 50, 100)],
    ]
    assert recipe.ratios(runs, "peer", "gen_s") == [2.0, 2.0, 3.0]
    engines = recipe.report(runs, floor_s=6.0)
    assert engines["peer"]["gen_ratio"] == 2.0
    assert engines["peer"]["wall_ratio"] == 2.5
    assert engines["batchinfer"]["output_tokens_per_s"] == 10.0
    assert (engines["batchinfer"]["share_of_optimum"], engines["peer"]["share_of_optimum"]) == (0.6, 0.2)
    table = recipe.table(engines)
    assert "| batchinfer | 1.0 | 10.0 | 12.0 | 10.0 | 60 % | 1 | 1 |" in table
    assert "| peer | 5.0 | 30.0 | 30.0 | 3.3 | 20 % | 2.00 (2.00, 2.00, 3.00) | 2.50 (2.50, 2.50, 2.50) |" in table


def test_engines_that_did_other_work_are_named(recipe: ModuleType) -> None:
    ours = recipe.Run("batchinfer", 1.0, 10.0, 12.0, 50, 100)
    assert recipe.differing_work([ours, recipe.Run("same", 1.0, 10.0, 12.0, 50, 100)]) == ""
    text = recipe.differing_work([ours, recipe.Run("short", 1.0, 10.0, 12.0, 50, 90)])
    assert text == "short had 50 prompt tokens and 90 output tokens, ours 50 and 100"


def run(recipe: ModuleType, capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    recipe.main([str(arg) for arg in args])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_workloads_are_written_to_the_document(
    recipe: ModuleType,
    prompts: Path,
    peer: Path,
    tiny_model: Path,
    in_process: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = prompts.with_name("performance.md")
    document.write_text("# Performance\n\n<!-- throughput:two:begin -->\n<!-- throughput:two:end -->\n\nEnd.\n")
    command = [f"one={prompts}:4", f"two={prompts}:5", "--model", tiny_model, "--rounds", 2, "--threads", 1]
    command += ["--peer", f"other={peer} {{prompts}} {{max_tokens}} {{out}}", "--option=--dtype=float32"]
    results = run(recipe, capsys, *command, "--write", document)
    ours, other = (results["one"]["engines"][name] for name in ("batchinfer", "other"))
    assert (results["one"]["num_rows"], results["one"]["max_tokens"], results["two"]["max_tokens"]) == (3, 4, 5)
    assert ours["output_tokens_per_s"] == pytest.approx(12 / ours["gen_s"], rel=0.1)  # seconds are rounded
    assert other["gen_s"] == 2.0
    assert other["share_of_optimum"] == pytest.approx(results["one"]["floor"]["seconds"] / 2.0, abs=1e-3)
    # 4 output tokens: the third row is the second's duplicate, so the head is due for 8.
    assert results["one"]["floor"]["parts"][2]["flops"] == 2 * 32 * 272 * 8
    assert "other had 3 prompt tokens" in results["one"]["differing_work"]
    engines = ["ours" if "run" in arguments else "peer" for arguments in in_process]
    assert engines == ["ours", "peer"] * 4  # in turn
    text = document.read_text()
    assert text.index("# Performance") < text.index("**two**") < text.index("End.") < text.index("**one**")
    assert "| other | 1.0 | 2.0 |" in text
    assert f"Commit {results['one']['commit']}." in text
    assert "![Generation time of one, two](performance/throughput.svg)" in text
    assert "<svg" in (document.parent / "performance/throughput.svg").read_text()

    run(recipe, capsys, f"three={prompts}:4", *command[2:], "--write", document)  # a later call adds to the plot
    assert "![Generation time of one, two, three]" in document.read_text()
    assert len(json.loads((document.parent / "performance/throughput.json").read_text())) == 3


@pytest.mark.parametrize(
    ("workload", "peer", "message"),
    [
        ("prompts.parquet:4", "p=x {prompts}", "write NAME=PROMPTS.parquet:MAX_TOKENS"),
        ("a={}", "p=x {prompts}", "write NAME=PROMPTS.parquet:MAX_TOKENS"),
        ("a={}:0", "p=x {prompts}", "write NAME=PROMPTS.parquet:MAX_TOKENS"),
        ("a=none.parquet:4", "p=x {prompts}", "there is no file none.parquet"),
        ("a={}:4", "x {prompts}", "--peer"),
        ("a={}:4", "batchinfer=x {prompts}", "--peer"),
    ],
)
def test_bad_arguments_are_refused_before_any_run(
    recipe: ModuleType, prompts: Path, in_process: list[list[str]], workload: str, peer: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        recipe.main([workload.format(prompts), "--peer", peer])
    assert in_process == []


@pytest.mark.slow
def test_runs_as_a_process(repo_root: Path, prompts: Path, peer: Path, tiny_model: Path) -> None:
    command = [sys.executable, str(repo_root / "recipes/bench/throughput.py"), f"w={prompts}:4", "--rounds", "1"]
    command += ["--peer", f"other={peer} {{prompts}} {{max_tokens}} {{out}}", "--threads", "1"]
    done = subprocess.run([*command, "--model", str(tiny_model)], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])["w"]
    ours, other = result["engines"]["batchinfer"], result["engines"]["other"]
    assert other["gen_ratio"] == pytest.approx(2.0 / ours["gen_s"], rel=0.05)
    assert result["floor"]["flops_per_s"] > 1e8
    assert "**w**: 3 prompts" in done.stdout
