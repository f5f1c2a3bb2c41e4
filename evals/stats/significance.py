"""McNemar, Wilcoxon, Holm, and how small a difference could have been found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchinfer.evals.stats.bootstrap import Floats

#: Up to this many discordant pairs McNemar's test is exact.
MAX_EXACT_DISCORDANT = 1_000


@dataclass(frozen=True, slots=True)
class McNemar:
    """Attributes:
    num_only_before, num_only_after: discordant pairs, true on one side only.
    """

    p_value: float
    num_only_before: int
    num_only_after: int
    is_exact: bool


def mcnemar(before: Floats, after: Floats) -> McNemar:
    """Two-sided p-value that as many pairs change from 1 to 0 as from 0 to 1.

    McNemar 1947, Note on the sampling error of the difference between correlated proportions. The
    discordant pairs are a fair coin's under the null hypothesis: exactly binomial for up to
    MAX_EXACT_DISCORDANT of them, else chi² with Edwards' continuity correction (Edwards 1948),
    (|b - c| - 1)² / (b + c). Without discordant pairs p is 1. Pairs must be independent.
    """
    from scipy import stats

    only_before = int(np.sum((before == 1) & (after == 0)))
    only_after = int(np.sum((before == 0) & (after == 1)))
    discordant = only_before + only_after
    if discordant == 0:
        return McNemar(1.0, 0, 0, True)
    if discordant <= MAX_EXACT_DISCORDANT:
        p_value = float(stats.binomtest(only_before, discordant, 0.5).pvalue)
        return McNemar(p_value, only_before, only_after, True)
    chi2 = max(abs(only_before - only_after) - 1, 0) ** 2 / discordant
    return McNemar(float(stats.chi2.sf(chi2, 1)), only_before, only_after, False)


def wilcoxon_signed_rank(differences: Floats) -> float:
    """Two-sided p-value that differences are symmetric about 0. Zeros are dropped; pairs must be independent.

    Wilcoxon 1945, Individual comparisons by ranking methods; scipy.stats.wilcoxon chooses between the
    exact distribution and the normal one. Without a difference other than 0 p is 1.
    """
    from scipy import stats

    if not np.any(differences != 0):
        return 1.0
    return float(stats.wilcoxon(differences, zero_method="wilcox", method="auto").pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: the chance of any false finding among all tests stays below the level.

    Holm 1979, A simple sequentially rejective multiple test procedure: the i-th smallest of m is multiplied
    by m - i + 1, no value falls below one before it, none exceeds 1. Any dependence between tests is allowed.
    """
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(p_values))
    factors = len(p_values) - np.arange(len(p_values))
    adjusted[order] = np.minimum(np.maximum.accumulate(np.asarray(p_values, dtype=float)[order] * factors), 1.0)
    return [float(value) for value in adjusted]


def min_detectable_effect(standard_error: float, *, level: float = 0.05, power: float = 0.8) -> float:
    """The true difference that a two-sided test at `level` finds with probability `power`: (z_level/2 + z_power) SE.

    Bloom 1995, Minimum detectable effects. 2.80 standard errors at the defaults.
    """
    from scipy.special import ndtri

    return float((ndtri(1 - level / 2) + ndtri(power)) * standard_error)


def largest_unseen_share(num_clusters: int, confidence: float = 0.95) -> float:
    """Where none of `num_clusters` differs: the largest share that could differ in what they were drawn from.

    1 - (1 - confidence)^(1 / n), about 3 / n (Hanley and Lippman-Hand 1983, If nothing goes wrong, is
    everything all right?).
    """
    return float(1 - (1 - confidence) ** (1 / num_clusters))
