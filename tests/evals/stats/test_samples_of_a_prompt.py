"""pass@k and maj@k against the definition: draw k of n samples, look at them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from batchinfer.evals.stats.samples import majority_at_k, pass_at_k


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (8, 3)])
def test_pass_at_k_is_the_share_of_choices_with_a_correct_one(n: int, c: int) -> None:
    is_correct = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        expected = np.mean([any(chosen) for chosen in combinations(is_correct, k)])
        assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_pass_at_k_is_the_product_form_of_chen_et_al() -> None:
    """Their numerically stable form, for numbers of samples whose binomials overflow floats."""
    n, c, k = 2_000, 37, 100
    expected = 1 - np.prod(1 - k / np.arange(n - c + 1, n + 1))
    assert pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-12)


def test_pass_at_1_is_the_mean() -> None:
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_impossible_numbers_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"between 1 and|cannot be correct"):
        pass_at_k(n, c, k)


def vote(answers: list, correct: str, k: int) -> float:
    return majority_at_k(answers, [answer == correct for answer in answers], k, np.random.default_rng(0))


def test_majority_of_all_samples() -> None:
    assert vote(["7", "7", "8"], "7", 3) == 1.0
    assert vote(["7", "8", "8"], "7", 3) == 0.0


def test_ties_are_a_fair_draw() -> None:
    assert vote(["7", "8"], "7", 2) == 0.5
    assert vote(["7", "8", "9"], "7", 3) == pytest.approx(1 / 3)


def test_majority_of_k_is_the_mean_over_all_choices() -> None:
    """3 right of 5, k = 3: right when 2 or 3 right ones are chosen; the wrong ones agree."""
    assert vote(["a", "a", "a", "b", "b"], "a", 3) == pytest.approx((1 + 3 * 2) / 10)
    assert vote(["a", "b", "b"], "a", 1) == pytest.approx(1 / 3)


def test_many_choices_are_sampled_with_the_seed() -> None:
    answers = ["a"] * 20 + ["b"] * 19
    first, again = (majority_at_k(answers, [a == "a" for a in answers], 9, np.random.default_rng(3)) for _ in "12")
    assert first == again
    assert first == pytest.approx(0.53, abs=0.05)


def test_samples_without_an_answer_have_no_vote() -> None:
    assert vote([None, None, "7"], "7", 3) == 1.0
    assert vote([None, None], "7", 2) == 0.0
