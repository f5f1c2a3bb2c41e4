"""Columns that no prompt is made of take no memory, however wide they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

NUM_ROWS, CELL_BYTES = 3000, 2**20

JOB = """
import re, sys
from pathlib import Path
from fakes import FakeEngine, FakeModelSource
from batchinfer.job import run_job
from batchinfer.settings import job_settings

flags = {"prompts": sys.argv[1], "model": "m", "output": sys.argv[2]}
run_job(
    job_settings(flags, {}, None),
    engine_factory=lambda model, config: FakeEngine(model, config),
    resolve=lambda name: FakeModelSource(),
)
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())  # ru_maxrss begins at the parent's
print(1024 * int(peak[1]))
"""


@pytest.mark.slow
def test_a_window_whose_rows_are_larger_than_memory_may_be(tmp_path: Path) -> None:
    """One window of 3 GiB, which are few bytes in the file: every cell is the same."""
    cell = pa.array([b"x" * CELL_BYTES] * 100)
    chunks = pa.chunked_array([cell] * (NUM_ROWS // 100))
    table = pa.table({"prompt": [f"p{i}" for i in range(NUM_ROWS)], "wide": chunks})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=500)
    tests = Path(__file__).resolve().parent
    arguments = [sys.executable, "-c", JOB, str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=tests)
    assert int(done.stdout) < 1.5 * 2**30
    with pq.ParquetFile(tmp_path / "out.parquet") as output:
        assert output.metadata.num_rows == NUM_ROWS
        last = output.read_row_group(output.num_row_groups - 1)
    assert last.column("output")[-1].as_py() == f"p{NUM_ROWS - 1}"
    assert last.column("wide")[-1].as_py() == b"x" * CELL_BYTES
