"""Kills a job at each of its durable steps in turn, continues it, and says what came of it.

A program of its own, started by test_kill_points.py: it forks for each run, which is quick, and only sound in a process
that has no other threads. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fakes import FakeEngine, FakeModelSource

import batchinfer.engine.machine
import batchinfer.output.journaled
import batchinfer.output.openai
import batchinfer.output.part
import batchinfer.output.store  # noqa: F401  # imported once, not in each fork
from batchinfer.job import run_job
from batchinfer.output import durable, journal, part, store
from batchinfer.settings import job_settings
from batchinfer.types import Completion, Prompt

NUM_ROWS, WINDOW_ROWS = 9, 5


class OverlappingEngine(FakeEngine):
    """The last completion of a window comes in the middle of the next one."""

    def run_windows(
        self, windows: Iterable[Sequence[Prompt]], on_step: Callable[[Any], None] | None = None
    ) -> Iterator[Completion]:
        held: list[Completion] = []
        row = -1
        for completion in super().run_windows(windows, on_step):
            if completion.row_index // WINDOW_ROWS != row // WINDOW_ROWS and held:
                yield completion
                yield from held
                held = []
            elif not held:
                held = [completion]
            else:
                yield completion
            row = completion.row_index
        yield from held


def run(prompts: Path, output: Path, on_step: Callable[[str], None], ran: Path) -> None:
    """In a process of its own."""
    for module in (durable, journal, part, store):
        module.durable_step = on_step  # type: ignore[attr-defined]
    rows: list[int] = []

    def note(row: int) -> None:
        rows.append(row)
        ran.write_text(json.dumps(rows))

    flags = {"prompts": str(prompts), "model": "m", "output": str(output), "n": 2, "logprobs": 1, "seed": 3}
    run_job(
        job_settings({**flags, "window": WINDOW_ROWS, "flush_rows": 3}, {}, None),
        engine_factory=lambda model, config: OverlappingEngine(model, config, note),
        resolve=FakeModelSource,
    )


def in_child(*args: Any) -> int:
    """How it ended: the exit code, or minus the signal."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        run(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Killer:
    def __init__(self, at: int, names: Path | None = None) -> None:
        self._left = at
        self._names = names

    def __call__(self, name: str) -> None:
        if self._names is not None:
            with self._names.open("a") as file:
                file.write(name + "\n")
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def rows_of(output: Path) -> list[Any]:
    if output.suffix == ".jsonl":
        return [_without_ids(json.loads(line)) for line in output.read_text().splitlines()]
    files = [output] if output.is_file() else sorted(output.glob("part-*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read(use_threads=False).to_pylist()]


def _without_ids(value: Any) -> Any:
    """Without what tells one job from another: when it began, and ids made of that."""
    if isinstance(value, list):
        return [_without_ids(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_ids(inner) for key, inner in value.items() if key not in ("id", "request_id", "created")}


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def main(folder: Path, name: str) -> None:
    prompts, ran = folder / "in.parquet", folder / "ran.json"
    texts = [None if i % 7 == 3 else f"row {i} " + "x" * (i * 5 % 11) for i in range(NUM_ROWS)]
    pq.write_table(pa.table({"prompt": texts, "blob": [os.urandom(20) for _ in texts]}), prompts)
    whole = folder / "whole"
    whole.mkdir()
    names = folder / "names.txt"
    assert in_child(prompts, whole / name, Killer(-1, names), ran) == 0
    steps = names.read_text().splitlines()
    expected, files = rows_of(whole / name), listing(whole)
    problems, num_again = [], []
    for at, step in enumerate(steps):
        place = folder / f"{at}"
        place.mkdir()
        ran.unlink(missing_ok=True)
        ends = [in_child(prompts, place / name, Killer(at), ran)]
        begun = set(json.loads(ran.read_text())) if ran.exists() else set()
        ends.append(in_child(prompts, place / name, Killer(at % 6), ran))  # continuing is killed too
        ran.unlink(missing_ok=True)
        last = in_child(prompts, place / name, Killer(-1), ran)
        again = json.loads(ran.read_text()) if ran.exists() else []
        num_again.append(len(begun & set(again)))
        if ends[0] != -signal.SIGKILL or ends[1] not in (-signal.SIGKILL, 0) or last != 0:
            problems.append(f"{at} {step}: ended with {ends}, {last}")
        elif rows_of(place / name) != expected:
            problems.append(f"{at} {step}: other rows")
        elif listing(place) != files:
            problems.append(f"{at} {step}: {listing(place)}")
    print(json.dumps({"steps": steps, "problems": problems, "num_again": num_again, "num_rows": len(expected)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
