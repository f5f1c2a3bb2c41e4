"""p-values against scipy, statsmodels and counting by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import stats

from batchinfer.evals.stats.permutation import sign_flip_test
from batchinfer.evals.stats.proportions import bonett_price, wilson
from batchinfer.evals.stats.significance import (
    MAX_EXACT_DISCORDANT,
    holm,
    largest_unseen_share,
    mcnemar,
    min_detectable_effect,
    wilcoxon_signed_rank,
)


def difference_of_means(totals: np.ndarray) -> np.ndarray:
    return (totals[..., 2] / totals[..., 3] - totals[..., 0] / totals[..., 1])[..., None]


def sums(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    return np.stack([values, np.ones(len(values)) if weights is None else weights], axis=1)


def flip(before: np.ndarray, after: np.ndarray, seed: int = 0, num_flips: int = 9_999) -> float:
    return sign_flip_test(before, after, difference_of_means, np.random.default_rng(seed), num_flips=num_flips)


def pairs_of(only_before: int, only_after: int, both: int = 10, neither: int = 7) -> tuple[np.ndarray, np.ndarray]:
    before = np.repeat([1.0, 0.0, 1.0, 0.0], [only_before, only_after, both, neither])
    after = np.repeat([0.0, 1.0, 1.0, 0.0], [only_before, only_after, both, neither])
    return before, after


@pytest.mark.parametrize(("only_before", "only_after"), [(0, 0), (1, 0), (3, 12), (40, 61), (700, 650)])
def test_mcnemar_is_statsmodels(only_before: int, only_after: int) -> None:
    contingency_tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    found = mcnemar(*pairs_of(only_before, only_after))
    assert (found.num_only_before, found.num_only_after) == (only_before, only_after)
    assert found.is_exact == (only_before + only_after <= MAX_EXACT_DISCORDANT)
    if only_before + only_after == 0:
        assert found.p_value == 1.0
        return
    table = [[10, only_before], [only_after, 7]]
    expected = contingency_tables.mcnemar(table, exact=found.is_exact, correction=True)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)


def test_mcnemar_by_hand() -> None:
    """2 against 8 discordant pairs: 2 * (1 + 10 + 45) / 1024."""
    assert mcnemar(*pairs_of(2, 8)).p_value == pytest.approx(2 * 56 / 1024)


def test_wilcoxon_is_scipys_and_1_without_differences() -> None:
    differences = np.random.default_rng(0).normal(0.2, 1, size=80)
    differences[:10] = 0
    expected = stats.wilcoxon(differences[10:]).pvalue
    assert wilcoxon_signed_rank(differences) == pytest.approx(expected)
    assert wilcoxon_signed_rank(np.zeros(5)) == 1.0


def test_sign_flips_of_few_pairs_are_counted_exactly() -> None:
    before = np.array([1.0, 2.0, 0.5, 3.0, 1.0, 4.0])
    after = np.array([1.5, 2.5, 0.4, 4.0, 1.0, 4.2])
    differences = after - before
    observed = abs(differences.sum())
    all_sums = [abs(np.dot(signs, differences)) for signs in product((1, -1), repeat=6)]
    expected = np.mean([s >= observed - 1e-12 for s in all_sums])
    assert flip(sums(before), sums(after)) == pytest.approx(expected)
    scipys = stats.permutation_test(
        (before, after), lambda x, y, axis: (y - x).sum(axis=axis), permutation_type="samples", vectorized=True
    )
    assert flip(sums(before), sums(after)) == pytest.approx(scipys.pvalue)


def test_sign_flips_of_many_pairs_agree_with_the_normal_limit() -> None:
    rng = np.random.default_rng(1)
    before = rng.normal(size=500)
    after = before + rng.normal(0.1, 1.0, size=500)
    expected = stats.ttest_rel(before, after).pvalue
    assert flip(sums(before), sums(after)) == pytest.approx(expected, abs=0.01)


def test_sign_flips_of_shares_agree_with_exact_mcnemar() -> None:
    before, after = pairs_of(11, 24, both=100, neither=100)
    assert flip(sums(before), sums(after)) == pytest.approx(mcnemar(before, after).p_value, abs=0.01)


def test_p_values_are_uniform_when_nothing_changed() -> None:
    """Clusters of correlated rows: with whole clusters flipped 5 % of the tests are below 0.05."""
    rng = np.random.default_rng(4)
    p_values = []
    for number in range(400):
        cluster = np.repeat(np.arange(30), 6)
        change = rng.normal(size=30)[cluster] + 0.2 * rng.normal(size=len(cluster))
        before, after = (
            np.stack([np.bincount(cluster, values), np.bincount(cluster)], axis=1).astype(float)
            for values in (np.zeros(len(cluster)), change)
        )
        p_values.append(flip(before, after, seed=number, num_flips=199))
    assert 0.02 <= np.mean(np.array(p_values) <= 0.05) <= 0.08
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def test_sign_flip_p_is_never_zero_and_1_for_equal_sides() -> None:
    before = np.zeros(200)
    assert flip(sums(before), sums(before + 1), num_flips=999) == pytest.approx(1 / 1000)
    assert flip(sums(before), sums(before)) == 1.0


def test_sign_flip_of_weighted_means_swaps_weights_too() -> None:
    """The same nats per token on both sides, on texts of different length: no difference."""
    rng = np.random.default_rng(0)
    short, long = rng.integers(5, 10, size=60).astype(float), rng.integers(50, 90, size=60).astype(float)
    nats = rng.normal(2.0, 0.3, size=60)
    p_value = flip(sums(nats * short, short), sums((nats + rng.normal(0, 0.2, 60)) * long, long))
    assert p_value > 0.05


def test_holm_is_statsmodels_and_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    p_values = np.random.default_rng(0).random(25) ** 3
    assert holm(list(p_values)) == pytest.approx(multitest.multipletests(p_values, method="holm")[1])


def test_min_detectable_effect_is_found_in_80_of_100_tests() -> None:
    rng = np.random.default_rng(0)
    effect = min_detectable_effect(1 / np.sqrt(200))
    assert effect == pytest.approx(2.8016 / np.sqrt(200), rel=1e-4)
    found = [stats.ttest_1samp(rng.normal(effect, 1, size=200), 0).pvalue < 0.05 for _ in range(2_000)]
    assert np.mean(found) == pytest.approx(0.8, abs=0.03)


def test_largest_unseen_share_is_the_rule_of_three() -> None:
    assert largest_unseen_share(300) == pytest.approx(3 / 300, rel=0.01)
    assert (1 - largest_unseen_share(50)) ** 50 == pytest.approx(0.05)


def test_wilson_interval_by_hand_and_at_the_ends() -> None:
    z, n, p = 1.959964, 40, 0.1
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert wilson(4, 40) == pytest.approx((middle - half, middle + half), abs=1e-6)
    assert wilson(0, 40).low == 0.0
    assert wilson(0, 40).high > 0.05


@pytest.mark.parametrize("rates", [(0.01, 0.01), (0.02, 0.05), (0.0, 0.03)])
def test_difference_of_shares_with_few_discordant_pairs_is_covered(rates: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    counts = rng.multinomial(256, [*rates, 1 - sum(rates)], size=4_000)
    intervals = [bonett_price(int(b), int(c), 256) for b, c, _ in counts]
    truth = rates[1] - rates[0]
    covered = np.mean([interval.low <= truth <= interval.high for interval in intervals])
    assert covered >= 0.94


def test_difference_without_discordant_pairs_is_not_a_point() -> None:
    low, high = bonett_price(0, 0, 256)
    assert low == pytest.approx(-high)
    assert 0.005 < high < 3 / 256 + 0.005
