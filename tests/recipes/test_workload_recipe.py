"""Prompts to measure with: real rows, and rows over one long shared text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

TEXTS = [f"Task {row}.\n\nQ: first\nA: one\n\nQ: number {row}?\nA:" for row in range(10)]


@pytest.fixture
def recipe(bench_recipe: Callable[[str], ModuleType]) -> ModuleType:
    return bench_recipe("workload")


def made(recipe: ModuleType, folder: Path, columns: dict[str, list], model: Path, *options: str) -> dict[str, list]:
    source, out = folder / "source.parquet", folder / "out.parquet"
    pq.write_table(pa.table(columns), source)
    recipe.main([str(source), str(out), "--model", str(model), *options])
    return pq.read_table(out).to_pydict()


def test_rows_at_even_distances(
    recipe: ModuleType, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"prompt": [*TEXTS, None], "id": [f"r{row}" for row in range(11)]}
    found = made(recipe, tmp_path, columns, tiny_model, "--rows", "4")
    assert found == {"id": ["r0", "r2", "r5", "r7"], "prompt": [TEXTS[row] for row in (0, 2, 5, 7)]}
    assert "4 prompts" in capsys.readouterr().out


def test_the_chat_template_is_applied(recipe: ModuleType, tmp_path: Path, tiny_model: Path) -> None:
    columns = {"messages": [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "hi"}]]}
    found = made(recipe, tmp_path, columns, tiny_model, "--rows", "2")
    assert found == {"id": ["0", "1"], "prompt": ["<user>hello\n<a>", "<user>hi\n<a>"]}


def test_one_long_shared_text_and_different_questions(recipe: ModuleType, tmp_path: Path, tiny_model: Path) -> None:
    options = ("--rows", "5", "--shared-tokens", "120")
    prompts = made(recipe, tmp_path, {"prompt": TEXTS}, tiny_model, *options)["prompt"]
    assert len(set(prompts)) == 5
    # A byte a token, and one for the start of the text.
    (shared,) = {prompt[:119] for prompt in prompts}
    assert shared.startswith(TEXTS[0] + "\n\nTask 1.")
    assert [prompt[119:] for prompt in prompts] == [f"\n\nQ: number {row}?\nA:" for row in (0, 2, 4, 6, 8)]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"text": TEXTS}, ["--rows", "1"], "has neither a column prompt nor messages, but text"),
        ({"prompt": TEXTS}, ["--rows", "11"], "has 10 rows with a prompt, --rows asks for 11"),
        ({"prompt": TEXTS}, ["--rows", "1", "--shared-tokens", "9999"], "fewer than --shared-tokens 9999"),
        ({"prompt": ["x" * 300]}, ["--rows", "1"], "the longest prompt has 301 tokens"),
    ],
)
def test_what_cannot_be_made(
    recipe: ModuleType, tmp_path: Path, tiny_model: Path, columns: dict[str, list], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        made(recipe, tmp_path, columns, tiny_model, *options)
    assert not (tmp_path / "out.parquet").exists()


def test_bad_arguments_are_refused(recipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        recipe.main([str(tmp_path / "none.parquet"), str(tmp_path / "out.parquet"), "--rows", "1"])


@pytest.mark.slow
def test_runs_as_a_process(repo_root: Path, tmp_path: Path, tiny_model: Path) -> None:
    source, out = tmp_path / "source.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"prompt": TEXTS}), source)
    command = [sys.executable, str(repo_root / "recipes/bench/workload.py"), str(source), str(out), "--rows", "3"]
    subprocess.run([*command, "--model", str(tiny_model)], capture_output=True, check=True)
    assert pq.read_metadata(out).num_rows == 3
