"""What is written carries checksums: one flipped bit is found, by this package and by others."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModelSource

from batchinfer.job import run_job
from batchinfer.output import store
from batchinfer.output.durable import OutputError
from batchinfer.settings import job_settings


def run(folder: Path, name: str) -> Path:
    output = folder / name
    flags = {"prompts": str(folder / "p.parquet"), "model": "m", "output": str(output), "window": 2}
    run_job(
        job_settings(flags, {}, None),
        engine_factory=lambda model, config: FakeEngine(model, config),  # type: ignore[arg-type]
        resolve=lambda name: FakeModelSource(),  # type: ignore[arg-type, return-value]
    )
    return output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"prompt": [f"prompt {i}" for i in range(6)]}), tmp_path / "p.parquet")
    return tmp_path


def flip(path: Path, column: int = 0) -> None:
    """A bit of the last byte of a column's pages."""
    chunk = pq.read_metadata(path).row_group(0).column(column)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data = bytearray(path.read_bytes())
    data[start + chunk.total_compressed_size - 1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["out.parquet", "out/part-00001.parquet"])
def test_a_flipped_bit_of_the_output_is_found(folder: Path, name: str) -> None:
    run(folder, Path(name).parts[0])
    flip(folder / name)
    with pytest.raises(OSError, match=r"(?i)crc|checksum"):
        pq.read_table(folder / name, page_checksum_verification=True)


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_a_flipped_bit_of_a_part_is_not_joined(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: object, *args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.JobStore, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        run(folder, name)
    monkeypatch.undo()
    part = folder / f".{name}.batchinfer" / "part-00001.parquet"
    flip(part)
    with pytest.raises(OutputError, match=r"part-00001\.parquet is damaged .*remove it and run the same command again"):
        run(folder, name)
    part.unlink()
    output = run(folder, name)
    num_rows = len(output.read_text().splitlines()) if name == "out.jsonl" else pq.read_metadata(output).num_rows
    assert num_rows == 6
