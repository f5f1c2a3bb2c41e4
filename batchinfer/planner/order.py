"""The order in which the rows of a window are started."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from batchinfer.config import Policy
from batchinfer.planner.prefix_tree import PrefixTree


def execution_order(
    tree: PrefixTree, policy: Policy, priorities: Sequence[float] | npt.NDArray[np.float64] | None = None
) -> npt.NDArray[np.int32]:
    """Row indices [R] in the order of admission.

    "prefix": depth-first through the tree, so that a span is needed by consecutive rows; "fcfs": as
    they came; "priority": by `priorities` [R], highest first, and depth-first among equal ones
    (without priorities all are equal). Raises ValueError naming the row of a NaN priority, and
    for an unknown policy.
    """
    if policy == "prefix":
        return tree.order.copy()
    if policy == "fcfs":
        return np.arange(tree.num_rows, dtype=np.int32)
    if policy != "priority":
        raise ValueError(f"policy must be one of prefix, fcfs, priority, got {policy!r}")
    if priorities is None:
        return tree.order.copy()
    values = np.asarray(priorities, np.float64)
    if values.shape != (tree.num_rows,):
        raise ValueError(
            f"there must be one priority per row: {tree.num_rows} rows, priorities of shape {values.shape}"
        )
    if np.isnan(values).any():
        raise ValueError(f"the priority of row {int(np.isnan(values).argmax())} is NaN; give every row a number")
    return tree.order[np.argsort(-values[tree.order], kind="stable")]
