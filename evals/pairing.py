"""Bringing the rows of two runs together: by id, or by what the input row holds, never by place.

Either file may be shuffled, lack rows or have more samples. What the other side lacks is counted
and left out. Ids that occur more than once, and rows without an id, are told apart by their prompt;
rows whose id and prompt are both the same are paired in order, since nothing tells them apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchinfer.errors import InputError
from batchinfer.evals.lists import ListColumn, Picked
from batchinfer.evals.row_keys import cell_keys, row_keys, row_numbers, sample_indices
from batchinfer.evals.rows import PairedRows, Side
from batchinfer.evals.run_output import RunOutput

if TYPE_CHECKING:
    import pyarrow as pa

Rows = npt.NDArray[np.int64]

REFERENCE_NAME = "reference"


def pair_rows(
    before: RunOutput,
    after: RunOutput,
    *,
    reference_column: str | None = None,
    cluster_column: str | None = None,
) -> PairedRows:
    """The rows that both runs have. No pair at all is no error here.

    Args:
        reference_column: None: a column named "reference" if there is one of text or numbers.
        cluster_column: input column whose equal values are one cluster; rows where it is null are clustered by
            their prompt, as all are without it.
    Raises InputError for a column that is missing or of the wrong type, or rows that nothing identifies.
    """
    from batchinfer.dataset.columns import PARAMS_NAME

    keys = row_keys(before, after)
    place_after = {key: row for row, key in enumerate(zip(keys.after, sample_indices(after), strict=True))}
    first_place: dict[Hashable, int] = {}
    pairs = []
    for row, key in enumerate(zip(keys.before, sample_indices(before), strict=True)):
        place = first_place.setdefault(key[0], len(first_place))
        if key in place_after:
            pairs.append((place, key[1], row, place_after[key]))
    pairs.sort()
    rows_before = np.array([pair[2] for pair in pairs], dtype=np.int64)
    rows_after = np.array([pair[3] for pair in pairs], dtype=np.int64)
    prompt_index = np.unique([pair[0] for pair in pairs], return_inverse=True)[1].astype(np.int64)
    inputs = before.table.select(before.input_columns).take(rows_before)
    references, reference_column, reference_notes = _references(
        before, after, rows_before, rows_after, reference_column
    )
    return PairedRows(
        ids=_ids(before, rows_before),
        sample_index=np.array([pair[1] for pair in pairs], dtype=np.int64),
        prompt_index=prompt_index,
        cluster_index=_clusters(inputs, prompt_index, cluster_column, before),
        inputs=inputs,
        before=_side(before, rows_before),
        after=_side(after, rows_after),
        references=references,
        reference_column=reference_column,
        cluster_column=cluster_column,
        id_column=before.id_column if keys.made_of.startswith("column") else None,
        prompt_column=before.prompt_column,
        paired_by=keys.made_of,
        num_unpaired_before=before.table.num_rows - len(pairs),
        num_unpaired_after=after.table.num_rows - len(pairs),
        num_prompts_differ=_count_different(
            before, after, (before.prompt_column, after.prompt_column), rows_before, rows_after
        ),
        num_row_params_differ=_count_different(before, after, (PARAMS_NAME, PARAMS_NAME), rows_before, rows_after),
        notes=(*keys.notes, *reference_notes),
    )


def _count_different(
    before: RunOutput, after: RunOutput, columns: tuple[str | None, str | None], rows_before: Rows, rows_after: Rows
) -> int | None:
    """Pairs whose cells differ; None unless both files have the column."""
    mine, theirs = columns
    if mine not in before.input_columns or theirs not in after.input_columns:
        return None
    cells_before = cell_keys(before.table.column(mine).take(rows_before))
    cells_after = cell_keys(after.table.column(theirs).take(rows_after))
    return sum(a is not b and a != b for a, b in zip(cells_before, cells_after, strict=True))


def _ids(run: RunOutput, rows: Rows) -> list[Any]:
    if run.id_column is not None:
        return run.table.column(run.id_column).take(rows).to_pylist()
    return np.array(row_numbers(sample_indices(run)), dtype=np.int64)[rows].tolist()


def _references(
    before: RunOutput, after: RunOutput, rows_before: Rows, rows_after: Rows, name: str | None
) -> tuple[list[str | None] | None, str | None, list[str]]:
    """The reference texts, their column, notes. A row whose two sides have different references has none."""
    is_named = name is not None
    name = name or REFERENCE_NAME
    if name not in before.input_columns:
        if is_named:
            columns = ", ".join(before.input_columns)
            raise InputError(
                f"--reference-column {name}: {before.identity.path} has no such column. Columns: {columns}"
            )
        return None, None, []
    type_ = before.table.schema.field(name).type
    if not _is_plain(type_):
        if is_named:
            raise InputError(f"--reference-column {name}: the column must hold text or numbers, not {type_}")
        return None, None, []
    references = _as_texts(before.table.column(name).take(rows_before))
    if name not in after.input_columns:
        return references, name, []
    theirs = _as_texts(after.table.column(name).take(rows_after))
    num_different = 0
    for row, other in enumerate(theirs):
        if references[row] != other:
            references[row] = None
            num_different += 1
    note = f"{num_different} rows have another reference before than after: they are left out of what needs one"
    return references, name, [note] if num_different else []


def _is_plain(type_: pa.DataType) -> bool:
    import pyarrow.types as pt

    from batchinfer.dataset.row_params import is_text

    return is_text(type_) or bool(pt.is_integer(type_) or pt.is_floating(type_) or pt.is_boolean(type_))


def _as_texts(column: pa.ChunkedArray) -> list[str | None]:
    return [None if value is None else str(value) for value in column.to_pylist()]


def _clusters(inputs: pa.Table, prompt_index: Rows, name: str | None, run: RunOutput) -> Rows:
    keys: list[Hashable]
    if run.prompt_column is not None:
        keys = [("prompt", key) for key in cell_keys(inputs.column(run.prompt_column))]
    else:
        keys = [("row", int(index)) for index in prompt_index]
    if name is not None:
        if name not in inputs.column_names:
            columns = ", ".join(inputs.column_names)
            raise InputError(f"--cluster-column {name}: {run.identity.path} has no such column. Columns: {columns}")
        values = cell_keys(inputs.column(name))
        keys = [keys[row] if value is None else ("value", value) for row, value in enumerate(values)]
    place: dict[Hashable, int] = {}
    return np.array([place.setdefault(key, len(place)) for key in keys], dtype=np.int64)


def _side(run: RunOutput, rows: Rows) -> Side:
    def values(name: str) -> list[Any]:
        column = run.result(name)
        return [None] * len(rows) if column is None else column.take(rows).to_pylist()

    texts = values("output")
    token_ids = run.result("output_token_ids")
    logprobs = run.result("logprobs")
    ids = None if token_ids is None else Picked(ListColumn(token_ids, np.dtype(np.int32)), rows)
    return Side(
        texts=texts,
        finish_reasons=values("finish_reason"),
        errors=[_error_text(error) for error in values("error")],
        num_output_tokens=_num_output_tokens(values("num_output_tokens"), ids),
        token_ids=ids,
        logprobs=None if logprobs is None else Picked(ListColumn(logprobs, np.dtype(np.float32)), rows),
        run=run.identity,
    )


def _error_text(error: Any) -> str | None:
    if error is None:
        return None
    return f"{error.get('code')}" if isinstance(error, dict) else str(error)


def _num_output_tokens(counts: Sequence[int | None], ids: Picked | None) -> Rows:
    result = np.full(len(counts), -1, dtype=np.int64)
    for row, count in enumerate(counts):
        found = count if count is not None or ids is None else _length(ids[row])
        if found is not None:
            result[row] = found
    return result


def _length(values: npt.NDArray[np.int32] | None) -> int | None:
    return None if values is None else len(values)
