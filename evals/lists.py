"""Columns of number lists, seen row by row as numpy arrays without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from batchinfer.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa


class ListColumn:
    """`column[row]` is an array of `dtype`, or None where the list is null. A null in a list of floats is NaN."""

    def __init__(self, column: pa.ChunkedArray, dtype: np.dtype[Any]) -> None:
        import pyarrow as pa

        try:
            lists = column.cast(pa.large_list(pa.from_numpy_dtype(dtype))).combine_chunks()
        except pa.ArrowException as error:
            raise InputError(f"a column of token ids or logprobs has type {column.type}: {error}") from error
        if isinstance(lists, pa.ChunkedArray):  # what combine_chunks makes of a column without chunks
            lists = pa.concat_arrays(lists.chunks) if lists.num_chunks else pa.array([], lists.type)
        if np.issubdtype(dtype, np.integer) and lists.flatten().null_count:
            raise InputError("a column of token ids has a null in a list")
        self._offsets = lists.offsets.to_numpy()
        self._values = lists.values.to_numpy(zero_copy_only=False)
        self._is_null = lists.is_null().to_numpy(zero_copy_only=False)

    def __len__(self) -> int:
        return len(self._is_null)

    def __getitem__(self, row: int) -> npt.NDArray[Any] | None:
        if self._is_null[row]:
            return None
        return self._values[self._offsets[row] : self._offsets[row + 1]]


class Picked(Sequence[Any]):
    """Some rows of a ListColumn, in any order."""

    def __init__(self, column: ListColumn, rows: npt.NDArray[np.int64]) -> None:
        self._column = column
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Picked(self._column, self._rows[index])
        return self._column[int(self._rows[index])]
