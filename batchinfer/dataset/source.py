"""Opening a dataset of prompts, whatever its format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchinfer.dataset.huggingface import PREFIXES, from_hf_dataset, is_saved_dataset, open_hf, open_saved, split_off
from batchinfer.dataset.jsonl import open_jsonl
from batchinfer.dataset.parquet import MAGIC, find_parquet_files, open_parquet
from batchinfer.dataset.windows import WINDOW_ROWS as WINDOW_ROWS
from batchinfer.dataset.windows import PromptSource as PromptSource
from batchinfer.dataset.windows import StreamSource, check_limit, limited
from batchinfer.errors import InputError

if TYPE_CHECKING:
    import datasets
    import pandas

_JSONL_ENDINGS = (".jsonl", ".ndjson", ".json")


def open_source(spec: str, *, limit: int | None = None) -> PromptSource:
    """Open what `spec` names, its first `limit` rows where one is given.

    A Parquet file, a folder of them (all *.parquet below it) or a glob, in the order of their
    paths; JSON Lines (.jsonl, .ndjson, .json), among them the OpenAI Batch format; hf:NAME[:CONFIG]@SPLIT, or
    hf-stream:NAME[:CONFIG]@SPLIT; a folder made by datasets' save_to_disk, with @SPLIT where it has splits.
    Raises InputError, before any work, if it is missing, unreadable, of unequal schemas or empty.
    """
    check_limit(limit)
    if spec.startswith(PREFIXES):
        return open_hf(spec, limit)
    name, split = split_off(spec)
    folder = Path(name)
    if is_saved_dataset(folder):
        return open_saved(folder, split, limit)
    paths = find_parquet_files(spec)
    is_jsonl = [_is_jsonl(path) for path in paths]
    if any(is_jsonl) and not all(is_jsonl):
        other = paths[is_jsonl.index(False)]
        raise InputError(f"{spec} mixes formats: {paths[is_jsonl.index(True)]} is JSON Lines and {other} is not")
    return open_jsonl(paths, limit) if is_jsonl[0] else open_parquet(paths, limit)


def reads_file(spec: str, path: Path) -> bool:
    """Whether open_source(spec) would read the file `path`. Raises InputError if nothing matches `spec`."""
    if not path.exists() or spec.startswith(PREFIXES) or is_saved_dataset(Path(split_off(spec)[0])):
        return False
    return any(path.samefile(file) for file in find_parquet_files(spec))


def from_dataset(
    dataset: datasets.Dataset | datasets.IterableDataset | pandas.DataFrame | pa.Table, *, limit: int | None = None
) -> PromptSource:
    """A dataset that is already in memory. Raises InputError if it is empty, TypeError if it is something else."""
    check_limit(limit)
    if isinstance(dataset, pa.Table):
        return _from_table(dataset, limit, "the table")
    package = type(dataset).__module__.partition(".")[0]
    if package == "pandas":
        return _from_table(_table_of(dataset), limit, "the data frame")
    if package == "datasets":
        return from_hf_dataset(dataset, limit)
    raise TypeError(f"expected a datasets.Dataset, pandas.DataFrame or pyarrow.Table, got {type(dataset).__name__}")


def _from_table(table: pa.Table, limit: int | None, name: str) -> StreamSource:
    def tables(start: int, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        rest = table.slice(start)
        return iter([rest if columns is None else rest.select([n for n in table.column_names if n in columns])])

    return StreamSource(name, table.schema, limited(table.num_rows, limit), tables)


def _table_of(frame: Any) -> pa.Table:
    try:
        return pa.Table.from_pandas(frame)
    except (pa.ArrowException, UnicodeEncodeError, ValueError, TypeError) as error:
        reason = "; ".join(str(part) for part in error.args)
        raise InputError(f"the data frame does not fit Arrow's types: {reason}") from error


def _is_jsonl(path: Path) -> bool:
    if path.suffix.lower() in _JSONL_ENDINGS:
        return True
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    return not start.startswith(MAGIC) and start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
