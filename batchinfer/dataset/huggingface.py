"""Hugging Face datasets: from the hub, saved to disk, or in memory. Exact Arrow types, features kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchinfer.dataset.hub import cache_only, hub_problem
from batchinfer.dataset.windows import StreamSource, check_limit, limited
from batchinfer.errors import InputError

_STEP_ROWS = 1024
_STEP_BYTES = 64 * 2**20


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of a Dataset or a DatasetDict made this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


#: Beginnings of specs that load_dataset is asked for: whole, and streaming.
PREFIXES = ("hf:", "hf-stream:")


def open_hf(spec: str, limit: int | None = None) -> StreamSource:
    """`hf:NAME[:CONFIG]@SPLIT` or `hf:FOLDER[@SPLIT]`; `hf-stream:...` reads the files while it goes, copying none.

    Raises InputError if it cannot be loaded.
    """
    prefix = next(prefix for prefix in PREFIXES if spec.startswith(prefix))
    name, split = split_off(spec.removeprefix(prefix))
    if not name:
        raise InputError(f"{spec}: write {prefix}NAME[:CONFIG]@SPLIT or {prefix}FOLDER[@SPLIT]")
    folder = Path(name).expanduser()
    if is_saved_dataset(folder):
        return open_saved(folder, split, limit)
    if name.startswith(("/", "./", "../", "~")) and not folder.is_dir():
        raise InputError(f"{spec}: folder {name} does not exist")
    if split is None:
        raise InputError(f"{spec}: say which split, for example {spec}@train")
    name, _, config = (str(folder), "", "") if folder.is_dir() else name.partition(":")
    loaded = _load(spec, name, config or None, split, streaming=prefix == "hf-stream:")
    return from_hf_dataset(loaded, limit, spec)


def split_off(name: str) -> tuple[str, str | None]:
    """FOLDER@SPLIT or NAME@SPLIT -> its two parts; a folder that has "@" in its name is itself."""
    base, at, split = name.rpartition("@")
    if not at or Path(name).expanduser().exists():
        return name, None
    return base, split or None


def _load(spec: str, name: str, config: str | None, split: str, streaming: bool) -> Any:
    import datasets

    is_local = Path(name).exists()
    unreachable = None if is_local else hub_problem()
    try:
        with _no_bars_in_logs(), cache_only() if unreachable else nullcontext():
            loaded = datasets.load_dataset(name, config, split=split, streaming=streaming)
            return _with_features(loaded) if streaming else loaded
    except Exception as error:  # hub, network, cache and parsing errors of many packages
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        if unreachable:
            reason = f"{unreachable}, and the dataset is not in the cache"
        hint = "" if is_local else "; check the name, and that the hub can be reached or has been before"
        raise InputError(f"cannot load {spec}: {reason}{hint}") from error


def _with_features(stream: Any) -> Any:
    """Where nothing tells the types of a stream, those of its first rows hold for all."""
    import datasets

    if stream.features is not None:
        return stream
    first = next(iter(stream.with_format("arrow").iter(batch_size=_STEP_ROWS)))
    return stream.cast(datasets.Features.from_arrow_schema(first.schema))


def open_saved(folder: Path, split: str | None = None, limit: int | None = None) -> StreamSource:
    """A folder made by `save_to_disk`. Raises InputError naming the splits where one must be chosen."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise InputError(f"cannot load the dataset saved in {folder}: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise InputError(
                f"{folder} has the splits {', '.join(loaded)}: choose one, such as {folder}@{next(iter(loaded))}"
            )
        return from_hf_dataset(loaded[split], limit, f"{folder}@{split}")
    if split is not None and split != str(loaded.split):
        raise InputError(f"{folder} is one dataset without splits: leave out @{split}")
    return from_hf_dataset(loaded, limit, str(folder))


def from_hf_dataset(dataset: Any, limit: int | None = None, name: str = "the dataset") -> StreamSource:
    """A Dataset (its selections and shuffles respected) or an IterableDataset with known features.

    Raises InputError for a dictionary of splits and where features are unknown.
    """
    import datasets

    check_limit(limit)
    if isinstance(dataset, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        raise InputError(f"{name} is a dictionary of the splits {', '.join(dataset)}: pass one of them")
    if isinstance(dataset, datasets.IterableDataset):
        return _from_iterable(dataset, limit, name)
    num_rows = limited(len(dataset), limit)
    schema = dataset.with_format("arrow")[0:1].schema if num_rows else dataset.features.arrow_schema

    def tables(start: int, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        some = dataset.with_format(None) if columns is None else dataset.with_format(None).select_columns(columns)
        arrow = some.with_format("arrow")
        step = _step_rows(some)
        for first in range(start, num_rows, step):
            yield from _rows_of(arrow, first, min(first + step, num_rows))

    return StreamSource(name, schema, num_rows, tables)


def _step_rows(dataset: Any) -> int:
    """As many rows as take some megabytes: selections are copied."""
    row_bytes = dataset.data.nbytes / max(len(dataset.data), 1)
    return max(1, min(_STEP_ROWS, int(_STEP_BYTES / max(row_bytes, 1))))


def _rows_of(arrow: Any, first: int, end: int) -> Iterator[pa.Table]:
    """Selections are taken row by row into one array, which cannot hold strings of more than 2 GiB."""
    try:
        table = arrow[first:end]
    except pa.ArrowInvalid:
        if end - first == 1:
            raise
        middle = (first + end) // 2
        yield from _rows_of(arrow, first, middle)
        yield from _rows_of(arrow, middle, end)
    else:
        yield table


def _from_iterable(dataset: Any, limit: int | None, name: str) -> StreamSource:
    check_has_features(dataset, name)

    def tables(start: int, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        rest = dataset.skip(start) if start else dataset
        some = rest if columns is None else rest.select_columns(list(columns))
        yield from some.with_format("arrow").iter(batch_size=_STEP_ROWS)

    return StreamSource(name, dataset.features.arrow_schema, None, tables, limit, rereads=False)


def check_has_features(dataset: Any, name: str = "the dataset") -> None:
    """Refuse a stream whose types are not known before it is read. Raises InputError."""
    if dataset.features is None:
        raise InputError(f"{name} streams without known features: give it some with dataset.cast(features)")


@contextmanager
def _no_bars_in_logs() -> Iterator[None]:
    """Progress bars only on a terminal, and as they were afterwards."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hide = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()
