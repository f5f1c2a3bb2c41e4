"""A killed or starved process never leaves a half-written file under the output's name."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

JOB = """
import os, resource, signal, sys
import pyarrow as pa
from pathlib import Path
from batchinfer.output.schema import output_schema
from batchinfer.output.writer import ParquetOutput
from batchinfer.types import Completion, FinishReason

path, point = Path(sys.argv[1]), sys.argv[2]
table = pa.table({"x": [os.urandom(500).hex() for _ in range(200)]})

def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)

if point == "replace":
    os.replace = kill
if point == "sync":
    os.fsync = kill
if point == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with ParquetOutput(path, output_schema(table.schema), overwrite=True) as output:
    for window in range(5):
        completions = [Completion(window * 200 + row, 0, [1], "t", FinishReason.STOP) for row in range(200)]
        output.write_window(table, window * 200, completions)
        if point == f"window {window}":
            kill()
    output.commit({"batchinfer": "{}"})
if point == "after":
    kill()
"""


def run(path: Path, point: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", JOB, str(path), point], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("point", "old"), [("window 0", False), ("window 3", True), ("sync", False), ("replace", True)]
)
def test_killed_before_the_rename(tmp_path: Path, point: str, old: bool) -> None:
    path = tmp_path / "out.parquet"
    if old:
        pq.write_table(pa.table({"old": [1]}), path)
    assert run(path, point).returncode == -signal.SIGKILL
    assert path.exists() == old
    if old:
        assert pq.read_table(path).to_pylist() == [{"old": 1}]
    left = [file.name for file in tmp_path.iterdir() if file != path]
    assert len(left) == 1
    assert left[0].startswith(".batchinfer-")


def test_what_a_killed_run_left_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    run(path, "replace")
    assert run(path, "none").returncode == 0
    assert pq.read_table(path).num_rows == 1000


def test_killed_after_the_commit(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    assert run(path, "after").returncode == -signal.SIGKILL
    assert pq.read_table(path).num_rows == 1000
    assert list(tmp_path.iterdir()) == [path]


def test_no_room_for_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    result = run(path, "full")
    assert result.returncode == 1
    assert f"cannot write {path}" in result.stderr.splitlines()[-1]
    assert "OutputError" in result.stderr.splitlines()[-1]
    assert "Exception ignored" not in result.stderr
    assert list(tmp_path.iterdir()) == []
