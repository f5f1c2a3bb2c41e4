"""What log-probabilities of the same tokens under two policies say: estimates of their divergence, and ratios."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: PPO's epsilon (Schulman et al. 2017, section 3): ratios outside 1 +- this are clipped.
CLIP = 0.2


def k1(own: Floats, other: Floats) -> Floats:
    """log p - log q of tokens sampled from p: its mean estimates KL(p || q) without bias, and may be negative.

    Schulman 2020, Approximating KL Divergence (joschu.net/blog/kl-approx.html), estimator k1.

    Args:
        own: log-probabilities under p, which sampled the tokens; other: under q.
    """
    return own - other


def k3(own: Floats, other: Floats) -> Floats:
    """r - 1 - log r with r = q / p, of tokens sampled from p: estimates KL(p || q) without bias, and never negative.

    Schulman 2020, estimator k3. Args as k1.
    """
    log_ratio = other - own
    return np.expm1(log_ratio) - log_ratio


@dataclass(frozen=True, slots=True)
class RatioStatistics:
    """Of importance ratios w = after / before, of tokens or outputs sampled from before.

    Attributes:
        num: ratios.
        mean: 1 in expectation; far from it, few samples carry the weight.
        clip_rate: share outside 1 +- CLIP.
        effective_sample_size: (sum w)^2 / sum w^2 (Kong 1992; Owen 2013, Monte Carlo, 9.3), between 1 and num.
    """

    num: int
    mean: float
    clip_rate: float
    effective_sample_size: float

    @classmethod
    def of(cls, log_ratios: Floats) -> RatioStatistics | None:
        """None without ratios."""
        if not len(log_ratios):
            return None
        # Scaling cancels in the sample size; sums of exp of large numbers would not be finite.
        scaled = np.exp(log_ratios - log_ratios.max())
        with np.errstate(over="ignore"):
            ratios = np.exp(log_ratios)
        return cls(
            num=len(ratios),
            mean=float(ratios.mean()),
            clip_rate=float((np.abs(ratios - 1) > CLIP).mean()),
            effective_sample_size=float(scaled.sum() ** 2 / (scaled**2).sum()),
        )
