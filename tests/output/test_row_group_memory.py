"""Cutting rows into row groups holds nothing: a job writes more than memory could hold."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from batchinfer.output.row_groups import row_groups


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_table_that_was_cut_is_free_at_once() -> None:
    before = pa.total_allocated_bytes()
    table = pa.table({"x": pa.array([b"x" * 1000] * 1000)})
    assert pa.total_allocated_bytes() - before > 1_000_000
    assert list(row_groups(table, np.arange(1000), np.full(1000, 10))) == [(0, 1000)]
    del table
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_large_rows_are_cut_in_order_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinfer.output.row_groups.GROUP_ROWS", 100)
    table = pa.table({"x": range(1001)})
    ranges = list(row_groups(table, np.arange(1001), np.full(1001, 10)))
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == 1001
    assert max(stop - start for start, stop in ranges) <= 100
