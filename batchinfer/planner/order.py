"""The order in which the rows of a window are started."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from batchinfer.config import Policy
from batchinfer.planner.prefix_tree import PrefixTree


def execution_order(
    tree: PrefixTree,
    policy: Policy,
    priorities: Sequence[float] | npt.NDArray[np.float64] | None = None,
    limits: Sequence[int] | npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int32]:
    """Row indices [R] in the order of admission.

    "prefix": depth-first through the tree, so that a span is needed by consecutive rows. Of the rows and
    subtrees below one node the one with the longest output goes first, by `limits` [R] on the tokens that
    each row generates (without limits all are equal): what starts last decides how long the batch runs
    half empty at the end. "fcfs": as they came; "priority": by `priorities` [R], highest first, and as
    "prefix" among equal ones (without priorities all are equal). Raises ValueError naming the row of a NaN
    priority, and for an unknown policy.
    """
    if policy == "prefix":
        return _depth_first(tree, limits)
    if policy == "fcfs":
        return np.arange(tree.num_rows, dtype=np.int32)
    if policy != "priority":
        raise ValueError(f"policy must be one of prefix, fcfs, priority, got {policy!r}")
    order = _depth_first(tree, limits)
    if priorities is None:
        return order
    values = np.asarray(priorities, np.float64)
    if values.shape != (tree.num_rows,):
        raise ValueError(
            f"there must be one priority per row: {tree.num_rows} rows, priorities of shape {values.shape}"
        )
    if np.isnan(values).any():
        raise ValueError(f"the priority of row {int(np.isnan(values).argmax())} is NaN; give every row a number")
    return order[np.argsort(-values[order], kind="stable")]


def _depth_first(tree: PrefixTree, limits: Sequence[int] | npt.NDArray[np.int64] | None) -> npt.NDArray[np.int32]:
    if limits is None or len(limits) < 2 or min(limits) == max(limits):
        return tree.order.copy()
    longest = [0] * tree.num_nodes  # of the rows below and at each node
    below: list[list[tuple[int, int, int]]] = [[] for _ in longest]  # (-longest, place, row, or -node for a subtree)
    for place, row in enumerate(tree.order.tolist()):
        node = int(tree.node_of_row[row])
        longest[node] = max(longest[node], int(limits[row]))
        below[node].append((-int(limits[row]), place, row))
    parents, places = tree.parent.tolist(), tree.row_begin.tolist()
    for node in range(tree.num_nodes - 1, 0, -1):  # a parent comes before its children
        longest[parents[node]] = max(longest[parents[node]], longest[node])
        below[parents[node]].append((-longest[node], places[node], -node))
    order: list[int] = []
    stack = sorted(below[0], reverse=True)
    while stack:
        _, _, which = stack.pop()
        if which >= 0:
            order.append(which)
        else:
            stack += sorted(below[-which], reverse=True)
    return np.array(order, dtype=np.int32)
