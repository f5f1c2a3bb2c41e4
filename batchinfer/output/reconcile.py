"""Bringing what lies on the disk after a crash to one truth: what the manifest does not vouch for is not there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.output.durable import TEMPORARY, output_errors, sync, sync_folder
from batchinfer.output.journal import Journal, read_journal
from batchinfer.output.manifest import Manifest
from batchinfer.output.place import JobPlace

#: The end of names of what is set aside: it may be looked at, and is removed when the job is finished.
TORN = ".torn"

Say = Callable[[str], None]


def reconcile(
    place: JobPlace, manifest: Manifest, schema_of: Callable[[int], pa.Schema], say: Say
) -> dict[int, Journal]:
    """Set aside what is torn, half-written or not the job's; returns the good journals of unwritten windows.

    `manifest` is changed where it names parts that are not whole any more: their windows are to be run again.

    Args:
        schema_of: window -> the schema that its journal must have.
    Raises:
        OutputError: the disk refuses it.
    """
    with output_errors(place.output):
        for path in place.state.glob(f"*{TEMPORARY}"):
            path.unlink()  # of a write that was broken off: what it was made of is still there
        _check_parts(place, manifest, say)
        return dict(_good_journals(place, manifest, schema_of, say))


def _check_parts(place: JobPlace, manifest: Manifest, say: Say) -> None:
    for window, part in sorted(manifest.parts.items()):
        path = place.parts / part.file
        problem = _problem_of_part(path, part.size_bytes, part.num_output_rows)
        if problem is not None:
            if path.exists():
                set_aside(path, place)
            say(f"{part.file} {problem}: its {part.num_rows:,} rows are run again")
            del manifest.parts[window]
    known = {part.file for part in manifest.parts.values()}
    for path in sorted(place.parts.glob("part-*.parquet")):
        if path.name not in known:
            set_aside(path, place)
            say(f"{path.name} was not finished: it is set aside and written again")


def _problem_of_part(path: Path, size_bytes: int, num_rows: int) -> str | None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return "is gone"
    if found != size_bytes:
        return f"has {found:,} bytes instead of {size_bytes:,}"
    try:
        return None if pq.read_metadata(path).num_rows == num_rows else "has other rows than it had"
    except (pa.ArrowException, OSError):
        return "cannot be read any more"


def _good_journals(
    place: JobPlace, manifest: Manifest, schema_of: Callable[[int], pa.Schema], say: Say
) -> Iterator[tuple[int, Journal]]:
    for path in sorted(place.state.glob("journal-*.bin")):
        window = int(path.stem.removeprefix("journal-"))
        if window in manifest.parts:
            path.unlink()  # its rows are written
            continue
        journal = read_journal(path)
        expected = json.loads(schema_of(window).metadata[b"batchinfer"])
        about = {key: value for key, value in journal.about.items() if key in expected}
        if journal.schema is None or not journal.schema.equals(schema_of(window)) or about != expected:
            set_aside(path, place)
            say(f"{path.name} is damaged from its beginning: it is set aside and its rows are run again")
            continue
        if journal.num_torn_bytes:
            _cut(path, journal, place)
            say(f"{path.name} ended in {journal.num_torn_bytes:,} torn bytes: they are set aside")
        yield window, journal


def _cut(path: Path, journal: Journal, place: JobPlace) -> None:
    """Move what is behind the good part elsewhere."""
    with path.open("r+b") as file:
        file.seek(journal.num_bytes)
        _new_name(path, place).write_bytes(file.read())
        os.ftruncate(file.fileno(), journal.num_bytes)
    sync(path)


def set_aside(path: Path, place: JobPlace) -> None:
    os.replace(path, _new_name(path, place))
    sync_folder(path.parent)


def _new_name(path: Path, place: JobPlace) -> Path:
    for number in range(1_000_000):
        new = place.state / f"{path.name}.{number}{TORN}"
        if not new.exists():
            return new
    raise FileExistsError(f"{place.state} holds a million torn files")
