"""pass@k and maj@k of a prompt from its n samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from math import comb

import numpy as np

#: Up to this many choices of k samples maj@k goes through all of them, else through as many random ones.
MAX_SUBSETS = 2_000


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement from the n at hand, is correct.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021, Evaluating Large Language
    Models Trained on Code, equation 1. Exact integers, so any n. Raises ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be between 1 and the number of samples {num_samples}, got {k}")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"of {num_samples} samples {num_correct} cannot be correct")
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_at_k(answers: Sequence[Hashable], is_correct: Sequence[bool], k: int, rng: np.random.Generator) -> float:
    """Chance that the most frequent answer among k of the samples, drawn without replacement, is correct.

    Self-consistency (Wang et al. 2022). Ties are broken by a fair draw, which is taken in expectation:
    of two tied answers, one of them correct, the value is 0.5. An answer of None (nothing found) has no
    vote; if no sample votes the value is 0. Mean over all choices of k samples, or over MAX_SUBSETS
    random ones where there are more.
    """
    num = len(answers)
    if not 1 <= k <= num:
        raise ValueError(f"k must be between 1 and the number of samples {num}, got {k}")
    correct = {answer for answer, right in zip(answers, is_correct, strict=True) if right and answer is not None}
    return float(np.mean([_vote([answers[i] for i in chosen], correct) for chosen in _subsets(num, k, rng)]))


def _subsets(num: int, k: int, rng: np.random.Generator) -> Iterable[Sequence[int]]:
    if comb(num, k) <= MAX_SUBSETS:
        return combinations(range(num), k)
    return (rng.choice(num, size=k, replace=False).tolist() for _ in range(MAX_SUBSETS))


def _vote(answers: Sequence[Hashable], correct: set[Hashable]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = [answer for answer, count in votes.items() if count == most]
    return sum(answer in correct for answer in tied) / len(tied)
