"""The journal of a window: an append-only file of the completions that have ended so far.

It is a row of frames, each a length and a checksum before its bytes. The first frame holds the Arrow
schema, under whose metadata stands which window of which job it is; every other one holds a record
batch of completions, with the columns of the output. So both of what was to choose from: the frames
tell a torn or damaged end from a good one, which Arrow's own stream (lengths, no checksums) cannot; the
record batches hold each value in the type it gets in the output, bit for bit, are packed (4 bytes a
token id or log-probability, where Python objects take 32), and are read back through a memory map
without being parsed. A window's finished completions therefore need not stay in memory.

A write that fails or is broken off is repeated at the same place, so nothing is written twice.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchinfer.output import arrays
from batchinfer.output.durable import durable_step, output_errors, sync_folder
from batchinfer.output.schema import METADATA_KEY
from batchinfer.types import Completion

_SCHEMA, _BATCH = b"BIJS", b"BIJB"
_HEADER = struct.Struct("<4sIQ")  # kind, crc32 of kind, length and payload, length of the payload
_ALIGNMENT = 8  # of payloads, as Arrow wants its buffers

#: Before the results: the row, and how many completions it gets in all.
_ROW_FIELDS = [pa.field("row_index", pa.int64()), pa.field("num_samples", pa.int32())]


def journal_schema(result_fields: Sequence[pa.Field], about: Mapping[str, Any]) -> pa.Schema:
    """Of the results that the output has, under their own names; `about` are JSON values that say whose they are."""
    results = [pa.field(result_name(field), field.type) for field in result_fields]
    return pa.schema(_ROW_FIELDS + results, metadata={METADATA_KEY: json.dumps(dict(about)).encode()})


def result_name(result_field: pa.Field) -> str:
    """Which result a column of the output holds, whatever its prefix."""
    return result_field.metadata[METADATA_KEY].decode()


def to_batch(completions: Sequence[Completion], num_samples: Sequence[int], schema: pa.Schema) -> pa.RecordBatch:
    """[num_completions] `num_samples`: how many completions the row of each gets."""
    columns = [
        pa.array([completion.row_index for completion in completions], pa.int64()),
        pa.array(num_samples, pa.int32()),
    ]
    columns += [arrays.build_column(one.name, one.type, completions) for one in list(schema)[len(_ROW_FIELDS) :]]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class JournalWriter:
    """Appends batches, each durable when `append` returns.

    Args:
        path: made with the first batch if it is not there.
        schema: from journal_schema().
        num_bytes: of what is there and good; what follows is overwritten.
    """

    def __init__(self, path: Path, schema: pa.Schema, num_bytes: int = 0) -> None:
        self.path = path
        self.schema = schema
        self._num_bytes = num_bytes
        self._file: int | None = None

    def append(self, batch: pa.RecordBatch) -> None:
        """Raises OutputError; what was appended before is safe then."""
        is_new = self._num_bytes == 0
        start = _frame(_SCHEMA, self.schema.serialize()) if is_new else b""
        data = start + _frame(_BATCH, batch.serialize())
        with output_errors(self.path):
            if self._file is None:
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            _write_at(self._file, data, self._num_bytes)
            durable_step("journal written")
            os.fsync(self._file)
        durable_step("journal synced")
        if is_new:
            sync_folder(self.path.parent)
            durable_step("journal in its folder")
        self._num_bytes += len(data)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


@dataclass(frozen=True, slots=True)
class Journal:
    """What a journal holds.

    Attributes:
        about: whose it is, as journal_schema() was told; empty if not even that is whole.
        schema: of the batches.
        batches: in the order in which they were appended; views of the mapped file.
        num_bytes: of the good part.
        num_torn_bytes: behind it, from a write that was broken off or was damaged.
    """

    about: dict[str, Any] = field(default_factory=dict)
    schema: pa.Schema | None = None
    batches: list[pa.RecordBatch] = field(default_factory=list)
    num_bytes: int = 0
    num_torn_bytes: int = 0


def read_journal(path: Path) -> Journal:
    """All frames up to the first that is not whole. Raises OutputError if the file cannot be read."""
    with output_errors(path):
        size = path.stat().st_size
        if size == 0:
            return Journal()
        with pa.memory_map(str(path)) as file:
            data = file.read_buffer()
    about: dict[str, Any] = {}
    schema: pa.Schema | None = None
    batches: list[pa.RecordBatch] = []
    end = 0
    for kind, payload, stop in _frames(data):
        if schema is None:
            if kind != _SCHEMA:
                break
            schema = pa.ipc.read_schema(payload)
            about = json.loads(schema.metadata[METADATA_KEY])
        else:
            batches.append(pa.ipc.read_record_batch(payload, schema))
        end = stop
    return Journal(about, schema, batches, end, size - end)


def _frames(data: pa.Buffer) -> Iterator[tuple[bytes, pa.Buffer, int]]:
    """(kind, payload, where the frame ends) of the good frames."""
    start = 0
    view = memoryview(data)
    while start + _HEADER.size <= len(view):
        kind, checksum, length = _HEADER.unpack_from(view, start)
        stop = start + _HEADER.size + length
        if kind not in (_SCHEMA, _BATCH) or stop > len(view):
            return
        payload = data.slice(start + _HEADER.size, length)
        if _checksum(kind, payload) != checksum:
            return
        yield kind, payload, stop
        start = stop


def _frame(kind: bytes, payload: pa.Buffer) -> bytes:
    padded = payload.to_pybytes() + bytes(-payload.size % _ALIGNMENT)
    return _HEADER.pack(kind, _checksum(kind, padded), len(padded)) + padded


def _checksum(kind: bytes, payload: Any) -> int:
    return zlib.crc32(payload, zlib.crc32(kind + len(payload).to_bytes(8, "little")))


def _write_at(file: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written
