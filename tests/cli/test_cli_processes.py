"""What only a process of its own shows: signals, pipes, exit codes, start-up time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# The command with an engine that echoes one row every `pause_s` seconds.
_DRIVER = """
import sys, time
sys.path.insert(0, {tests!r})
import batchinfer.job, batchinfer.models.source
from batchinfer.cli.main import app
from fakes import FakeEngine, FakeModelSource

batchinfer.models.source.resolve_model = FakeModelSource
batchinfer.job._load_engine = lambda model, config: FakeEngine(model, config, lambda row: time.sleep({pause_s}))
app()
"""


_LIST_MODULES = """
import sys
from batchinfer.cli.main import app
try:
    app()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def start(folder: Path, *args: str, pause_s: float = 0.0) -> subprocess.Popen[str]:
    tests = str(Path(__file__).resolve().parent.parent)
    driver = _DRIVER.format(tests=tests, pause_s=pause_s)
    return subprocess.Popen(
        [sys.executable, "-c", driver, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,  # a signal to it is to it alone
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"prompt": [f"row {i}" for i in range(100)]}), tmp_path / "p.parquet")
    return tmp_path


RUN = ("run", "p.parquet", "--model", "m", "--output", "out.parquet")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_and_the_same_command_continues_it(folder: Path, signum: int, code: int) -> None:
    process = start(folder, *RUN, pause_s=0.1)
    assert process.stderr is not None
    assert process.stderr.readline() == "batchinfer: loading m\n"
    assert process.stderr.readline() == "batchinfer: running p.parquet\n"
    time.sleep(1.0)
    process.send_signal(signum)
    sent_s = time.monotonic()
    stdout, stderr = process.communicate(timeout=20)
    assert time.monotonic() - sent_s < 5
    assert process.returncode == code
    said = re.fullmatch(
        rf"error: interrupted by {signal.Signals(signum).name}; (\d+) of 100 rows are kept in "
        r"\.out\.parquet\.batchinfer: to continue, run the same command again",
        stderr.splitlines()[-1],
    )
    assert said, stderr
    kept = int(said[1])
    assert 0 < kept < 100
    assert "Traceback" not in stderr
    assert stdout == ""
    assert sorted(path.name for path in folder.iterdir()) == [".out.parquet.batchinfer", "p.parquet"]
    process = start(folder, *RUN, "--json")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert f"batchinfer: continuing out.parquet: {kept} of 100 rows are done\n" in stderr
    assert json.loads(stdout)["num_rows_earlier"] == kept
    assert pq.read_table(folder / "out.parquet").column("output").to_pylist() == [f"row {i}" for i in range(100)]
    assert sorted(path.name for path in folder.iterdir()) == ["out.parquet", "p.parquet"]


def test_a_second_signal_ends_the_process_at_once_and_the_job_continues(folder: Path) -> None:
    """The first one is held up in a row that takes long."""
    process = start(folder, *RUN, "--flush-rows", "1", pause_s=0.2)
    assert process.stderr is not None
    while "running" not in process.stderr.readline():
        pass
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode in (143, -signal.SIGTERM)
    process = start(folder, *RUN, "--json")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["num_rows_earlier"] > 0
    assert pq.read_table(folder / "out.parquet").num_rows == 100


# A row that takes long in C, where no signal handler of Python's runs.
_STUCK = """
import hashlib, sys
sys.path.insert(0, {tests!r})
import batchinfer.job, batchinfer.models.source
from batchinfer.cli.main import app
from fakes import FakeEngine, FakeModelSource

def work(row):
    if row == 95:
        print("stuck", file=sys.stderr, flush=True)
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 400_000_000)

batchinfer.models.source.resolve_model = FakeModelSource
batchinfer.job._load_engine = lambda model, config: FakeEngine(model, config, work)
app()
"""


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_signal_in_a_long_step_ends_the_run_in_time(folder: Path, num_signals: int) -> None:
    driver = _STUCK.format(tests=str(Path(__file__).resolve().parent.parent))
    process = subprocess.Popen(
        [sys.executable, "-c", driver, *RUN, "--flush-rows", "1"], stderr=subprocess.PIPE, text=True, cwd=folder
    )
    assert process.stderr is not None
    while "stuck" not in process.stderr.readline():
        pass
    time.sleep(0.2)
    sent_s = time.monotonic()
    for _ in range(num_signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert time.monotonic() - sent_s < (5 if num_signals == 1 else 2)
    if num_signals == 1:
        assert "error: interrupted by SIGTERM; a step was taking long" in stderr
    process = start(folder, *RUN, "--json")
    stdout, stderr = process.communicate(timeout=60)
    assert json.loads(stdout)["num_rows_earlier"] == 4
    assert pq.read_table(folder / "out.parquet").num_rows == 100


def test_two_processes_do_not_write_one_output(folder: Path) -> None:
    first = start(folder, *RUN, pause_s=0.05)
    assert first.stderr is not None
    while "running" not in first.stderr.readline():
        pass
    second = start(folder, *RUN)
    _, stderr = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"output out.parquet is being written by process {first.pid} on " in stderr
    shown = start(folder, "status", "out.parquet", "--json")
    stdout, stderr = shown.communicate(timeout=60)
    assert shown.returncode == 0, stderr
    status = json.loads(stdout)
    assert (status["state"], status["process"]["pid"]) == ("running", first.pid)
    first.kill()
    first.communicate(timeout=60)
    third = start(folder, *RUN)
    _, stderr = third.communicate(timeout=60)
    assert third.returncode == 0, stderr
    assert pq.read_table(folder / "out.parquet").num_rows == 100


def test_stdout_of_json_parses_whole(folder: Path) -> None:
    process = start(folder, *RUN, "--json")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(stdout)["num_rows_ok"] == 100
    assert "\r" not in stderr


def test_a_closed_stdout_does_not_fail_the_job(folder: Path) -> None:
    process = start(folder, *RUN)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    stderr = process.stderr.read()
    assert process.wait(timeout=60) == 0
    assert "Traceback" not in stderr
    assert "BrokenPipe" not in stderr
    assert pq.read_metadata(folder / "out.parquet").num_rows == 100


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["run", "--help"], 0),
        (["score", "--help"], 0),
        (["status", "none"], 2),
        (["--version"], 0),
        (["run", "none", "--model", "m"], 2),
        (["score", "none", "--model", "m", "--output", "o", "--bos", "x"], 2),
        (["score", "none", "--model", "m", "--output", "o"], 2),
        (["rum"], 2),
    ],
)
def test_the_real_command_answers_without_loading_torch(folder: Path, args: list[str], code: int) -> None:
    """Start-up stays short because nothing heavy is imported; counting modules does not depend on the machine."""
    done = subprocess.run(
        [sys.executable, "-c", _LIST_MODULES, *args], capture_output=True, text=True, cwd=folder, env=dict(os.environ)
    )
    assert done.returncode == code, done.stderr
    modules = set(done.stderr.split())
    assert "batchinfer.settings" in modules
    assert modules.isdisjoint({"torch", "transformers", "datasets", "pandas"})
