"""The arithmetic of the throughput recipe, and one run of it with a peer that is a shell command."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture(scope="module")
def recipe(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("throughput_recipe", repo_root / "recipes/bench/throughput.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_ratios_are_taken_within_rounds(recipe: ModuleType) -> None:
    """The second round ran on a machine half as fast: the ratio is that of the first."""
    runs = [
        [recipe.Run("batchinfer", 1.0, 10.0, 12.0, 100), recipe.Run("peer", 5.0, 20.0, 30.0, 100)],
        [recipe.Run("batchinfer", 2.0, 20.0, 24.0, 100), recipe.Run("peer", 9.0, 40.0, 60.0, 100)],
        [recipe.Run("batchinfer", 1.0, 10.0, 12.0, 100), recipe.Run("peer", 5.0, 30.0, 30.0, 100)],
    ]
    assert recipe.ratios(runs, "peer", "gen_s") == [2.0, 2.0, 3.0]
    figures = recipe.report(runs)
    assert figures["peer"]["gen_ratio"] == 2.0
    assert figures["peer"]["wall_ratio"] == 2.5
    assert figures["batchinfer"]["output_tokens_per_s"] == 10.0
    assert "| peer | 5.0 | 30.0 | 30.0 | 3.3 | 2.00 | 2.50 |" in recipe.table(figures)


@pytest.mark.slow
def test_runs_ours_and_a_peer(repo_root: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"id": ["a", "b"], "prompt": ["One two", "Three"]}), prompts)
    line = json.dumps({"load_s": 1.0, "gen_s": 2.0, "prompt_tokens": 3, "output_tokens": 8})
    peer = tmp_path / "peer.sh"
    peer.write_text(f"#!/bin/sh\necho noise\necho '{line}'\n")
    peer.chmod(0o755)
    command = [sys.executable, str(repo_root / "recipes/bench/throughput.py"), str(prompts), "--max-tokens", "4"]
    command += ["--rounds", "1", "--peer", f"peer={peer} {{prompts}} {{max_tokens}} {{out}}", "--option=--threads=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    assert figures["peer"]["gen_s"] == 2.0
    assert figures["batchinfer"]["output_tokens_per_s"] > 0
    assert figures["peer"]["gen_ratio"] == pytest.approx(2.0 / figures["batchinfer"]["gen_s"], rel=0.01)
