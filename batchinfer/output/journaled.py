"""The completions of a window as its journal holds them, in the order of the output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.summary import RowCounts
from batchinfer.types import FinishReason

_Places = npt.NDArray[np.int64]


class JournaledResults:
    """Results by row and sample, taken from where they lie when they are asked for.

    Args:
        batches: of a journal; a completion that was written twice counts once.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._batches = batches
        rows, samples = _ints(batches, "row_index"), _ints(batches, "sample_index")
        lengths = np.array([batch.num_rows for batch in batches], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        batch_of = np.repeat(np.arange(len(batches)), lengths)
        order = np.lexsort((samples, rows))  # stable: of equals the first stays the first
        pairs = np.stack([rows[order], samples[order]])
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)
        order = order[is_first]
        self.rows: _Places = rows[order]  # [num_results] row_index, ascending
        self.samples: _Places = samples[order]  # [num_results]
        self.num_samples: _Places = _ints(batches, "num_samples")[order]  # [num_results] that its row gets in all
        self._batch = batch_of[order]
        self._place = order - starts[self._batch] if len(order) else order

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def complete_rows(self) -> _Places:
        """Rows that have all their completions."""
        rows, counts = np.unique(self.rows, return_counts=True)
        first = np.searchsorted(self.rows, rows)
        return rows[counts == self.num_samples[first]]

    def take(self, start: int, stop: int, names: Sequence[str]) -> list[pa.Array]:
        """The results `names` of the entries [start, stop), each an array of its type in the output."""
        batches, places = self._batch[start:stop], self._place[start:stop]
        by_batch = np.argsort(batches, kind="stable")
        borders = np.flatnonzero(np.diff(batches[by_batch])) + 1
        pieces = [
            self._batches[batches[part[0]]].select(names).take(pa.array(places[part]))
            for part in np.split(by_batch, borders)
        ]
        merged = pa.Table.from_batches(pieces).combine_chunks()
        back = np.empty(len(by_batch), dtype=np.int64)
        back[by_batch] = np.arange(len(by_batch))
        in_order = merged.take(pa.array(back)).combine_chunks()
        return [column.chunk(0) for column in in_order.columns]

    def num_bytes(self) -> npt.NDArray[np.int64]:
        """[num_results] about what each takes in Arrow."""
        sizes = [_row_bytes(batch) for batch in self._batches]
        starts = np.cumsum([0, *map(len, sizes)])[:-1]
        flat = np.concatenate(sizes) if sizes else np.empty(0, np.int64)
        return flat[starts[self._batch] + self._place] if len(self) else flat

    def counts(self) -> RowCounts:
        """Of the rows that have all their completions."""
        if not len(self):
            return RowCounts()
        is_counted = np.isin(self.rows, self.complete_rows)
        reasons = self._texts("finish_reason")
        codes = self._texts("error", "code")
        failed: dict[int, str] = {}
        for place in np.flatnonzero(is_counted & (codes != "")):
            failed.setdefault(int(self.rows[place]), codes[place])
        is_cut = is_counted & (reasons == FinishReason.LENGTH.value)
        by_code: dict[str, int] = {}
        for code in failed.values():
            by_code[code] = by_code.get(code, 0) + 1
        return RowCounts(
            num_rows=len(self.complete_rows),
            num_rows_truncated=len(np.unique(self.rows[is_cut])),
            num_completions=int(is_counted.sum()),
            num_output_tokens=int(self._ints("num_output_tokens")[is_counted].sum()),
            failed_by_code=by_code,
        )

    def _ints(self, name: str) -> _Places:
        return self._ordered(_ints(self._batches, name))

    def _texts(self, name: str, child: str | None = None) -> npt.NDArray[np.object_]:
        """[num_results] null is ""."""
        found: list[str] = []
        for batch in self._batches:
            column = batch.column(name)
            column = column if child is None else pc.struct_field(column, child)
            found += [value or "" for value in column.to_pylist()]
        return self._ordered(np.array(found, dtype=np.object_))

    def _ordered(self, values: npt.NDArray) -> npt.NDArray:
        lengths = np.array([batch.num_rows for batch in self._batches], dtype=np.int64)
        return values[(np.cumsum(lengths) - lengths)[self._batch] + self._place]


def _ints(batches: Sequence[pa.RecordBatch], name: str) -> _Places:
    found = [batch.column(name).to_numpy(zero_copy_only=False) for batch in batches]
    return np.concatenate(found).astype(np.int64) if found else np.empty(0, np.int64)


def _row_bytes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """[num_rows] Columns of lists of lists count by their mean."""
    total = np.full(batch.num_rows, 64, dtype=np.int64)
    for column in batch.columns:
        if pa.types.is_string(column.type):
            total += _lengths(pc.binary_length(column))
        elif pa.types.is_list(column.type):
            num_items = len(column.flatten())
            item_bytes = column.flatten().nbytes / num_items if num_items else 0.0
            total += (_lengths(pc.list_value_length(column)) * item_bytes).astype(np.int64)
    return total


def _lengths(lengths: pa.Array) -> npt.NDArray[np.int64]:
    return pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False).astype(np.int64)
