"""Runs of evaluations: kept, used again, and continued."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModelSource

from batchinfer.kept_run import KeptRun, check_run, run_or_reuse
from batchinfer.settings import job_settings


class Runs:
    """`ran` are the rows of the last run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prompts = folder / "p.parquet"
        self.ran: list[int] = []
        self.write([f"row {i}" for i in range(6)])

    def write(self, prompts: list[str]) -> None:
        pq.write_table(pa.table({"prompt": prompts, "ratio": [float("nan")] * len(prompts)}), self.prompts)

    def run(self, stop_at: int | None = None, **flags: object) -> KeptRun:
        self.ran = []

        def on_row(row: int) -> None:
            if row == stop_at:
                raise RuntimeError("device lost")
            self.ran.append(row)

        settings = job_settings({"prompts": str(self.prompts), "model": "m", **flags}, {}, None, needs_output=False)
        checked = check_run(settings, FakeModelSource)
        return run_or_reuse(
            checked,
            self.folder,
            "before",
            engine_factory=lambda model, config: FakeEngine(model, config, on_row),
            resolve=FakeModelSource,
        )


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def outputs(kept: KeptRun) -> list[str]:
    return pq.read_table(kept.path).column("output").to_pylist()


def test_the_same_run_is_used_again_whatever_its_batches(runs: Runs) -> None:
    first = runs.run()
    again = runs.run(max_num_seqs=3, policy="fcfs")
    assert (again.path, again.is_reused, runs.ran) == (first.path, True, [])
    assert runs.run(seed=1).path != first.path


def test_other_rows_are_run_anew(runs: Runs) -> None:
    first = runs.run()
    runs.write([f"other {i}" for i in range(6)])
    again = runs.run()
    assert again.path == first.path
    assert not again.is_reused
    assert outputs(again) == [f"other {i}" for i in range(6)]


def test_a_run_that_broke_off_is_continued(runs: Runs) -> None:
    with pytest.raises(RuntimeError):
        runs.run(stop_at=2)
    kept = runs.run()
    assert runs.ran == [2, 1, 0]
    assert outputs(kept) == [f"row {i}" for i in range(6)]


def test_what_a_run_over_other_rows_left_is_in_nobodys_way(runs: Runs) -> None:
    with pytest.raises(RuntimeError):
        runs.run(stop_at=2)
    runs.write([f"other {i}" for i in range(6)])
    assert outputs(runs.run()) == [f"other {i}" for i in range(6)]


def test_a_damaged_file_is_made_anew(runs: Runs) -> None:
    path = runs.run().path
    path.write_bytes(path.read_bytes()[:100])
    kept = runs.run()
    assert not kept.is_reused
    assert outputs(kept) == [f"row {i}" for i in range(6)]
