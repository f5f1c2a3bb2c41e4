"""Estimators of divergence and importance ratios against values known by heart, and against what they estimate."""

from __future__ import annotations

import numpy as np
import pytest

from batchinfer.evals.metrics.policy import RatioStatistics, k1, k3


def test_values() -> None:
    own, other = np.log([0.5, 0.25]), np.log([0.25, 0.5])
    assert k1(own, other) == pytest.approx([np.log(2), -np.log(2)])
    assert k3(own, other) == pytest.approx([0.5 - 1 + np.log(2), 2 - 1 - np.log(2)])
    assert (k3(own, own) == 0).all()


def test_estimators_are_unbiased_and_k3_is_the_steadier() -> None:
    """Over all outcomes, weighted by p, both give KL(p || q); k3 varies less where the two are near."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(50))
    q = p * np.exp(0.3 * rng.normal(size=50))
    q /= q.sum()
    log_p, log_q = np.log(p), np.log(q)
    kl = float((p * (log_p - log_q)).sum())
    for estimator in (k1, k3):
        assert float((p * estimator(log_p, log_q)).sum()) == pytest.approx(kl, rel=1e-9)
    spread = [float((p * (estimator(log_p, log_q) - kl) ** 2).sum()) for estimator in (k1, k3)]
    assert spread[1] < spread[0] / 2
    assert (k3(log_p, log_q) >= 0).all()
    assert (k1(log_p, log_q) < 0).any()


def test_ratio_statistics() -> None:
    same = RatioStatistics.of(np.zeros(10))
    assert same == RatioStatistics(10, 1.0, 0.0, 10.0)
    found = RatioStatistics.of(np.log([1.0, 1.1, 1.3, 0.6]))
    assert found is not None
    assert found.mean == pytest.approx(1.0)
    assert found.clip_rate == 0.5
    assert found.effective_sample_size == pytest.approx(16 / (1 + 1.21 + 1.69 + 0.36))
    assert RatioStatistics.of(np.empty(0)) is None


def test_one_weight_that_outweighs_all_is_one_sample() -> None:
    found = RatioStatistics.of(np.array([900.0, 0.0, -3.0]))
    assert found is not None
    assert found.effective_sample_size == pytest.approx(1)
    assert found.mean == np.inf
