"""The sign-flip test of a paired difference, flipping whole clusters."""

from __future__ import annotations

import numpy as np

from batchinfer.evals.stats.bootstrap import Floats, Statistic, merge_at_random

NUM_FLIPS = 9_999
_CHUNK_ELEMENTS = 8_000_000


def sign_flip_test(
    before: Floats, after: Floats, statistic: Statistic, rng: np.random.Generator, *, num_flips: int = NUM_FLIPS
) -> float:
    """Two-sided p-value that before and after are exchangeable within each cluster.

    Fisher's randomization test for pairs (Fisher 1935, The Design of Experiments, 21; Good 2005, Permutation,
    Parametric and Bootstrap Tests of Hypotheses, 3.2): under the null hypothesis the two sides of a cluster may be
    swapped, which for plain means flips the sign of its difference. All swaps are enumerated if there are at
    most `num_flips`; else p = (1 + hits) / (1 + num_flips) over random ones (Phipson and Smyth 2010,
    Permutation p-values should never be zero), so it is never below 1 / (1 + num_flips).

    Args:
        before, after: [num_clusters, num_sums] each cluster's sums.
        statistic: of totals [..., 2 * num_sums], before's then after's -> [..., 1]; changes its sign with a swap.
    """
    num_sums = before.shape[1]
    joint = merge_at_random(np.hstack([before, after]), rng)
    totals = joint.sum(axis=0)
    delta = joint[:, num_sums:] - joint[:, :num_sums]
    delta = delta[np.any(delta != 0, axis=1)]  # swapping equal sides changes nothing
    observed = abs(float(statistic(totals)[..., 0]))
    if len(delta) == 0 or not np.isfinite(observed):
        return 1.0 if len(delta) == 0 else float("nan")
    is_exact = 2 ** min(len(delta), 60) <= num_flips
    moved = _all_swaps(delta) if is_exact else _random_swaps(delta, rng, num_flips)
    swapped = totals + np.hstack([moved, -moved])
    values = np.abs(statistic(swapped)[..., 0])
    hits = int(np.sum(values >= observed * (1 - 1e-9)))
    return hits / len(values) if is_exact else (1 + hits) / (1 + num_flips)


def _all_swaps(delta: Floats) -> Floats:
    num = len(delta)
    bits = (np.arange(2**num)[:, None] >> np.arange(num)) & 1
    return bits @ delta


def _random_swaps(delta: Floats, rng: np.random.Generator, num_flips: int) -> Floats:
    """[num_flips, num_sums] what each random choice of swaps adds to before and takes from after."""
    distinct, counts = np.unique(delta, axis=0, return_counts=True)
    if len(distinct) * 10 <= len(delta):
        return rng.binomial(counts, 0.5, size=(num_flips, len(distinct))) @ distinct
    moved = np.empty((num_flips, delta.shape[1]))
    chunk = max(1, _CHUNK_ELEMENTS // len(delta))
    for start in range(0, num_flips, chunk):
        size = min(chunk, num_flips - start)
        flips = rng.integers(0, 2, size=(size, len(delta)), dtype=np.int8)
        moved[start : start + size] = flips.astype(np.float64) @ delta
    return moved
