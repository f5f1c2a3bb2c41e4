"""Figures of tokens -> a curve along the output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from batchinfer.evals.result import Series

#: Points of a curve at most; longer outputs are cut into as many ranges of positions.
MAX_POINTS = 40
#: Half of the width of a 95 % band, in standard errors.
_Z = 1.96


def by_position(name: str, rows: Sequence[npt.NDArray[np.float64]]) -> Series:
    """Mean of the rows' figures in each range of positions, with a 95 % band of the normal approximation.

    A row counts once in a range, with its own mean there: tokens of one output are not independent. A range
    with fewer than two rows has no band.
    """
    longest = max((len(row) for row in rows), default=0)
    edges = np.unique(np.linspace(0, longest, min(longest, MAX_POINTS) + 1).astype(np.int64))
    x, y, low, high = [], [], [], []
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        means = np.array([row[begin:end].mean() for row in rows if len(row) > begin])
        middle = float(means.mean())
        margin = _Z * float(means.std(ddof=1)) / len(means) ** 0.5 if len(means) > 1 else None
        x.append((begin + end - 1) / 2)
        y.append(middle)
        low.append(None if margin is None else middle - margin)
        high.append(None if margin is None else middle + margin)
    return Series(name, tuple(x), tuple(y), tuple(low), tuple(high))
