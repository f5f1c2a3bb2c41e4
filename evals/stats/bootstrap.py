"""95 % intervals by the bootstrap over clusters: BCa, with an expansion for few clusters.

A statistic is a function of *totals*, such as Σ w·v / Σ w after minus the same before. So all that
is needed of a cluster is its row of sums, a resample is a weighted sum of these rows, and leaving a
cluster out (the jackknife) is a subtraction. scipy.stats.bootstrap knows BCa too, but takes each
statistic by itself and computes the jackknife in O(n²); the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: totals [..., num_sums] -> statistics [..., num_statistics]
Statistic = Callable[[Floats], Floats]

NUM_RESAMPLES = 9_999
#: With many clusters, whose mean is nearly normal, fewer resamples do: about this many draws, at least 2,000 resamples.
MAX_DRAWS = 20_000_000
_MIN_RESAMPLES = 2_000
#: More clusters than this are merged at random into as many groups, so that time does not grow with the data.
MAX_CLUSTERS = 20_000

_CHUNK_ELEMENTS = 65_536  # counts of a chunk of resamples stay in the cache


@dataclass(frozen=True, slots=True)
class Interval:
    """One statistic. `low` and `high` are NaN where it has no interval, `standard_error` then too.

    Where every resample gives the same value, the interval is that point.
    """

    value: float
    low: float
    high: float
    standard_error: float


def bca_intervals(
    sums: Floats,
    statistic: Statistic,
    rng: np.random.Generator,
    *,
    confidence: float = 0.95,
    num_resamples: int | None = None,
) -> list[Interval]:
    """An interval for each statistic of the column totals of `sums`.

    Bias-corrected and accelerated bootstrap (Efron 1987, Better Bootstrap Confidence Intervals; Efron and
    Tibshirani 1993, An Introduction to the Bootstrap, 14.3): with z0 from the share of resamples below the value
    and a = Σ d³ / 6 (Σ d²)^1.5 from the leave-one-cluster-out values, the ends are the quantiles
    Φ(z0 + (z0 + z) / (1 - a (z0 + z))). For few clusters z is not the normal quantile but
    sqrt(n / (n - 1)) times Student's with n - 1 degrees of freedom (Hesterberg 2015, What Teachers Should Know
    About the Bootstrap, 5.3, the expanded interval), since resamples vary too little by that factor.

    Args:
        sums: [num_clusters, num_sums]; clusters are resampled as wholes (Davison and Hinkley 1997, 3.8).
        statistic: vectorised; NaN where it is undefined, such as a mean over no weight. Undefined resamples are
            left out.
        num_resamples: None: NUM_RESAMPLES, fewer above MAX_DRAWS.
    Fewer than two clusters have no interval.
    """
    sums = merge_at_random(np.asarray(sums, dtype=np.float64), rng)
    num_clusters = len(sums)
    total = sums.sum(axis=0)
    values = statistic(total)
    if num_clusters < 2:
        return [Interval(float(value), np.nan, np.nan, np.nan) for value in values]
    if num_resamples is None:
        num_resamples = min(NUM_RESAMPLES, max(_MIN_RESAMPLES, MAX_DRAWS // num_clusters))
    resampled = statistic(resampled_totals(sums, rng, num_resamples))
    left_out = statistic(total - sums)
    z = _expanded_quantile((1 - confidence) / 2, num_clusters)
    return [
        _bca(float(values[i]), resampled[:, i], left_out[:, i], z) if np.isfinite(values[i]) else _undefined(values[i])
        for i in range(len(values))
    ]


def merge_at_random(sums: Floats, rng: np.random.Generator, max_clusters: int = MAX_CLUSTERS) -> Floats:
    """At most `max_clusters` rows, with the same totals and, in expectation, the same variance of the total.

    The method of random groups (Wolter 2007, Introduction to Variance Estimation, chapter 2).
    """
    if len(sums) <= max_clusters:
        return sums
    group = rng.permutation(len(sums)) % max_clusters
    merged = np.zeros((max_clusters, sums.shape[1]))
    np.add.at(merged, group, sums)
    return merged


def resampled_totals(sums: Floats, rng: np.random.Generator, num_resamples: int) -> Floats:
    """[num_resamples, num_sums] totals of as many clusters, drawn with replacement."""
    num = len(sums)
    distinct, counts = np.unique(sums, axis=0, return_counts=True)
    if len(distinct) * 10 <= num:  # right or wrong answers: a few kinds of rows, and how many of each is multinomial
        return rng.multinomial(num, counts / num, size=num_resamples) @ distinct
    totals = np.empty((num_resamples, sums.shape[1]))
    chunk = max(1, _CHUNK_ELEMENTS // num)
    for start in range(0, num_resamples, chunk):
        size = min(chunk, num_resamples - start)
        picks = rng.integers(0, num, size=(size, num)) + np.arange(size)[:, None] * num
        how_often = np.bincount(picks.ravel(), minlength=size * num).reshape(size, num)
        totals[start : start + size] = how_often.astype(np.float64) @ sums
    return totals


def _bca(value: float, resampled: Floats, left_out: Floats, z: float) -> Interval:
    from scipy.special import ndtr, ndtri

    resampled = resampled[np.isfinite(resampled)]
    if len(resampled) < 2:
        return _undefined(value)
    if np.ptp(resampled) <= 1e-12 * max(1.0, abs(value)):
        return Interval(value, value, value, 0.0)
    num = len(resampled)
    # Half of the ties count as below: means of few or of whole numbers hit the value itself often.
    tolerance = 1e-12 * max(1.0, abs(value))
    is_equal = np.abs(resampled - value) <= tolerance
    below = (np.sum((resampled < value) & ~is_equal) + 0.5 * np.sum(is_equal)) / num
    z0 = ndtri(np.clip(below, 0.5 / num, 1 - 0.5 / num))
    left_out = left_out[np.isfinite(left_out)]
    deviations = left_out.mean() - left_out if len(left_out) else np.zeros(1)
    spread = np.sum(deviations**2)
    acceleration = np.sum(deviations**3) / (6 * spread**1.5) if spread > 0 else 0.0
    levels = []
    for end in (-abs(z), abs(z)):
        shift = z0 + end
        scale = 1 - acceleration * shift
        levels.append(float(ndtr(z0 + shift / scale)) if scale > 0 else float(shift > 0))
    low, high = np.quantile(resampled, levels)
    return Interval(value, float(low), float(high), float(np.std(resampled, ddof=1)))


def _expanded_quantile(tail: float, num_clusters: int) -> float:
    from scipy.special import stdtrit

    return float(np.sqrt(num_clusters / (num_clusters - 1)) * stdtrit(num_clusters - 1, tail))


def _undefined(value: float) -> Interval:
    return Interval(float(value), np.nan, np.nan, np.nan)
