"""Rows repeated, of any type and size."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from batchinfer.output.repeat import repeated_rows


@pytest.mark.parametrize("rows", [[], [0], [0, 1, 2, 3, 4], [0, 0, 2, 4, 4, 4], [3, 3], [1, 2]])
@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_rows_come_as_often_as_listed(rows: list[int], cut: int) -> None:
    table = pa.table(
        {
            "i": range(5),
            "text": ["a", None, "", "d", "e"],
            "view": pa.array(["a", None, "", "d" * 20, "e"], pa.string_view()),
            "views": pa.array([["a"], None, [], [None], ["b" * 20]], pa.list_view(pa.string_view())),
        }
    ).replace_schema_metadata({"k": "v"})
    found = repeated_rows(pa.concat_tables([table.slice(0, cut), table.slice(cut)]), np.array(rows, dtype=np.int64))
    assert found.schema.equals(table.schema, check_metadata=True)
    assert found.to_pylist() == [table.to_pylist()[row] for row in rows]


def test_a_column_of_more_than_two_gib() -> None:
    """Its chunks share their bytes: only what is repeated is copied."""
    chunk = pa.array(["x" * 2**20] * 256)
    table = pa.table({"wide": pa.chunked_array([chunk] * 9), "i": range(9 * 256)})
    with pytest.raises(pa.ArrowInvalid, match="offset overflow"):
        table.take(pa.array([0]))
    rows = np.sort(np.concatenate([np.arange(table.num_rows), [5, 700, 700]]))
    found = repeated_rows(table, rows)
    assert found.column("i").to_pylist() == rows.tolist()
    assert [len(found.column("wide")[place].as_py()) for place in (0, 5, 6, 702, 703, 704)] == [2**20] * 6


def test_a_result_of_more_than_two_gib_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of ten rows in place of 2 GiB."""
    from batchinfer.output import repeat

    take = repeat._take

    def limited(column: pa.Array, rows: np.ndarray) -> pa.Array:
        if len(rows) > 10:
            raise pa.ArrowInvalid("offset overflow")
        return take(column, rows)

    monkeypatch.setattr(repeat, "_take", limited)
    rows = np.repeat(np.arange(7), 5)
    found = repeated_rows(pa.table({"x": [f"{i}" for i in range(7)]}), rows)
    assert found.column("x").to_pylist() == [f"{row}" for row in rows]
    assert found.column("x").num_chunks > 3
