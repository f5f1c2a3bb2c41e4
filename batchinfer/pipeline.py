"""Completions inside a Python pipeline: a dataset or data frame in, the same with results added out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from batchinfer.errors import InputError
from batchinfer.job_input import InputRows, prompts_of
from batchinfer.params import logprob_columns
from batchinfer.types import Completion, Prompt, SamplingParams

if TYPE_CHECKING:
    from batchinfer.dataset.columns import InputColumns


class DatasetEngine(Protocol):
    """What is needed of an engine; see Engine."""

    @property
    def model(self) -> Any: ...  # with .spec.vocab_size

    @property
    def tokenizer(self) -> Any: ...

    @property
    def default_params(self) -> SamplingParams: ...

    def run(self, prompts: Sequence[Prompt], on_step: Callable[[Any], None] | None = None) -> Iterator[Completion]: ...


def generate_dataset(
    engine: DatasetEngine,
    dataset: Any,
    params: SamplingParams | None = None,
    *,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    id_column: str | None = None,
    priority_column: str | None = None,
    system: str | None = None,
    output_prefix: str = "",
    window_rows: int | None = None,
) -> Any:
    """Complete every row; returns the same kind of dataset with the result columns of `batchinfer run` added.

    Args:
        dataset: a datasets.Dataset (features, format and split are kept, selections respected), a
            datasets.IterableDataset with known features, a pandas.DataFrame (index and dtypes are kept) or a
            pyarrow.Table. Columns that are not read may hold anything.
        params: for rows that have no sampling_params of their own; None: the model's defaults.
        prompt_column, messages_column, id_column, priority_column, system: as the options of the command.
        output_prefix: put before the names of the added columns.
        window_rows: rows planned together; None: 65,536.

    Returns:
        As many rows as samples: with n > 1 the samples of a row follow each other. A bad row is an error in
        its column `error`. A dataset without rows gets the columns and no rows. An IterableDataset gives one
        whose features are known at once and whose rows are completed when they are asked for, a window at a time,
        anew in every pass.

    Raises:
        InputError: for columns that are missing, of a wrong type or taken.
        TypeError: for another kind of dataset.
    """
    from batchinfer.dataset.columns import USUAL_NAMES, find_columns, row_param_names
    from batchinfer.dataset.prompts import check_can_build
    from batchinfer.output.schema import result_fields

    params = params or engine.default_params
    kind = _kind_of(dataset)
    named = {prompt_column, messages_column, id_column, priority_column}
    schema = kind.schema(dataset, USUAL_NAMES | named)
    columns = find_columns(
        schema, prompt=prompt_column, messages=messages_column, id=id_column, priority=priority_column
    )
    check_can_build(columns, engine.tokenizer, system)
    row_fields = row_param_names(schema, columns)
    has = logprob_columns({"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}, row_fields)
    fields = pa.schema(result_fields(kind.names(dataset), prefix=output_prefix, **asdict(has)))

    def complete(some: Any) -> tuple[np.ndarray, pa.Table]:
        rows = _rows(kind.select(some, columns), columns, row_fields, window_rows)
        windows = prompts_of(rows, engine.tokenizer, params, system, engine.model.spec.vocab_size)
        parts = [_results(engine, prompts, fields) for _, _, prompts in windows]
        return np.concatenate([indices for indices, _ in parts]), pa.concat_tables([table for _, table in parts])

    if kind is _STREAM:
        return _completed_stream(dataset, complete, fields, window_rows)
    if len(dataset) == 0:
        return kind.add(dataset, np.empty(0, np.int64), fields.empty_table())
    return kind.add(dataset, *complete(dataset))


def _rows(dataset: Any, columns: InputColumns, row_fields: frozenset[str], window_rows: int | None) -> InputRows:
    from batchinfer.dataset.source import WINDOW_ROWS, from_dataset

    source = from_dataset(dataset)
    return InputRows("the dataset", source, columns, row_fields, source.windows(window_rows or WINDOW_ROWS))


def _results(engine: DatasetEngine, prompts: list[Prompt], fields: pa.Schema) -> tuple[np.ndarray, pa.Table]:
    """Rows and result columns of a window's completions, by row and sample."""
    from batchinfer.output.arrays import build_column
    from batchinfer.output.schema import METADATA_KEY

    with closing(engine.run(prompts)) as finished:  # type: ignore[type-var]
        completions = sorted(finished, key=lambda c: (c.row_index, c.sample_index))
    arrays = [build_column(field.metadata[METADATA_KEY].decode(), field.type, completions) for field in fields]
    indices = np.array([completion.row_index for completion in completions], np.int64)
    return indices, pa.Table.from_arrays(arrays, schema=fields)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What differs between kinds of datasets."""

    names: Callable[[Any], Sequence[str]]  # of all columns
    schema: Callable[[Any, Collection[str | None]], pa.Schema]  # (dataset, columns that may be read); others may lack
    select: Callable[[Any, InputColumns], Any]  # only the columns that are read
    add: Callable[[Any, np.ndarray, pa.Table], Any]  # (dataset, row of each result, results)


def _kind_of(dataset: Any) -> _Kind:
    package, name = type(dataset).__module__.partition(".")[0], type(dataset).__name__
    kind = _KINDS.get((package, name))
    if kind is not None:
        return kind
    if name in ("DatasetDict", "IterableDatasetDict"):
        raise InputError(f"this is a dictionary of the splits {', '.join(dataset)}: pass one of them")
    raise TypeError(
        "expected a datasets.Dataset or IterableDataset, pandas.DataFrame or pyarrow.Table, "
        f"got {type(dataset).__name__}"
    )


def _is_each_row_once(row_indices: np.ndarray, num_rows: int) -> bool:
    return np.array_equal(row_indices, np.arange(num_rows))


def _add_to_hf(dataset: Any, row_indices: np.ndarray, results: pa.Table) -> Any:
    import datasets

    features = datasets.Features.from_arrow_schema(results.schema)
    plain = dataset.with_format(None)
    if not _is_each_row_once(row_indices, len(dataset)):
        plain = plain.select(row_indices)
    if len(dataset) == 0:  # concatenating would drop the columns
        both = datasets.Features({**dataset.features, **features})
        merged = datasets.Dataset.from_dict({name: [] for name in both}, features=both, split=dataset.split)
    else:
        new = datasets.Dataset(results.replace_schema_metadata(None), datasets.DatasetInfo(features=features))
        merged = datasets.concatenate_datasets([plain, new], axis=1, info=None, split=dataset.split)
    return _formatted_like(dataset, merged, results.column_names)


def _completed_stream(
    dataset: Any,
    complete: Callable[[pa.Table], tuple[np.ndarray, pa.Table]],
    fields: pa.Schema,
    window_rows: int | None,
) -> Any:
    """`dataset` mapped window by window. Nothing runs before somebody reads it."""
    import datasets

    from batchinfer.dataset.source import WINDOW_ROWS

    features = datasets.Features({**dataset.features, **datasets.Features.from_arrow_schema(fields)})
    completed = dataset.with_format("arrow").map(
        lambda table: _add_to_table(table, *complete(table)),
        batched=True,
        batch_size=window_rows or WINDOW_ROWS,
        features=features,
    )
    layout = dataset._formatting  # no public name tells how a stream is formatted
    return completed.with_format(None if layout is None else layout.format_type)


def _stream_schema(dataset: Any) -> pa.Schema:
    from batchinfer.dataset.huggingface import check_has_features

    check_has_features(dataset)
    return dataset.features.arrow_schema


def _formatted_like(dataset: Any, merged: Any, added: list[str]) -> Any:
    layout = dict(dataset.format)
    if layout["type"] is None and list(layout["columns"]) == dataset.column_names:
        return merged
    kwargs = layout.pop("format_kwargs", {})
    return merged.with_format(
        layout["type"], [*layout["columns"], *added], layout.get("output_all_columns", False), **kwargs
    )


def _pandas_schema(frame: Any, may_be_read: Collection[str | None]) -> pa.Schema:
    """Leaves out columns of objects that Arrow has no type for, unless they may be read."""
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise InputError(f"the data frame has more than one column named {twice!r}: rename one")
    fields = []
    for name in frame.columns:
        try:
            fields += list(pa.Schema.from_pandas(frame[[name]], preserve_index=False))
        except (pa.ArrowException, UnicodeEncodeError, ValueError, TypeError) as error:
            if name in may_be_read:
                reason = "; ".join(map(str, error.args))
                raise InputError(f"column {name!r} of the data frame does not fit Arrow's types: {reason}") from error
    return pa.schema(fields)


def _add_to_frame(frame: Any, row_indices: np.ndarray, results: pa.Table) -> Any:
    merged = frame.copy() if _is_each_row_once(row_indices, len(frame)) else frame.iloc[row_indices].copy()
    values = results.to_pandas()
    for name in values.columns:
        merged[name] = values[name].array  # by place: the frame has an index of its own
    return merged


def _add_to_table(table: pa.Table, row_indices: np.ndarray, results: pa.Table) -> pa.Table:
    from batchinfer.output.repeat import repeated_rows

    merged = table if _is_each_row_once(row_indices, table.num_rows) else repeated_rows(table, row_indices)
    for field in results.schema:
        merged = merged.append_column(field, results.column(field.name))
    return merged


_TABLE = _Kind(
    names=lambda table: table.column_names,
    schema=lambda table, may_be_read: table.schema,
    select=lambda table, columns: table.select(columns.used(table.schema)),
    add=_add_to_table,
)
_STREAM = _Kind(
    names=lambda dataset: list(dataset.features),
    schema=lambda dataset, may_be_read: _stream_schema(dataset),
    select=_TABLE.select,  # its windows are tables
    add=_add_to_table,
)
_KINDS: dict[tuple[str, str], _Kind] = {
    ("datasets", "IterableDataset"): _STREAM,
    ("datasets", "Dataset"): _Kind(
        names=lambda dataset: dataset.column_names,
        schema=lambda dataset, may_be_read: dataset.features.arrow_schema,
        select=lambda dataset, columns: dataset.select_columns(columns.used(dataset.features.arrow_schema)),
        add=_add_to_hf,
    ),
    ("pandas", "DataFrame"): _Kind(
        names=lambda frame: list(frame.columns),
        schema=_pandas_schema,
        select=lambda frame, columns: frame[[n for n in frame.columns if n in columns.names]].reset_index(drop=True),
        add=_add_to_frame,
    ),
    ("pyarrow", "Table"): _TABLE,
}
