"""Curves along the output."""

from __future__ import annotations

import numpy as np
import pytest

from batchinfer.evals.metrics.positions import MAX_POINTS, by_position


def test_short_outputs_have_a_point_for_each_token() -> None:
    series = by_position("kl", [np.array([1.0, 3.0]), np.array([2.0, 5.0, 7.0])])
    assert series.x == (0, 1, 2)
    assert series.y == (1.5, 4, 7)
    assert series.low is not None
    assert series.low[2] is None, "one output has no band"
    assert series.low[0] == pytest.approx(1.5 - 1.96 * 0.5)


def test_long_outputs_are_cut_into_ranges_in_which_each_counts_once() -> None:
    rows = [np.arange(1000.0), np.zeros(10)]
    series = by_position("kl", rows)
    assert len(series.x) == MAX_POINTS
    assert series.x[0] == 12
    assert series.y[0] == (12 + 0) / 2
    assert series.y[-1] == pytest.approx(np.arange(975.0, 1000).mean())


def test_no_output_is_no_point() -> None:
    assert by_position("kl", []).x == ()
    assert by_position("kl", [np.empty(0)]).y == ()
