"""Intervals of shares with few events, where the bootstrap's are too short.

With 5 discordant pairs among 256 the 95 % BCa interval of a difference of shares covered the truth in
91 of 100 simulations, with 20 or more in 94 to 96; with none it is a point. Below FEW_EVENTS these
closed forms are used instead. Rows must be independent.
"""

from __future__ import annotations

import math
from typing import NamedTuple

FEW_EVENTS = 20


class Bounds(NamedTuple):
    low: float
    high: float


def wilson(num_true: int, num: int, confidence: float = 0.95) -> Bounds:
    """Interval of a share (Wilson 1927, Probable inference, the law of succession, and statistical inference)."""
    from scipy.stats import binomtest

    interval = binomtest(num_true, num).proportion_ci(confidence, method="wilson")
    return Bounds(float(interval.low), float(interval.high))


def bonett_price(num_only_before: int, num_only_after: int, num: int, confidence: float = 0.95) -> Bounds:
    """Interval of share after - share before over `num` pairs, from the two counts of discordant pairs.

    Bonett and Price 2012, Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data, equation 2: Wald's with one more discordant pair of each kind.
    """
    from scipy.special import ndtri

    before = (num_only_before + 1) / (num + 2)
    after = (num_only_after + 1) / (num + 2)
    difference = after - before
    width = float(ndtri(0.5 + confidence / 2)) * math.sqrt((after + before - difference**2) / (num + 2))
    return Bounds(max(-1.0, difference - width), min(1.0, difference + width))
