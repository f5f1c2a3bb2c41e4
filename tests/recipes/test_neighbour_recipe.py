"""The neighbour computes on its core and ends with its block; ratios are beside the fair one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no process to a core")


@pytest.fixture
def recipe(bench_recipe: Callable[[str], ModuleType]) -> ModuleType:
    return bench_recipe("neighbour")


def processor_s(pid: int) -> float:
    """Of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_neighbour_computes_on_its_core_until_the_block_ends(recipe: ModuleType) -> None:
    core = min(os.sched_getaffinity(0))
    with recipe.neighbour(core) as process:
        assert os.sched_getaffinity(process.pid) == {core}
        before, end = processor_s(process.pid), time.monotonic() + 60
        while processor_s(process.pid) == before:
            assert time.monotonic() < end, "the neighbour does nothing"
            time.sleep(0.05)
        assert process.poll() is None
    assert process.poll() is not None


def test_the_neighbour_ends_when_its_owner_is_killed(recipe: ModuleType) -> None:
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-c", recipe._COMPUTE, str(core)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        process.stdin.close()  # what the system does with a killed owner's pipe
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_ratios_beside_the_fair_one(recipe: ModuleType) -> None:
    found = recipe.summary([10.0, 20.0, 10.0], [15.0, 28.0, 14.0], num_cores=2, threads=2)
    assert found["ratios"] == pytest.approx([1.5, 1.4, 1.4])
    assert (found["ratio"], found["fair_ratio"]) == (pytest.approx(1.4), pytest.approx(4 / 3))
    assert recipe.fair_ratio(1) == 2.0


def test_alone_and_beside_are_run_in_turn(
    recipe: ModuleType,
    tmp_path: Path,
    tiny_model: Path,
    in_process: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, document = tmp_path / "p.parquet", tmp_path / "performance.md"
    pq.write_table(pa.table({"prompt": ["one", "two", "three"]}), prompts)
    document.write_text("# Performance\n")
    command = [str(prompts), "--model", str(tiny_model), "--max-tokens", "2", "--limit", "2", "--threads", "1"]
    recipe.main([*command, "--rounds", "2", "--write", str(document)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(in_process) == 4
    assert result["ratios"] == pytest.approx(
        [busy / quiet for quiet, busy in zip(result["alone_s"], result["with_neighbour_s"], strict=True)]
    )
    text = document.read_text()
    assert "<!-- neighbour:begin -->" in text
    assert f"| {result['fair_ratio']:.2f} |" in text
