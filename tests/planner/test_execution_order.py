from __future__ import annotations

import numpy as np
import pytest

from batchinfer.planner.order import execution_order
from batchinfer.planner.prefix_tree import PrefixTree, build_prefix_tree


@pytest.fixture
def tree() -> PrefixTree:
    rows = [[2, 1], [1, 5], [2, 1, 0], [1], [2, 1]]
    return build_prefix_tree([np.array(row, np.int32) for row in rows])


def test_prefix_is_depth_first(tree: PrefixTree) -> None:
    assert execution_order(tree, "prefix").tolist() == [3, 1, 0, 4, 2]


def test_fcfs_is_input_order(tree: PrefixTree) -> None:
    assert execution_order(tree, "fcfs", [0, 1, 2, 3, 4]).tolist() == [0, 1, 2, 3, 4]


def test_priority_is_highest_first_then_depth_first(tree: PrefixTree) -> None:
    assert execution_order(tree, "priority", [0.0, 1.0, 0.0, 0.0, float("inf")]).tolist() == [4, 1, 3, 0, 2]
    assert execution_order(tree, "priority", np.array([-1.0, -2.0, -1.0, -1.0, -1.0])).tolist() == [3, 0, 4, 2, 1]
    assert execution_order(tree, "priority").tolist() == [3, 1, 0, 4, 2]


@pytest.mark.parametrize("policy", ["prefix", "fcfs", "priority"])
def test_result_is_a_copy_of_int32(tree: PrefixTree, policy: str) -> None:
    order = execution_order(tree, policy)  # type: ignore[arg-type]
    assert order.dtype == np.int32
    order[:] = 0
    assert tree.order.tolist() == [3, 1, 0, 4, 2]


def test_bad_arguments_are_refused(tree: PrefixTree) -> None:
    with pytest.raises(ValueError, match="priority of row 2 is NaN"):
        execution_order(tree, "priority", [0, 1, float("nan"), 0, 0])
    with pytest.raises(ValueError, match="5 rows, priorities of shape"):
        execution_order(tree, "priority", [0.0, 1.0])
    with pytest.raises(ValueError, match="'random'"):
        execution_order(tree, "random")  # type: ignore[arg-type]
