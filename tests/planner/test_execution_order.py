from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_the_longest_output_goes_first_among_siblings_and_subtrees_stay_whole(tree: PrefixTree) -> None:
    # Below the root: {3: [1], 1: [1, 5]} and {0: [2, 1], 4: [2, 1], 2: [2, 1, 0]}.
    assert execution_order(tree, "prefix", limits=[1, 1, 1, 1, 1]).tolist() == [3, 1, 0, 4, 2]
    assert execution_order(tree, "prefix", limits=[1, 5, 9, 1, 2]).tolist() == [2, 4, 0, 1, 3]
    assert execution_order(tree, "prefix", limits=[3, 7, 3, 7, 4]).tolist() == [3, 1, 4, 0, 2]
    assert execution_order(tree, "priority", [0, 1, 0, 1, 0], limits=[1, 5, 9, 1, 2]).tolist() == [1, 3, 2, 4, 0]
    assert execution_order(tree, "fcfs", limits=[1, 5, 9, 1, 2]).tolist() == [0, 1, 2, 3, 4]


token = st.sampled_from([0, 1, 2])


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(st.lists(token, max_size=6), st.integers(1, 9)), min_size=1, max_size=25))
def test_rows_of_every_node_stay_together_sorted_by_the_longest_output(rows: list[tuple[list[int], int]]) -> None:
    tree = build_prefix_tree([np.array(ids, np.int32) for ids, _ in rows])
    limits = [limit for _, limit in rows]
    order = execution_order(tree, "prefix", limits=limits).tolist()
    assert sorted(order) == list(range(len(rows)))
    place = {row: at for at, row in enumerate(order)}
    begins: dict[int, list[tuple[int, int]]] = {}
    for node in range(tree.num_nodes):
        below = tree.order[tree.row_begin[node] : tree.row_end[node]].tolist()
        at = sorted(place[row] for row in below)
        assert at == list(range(at[0], at[0] + len(at))), "one run of consecutive rows"
        if node:
            begins.setdefault(int(tree.parent[node]), []).append((at[0], max(limits[row] for row in below)))
    for row, node in enumerate(tree.node_of_row.tolist()):
        begins.setdefault(node, []).append((place[row], limits[row]))
    for siblings in begins.values():
        longest = [limit for _, limit in sorted(siblings)]
        assert longest == sorted(longest, reverse=True)
