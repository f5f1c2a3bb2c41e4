"""The kill sweep with a tiny model and few kills."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def recipe(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo_root / "recipes"))
    return importlib.import_module("kill_sweep")


@pytest.mark.slow
def test_killed_runs_of_a_real_model_are_continued_and_equal(
    recipe: ModuleType, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--moments", "3", "--model", str(tiny_model), "--rows", "24", "--window", "7", "--seed", "2"]
    code = recipe.main([*arguments, "--max-tokens", "40", "--", "--device", "cpu", "--threads", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, report["problems"]) == (0, [])
    assert report["num_kills"] >= 3
    assert report["oldest_lost_s"] <= report["flush_seconds"]


def test_what_a_kill_lost_is_what_neither_parts_nor_journals_hold(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("0 0 100.0\nstep 0.25\n0 1 101.0\n1 0 101.5\nstep 0.5\n")
    monkeypatch.setattr(recipe, "kept_completions", lambda output: {(0, 0)})
    assert recipe.lost_work(tmp_path / "out", log, 103.0) == (2, 1.5)
    monkeypatch.setattr(recipe, "kept_completions", lambda output: {(0, 0), (0, 1), (1, 0)})
    assert recipe.lost_work(tmp_path / "out", log, 103.0) == (0, 0.0)
    assert recipe.lost_work(tmp_path / "out", tmp_path / "none", 103.0) == (0, 0.0)
