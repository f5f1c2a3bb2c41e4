"""What makes two rows of two files the same row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.errors import InputError
from batchinfer.evals.run_output import RunOutput

if TYPE_CHECKING:
    import pyarrow as pa


#: One object for all: NaN equals nothing, but containers take an object for equal to itself.
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class RowKeys:
    """For each row of either file the key of its input row, the same for all samples of it.

    Attributes:
        made_of: "column 'id'", "prompt", ..., for people.
    """

    before: list[Hashable]
    after: list[Hashable]
    made_of: str
    notes: tuple[str, ...] = ()


def row_keys(before: RunOutput, after: RunOutput) -> RowKeys:
    """By id; without ids, and where an id occurs twice, by prompt; equal ones by the order in which they come.

    Raises InputError if nothing identifies rows, or if ids of different types cannot meet.
    """
    ids = _common_ids(before, after)
    contents, content_name = _contents(before, after)
    samples = (sample_indices(before), sample_indices(after))
    if ids is None:
        if contents is None:
            return _by_number(before, after, samples)
        keys = [_numbered([(c,) for c in content], sample) for content, sample in zip(contents, samples, strict=True)]
        return RowKeys(keys[0], keys[1], content_name, _notes_on_repeats(contents, samples))
    repeated = {id_ for side, sample in zip(ids, samples, strict=True) for id_ in _repeated(side, sample)}
    keys = []
    for number, (side, sample) in enumerate(zip(ids, samples, strict=True)):
        content = contents[number] if contents is not None else [None] * len(side)
        parts: list[Hashable] = [
            (id_, c) if id_ is None or id_ in repeated else (id_,) for id_, c in zip(side, content, strict=True)
        ]
        keys.append(_numbered(parts, sample))
    return RowKeys(keys[0], keys[1], f"column {before.id_column!r}", _notes_on_ids(ids, repeated, content_name))


def cell_keys(column: pa.ChunkedArray | pa.Array) -> list[Hashable]:
    """Something hashable for each cell, equal for equal values whatever the width of their Arrow types."""
    return [_hashable(value) for value in column.to_pylist()]


def _hashable(value: Any) -> Hashable:
    if isinstance(value, float) and value != value:
        return NAN
    return repr(value) if isinstance(value, (list, dict)) else value


def _common_ids(before: RunOutput, after: RunOutput) -> tuple[list[Hashable], list[Hashable]] | None:
    """None unless both have ids. Raises InputError if their types do not go together."""
    import pyarrow.types as pt

    if before.id_column is None or after.id_column is None:
        return None
    columns = [run.table.column(run.id_column) for run in (before, after)]
    is_whole = [bool(pt.is_integer(column.type)) for column in columns]
    if is_whole[0] != is_whole[1]:
        raise InputError(
            f"ids have type {columns[0].type} in {before.identity.path} "
            f"and {columns[1].type} in {after.identity.path}: no row would find its pair; "
            "convert one of them, or choose another column with --id-column"
        )
    return _ids(columns[0]), _ids(columns[1])


def _ids(column: pa.ChunkedArray) -> list[Hashable]:
    """NaN is what some writers make of a missing number."""
    return [None if key is NAN else key for key in cell_keys(column)]


def _contents(before: RunOutput, after: RunOutput) -> tuple[tuple[list[Hashable], list[Hashable]] | None, str]:
    """What each input row holds, and its name: the prompt, else all input columns that both have."""
    if before.prompt_column is not None and after.prompt_column is not None:
        names = [run.table.column(run.prompt_column) for run in (before, after)]
        return (cell_keys(names[0]), cell_keys(names[1])), "prompt"
    common = [name for name in before.input_columns if name in after.input_columns]
    if not common:
        return None, "nothing"
    rows = [list(zip(*(cell_keys(run.table.column(name)) for name in common), strict=True)) for run in (before, after)]
    return (list(rows[0]), list(rows[1])), f"input columns {', '.join(common)}"


def sample_indices(run: RunOutput) -> list[int]:
    column = run.result("sample_index")
    return [0] * run.table.num_rows if column is None else column.to_pylist()


def _repeated(ids: Iterable[Hashable], samples: Sequence[int]) -> set[Hashable]:
    counts = Counter(zip(ids, samples, strict=True))
    return {id_ for (id_, _), count in counts.items() if count > 1}


def _numbered(keys: Sequence[Hashable], samples: Sequence[int]) -> list[Hashable]:
    """Each key with the number of its occurrence among those with the same sample index."""
    seen: Counter[tuple[Hashable, int]] = Counter()
    numbered: list[Hashable] = []
    for key, sample in zip(keys, samples, strict=True):
        numbered.append((key, seen[key, sample]))
        seen[key, sample] += 1
    return numbered


def _notes_on_repeats(contents: Sequence[Sequence[Hashable]], samples: Sequence[Sequence[int]]) -> tuple[str, ...]:
    counts = [len(_repeated(content, sample)) for content, sample in zip(contents, samples, strict=True)]
    if not any(counts):
        return ()
    return (
        f"without an id column, {counts[0]} prompts before and {counts[1]} after occur more than once: "
        "their rows were paired in order",
    )


def _notes_on_ids(ids: Sequence[list[Hashable]], repeated: set[Hashable], content_name: str) -> tuple[str, ...]:
    notes = []
    num_null = [side.count(None) for side in ids]
    if any(num_null):
        notes.append(f"{num_null[0]} rows before and {num_null[1]} after have no id: paired by {content_name}")
    named = sorted(repeated - {None}, key=str)
    if named:
        notes.append(
            f"{len(named)} ids occur more than once, such as {named[0]!r}: "
            f"their rows were paired by id and {content_name}, equal ones in order"
        )
    return tuple(notes)


def _by_number(before: RunOutput, after: RunOutput, samples: Sequence[list[int]]) -> RowKeys:
    numbers: list[list[Hashable]] = [list(row_numbers(sample)) for sample in samples]
    if numbers[0][-1:] != numbers[1][-1:]:
        raise InputError(
            f"{before.identity.path} has {before.table.num_rows} rows, {after.identity.path} {after.table.num_rows}, "
            "and neither an id nor an input column tells which belong together: name one with --id-column"
        )
    return RowKeys(numbers[0], numbers[1], "row number", ("rows have no id and no input: paired by their number",))


def row_numbers(samples: Sequence[int]) -> list[int]:
    """The number of the input row, from 0: it grows where the sample index does not."""
    if not len(samples):
        return []
    return (np.cumsum(np.diff(samples, prepend=samples[0]) <= 0) - 1).tolist()
