"""Comparisons to be shown, made by the evaluators that need no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from batchinfer.evals import compare
from batchinfer.evals.result import ComparisonResult, Curve, Notice, Series, Table

FAMILIES = ("billing", "delivery", "account")


@pytest.fixture
def make_result(make_run: Callable[..., Any]) -> Callable[..., ComparisonResult]:
    """`num_rows` answers of some words, of which every fifth is worse after; `wrap` is put around every text."""

    def make(
        num_rows: int = 60, wrap: Callable[[str], str] = lambda text: text, *, has_noise: bool = False, **arguments: Any
    ) -> ComparisonResult:
        references = [wrap(f"the answer is {FAMILIES[i % 3]} number {i}") for i in range(num_rows)]
        before = [text if i % 7 else wrap("no idea at all about that") for i, text in enumerate(references)]
        after = [text if i % 5 else wrap(f"the answer may be anything {i}") for i, text in enumerate(before)]
        inputs = {
            "id": [wrap(f"id-{i}") for i in range(num_rows)],
            "prompt": [wrap(f"question {i}?") for i in range(num_rows)],
            "reference": references,
            "family": [wrap(FAMILIES[i % 3]) for i in range(num_rows)],
        }
        metrics = ["accuracy", "diversity", "length", "win_rate"]
        first = make_run(before, inputs, model={"name": wrap("old")})
        return compare(
            first,
            make_run(after, inputs, params={"temperature": 0.5}, model={"name": wrap("new")}),
            **{"metrics": metrics, "slice_by": ["family"], "gates": ["accuracy>=-0.01"], **arguments},
            noise_run=first if has_noise else None,
        )

    return make


@pytest.fixture
def full_result(make_result: Callable[..., ComparisonResult]) -> ComparisonResult:
    """One with everything that a report can show."""
    return _with_everything(make_result(has_noise=True))


@pytest.fixture
def with_everything() -> Callable[..., ComparisonResult]:
    return _with_everything


def _with_everything(result: ComparisonResult, wrap: Callable[[str], str] = lambda text: text) -> ComparisonResult:
    """`result` with a refusal, a curve, and the 2 x 2 perplexity."""
    x = tuple(float(i) for i in range(12))
    y = tuple(0.3 / (1 + i) for i in x)
    series = (
        Series(wrap("before"), x, y, tuple(i / 2 for i in y), tuple(i * 2 for i in y)),
        Series(wrap("after"), x, (*y[:5], None, *y[6:])),
    )
    curve = Curve("kl", wrap("KL along the output"), wrap("position"), wrap("nats"), series, wrap("a note"))
    perplexity = Table(
        "perplexity_2x2",
        wrap("Perplexity"),
        (wrap("outputs of"), wrap("by old"), wrap("by new")),
        ((wrap("old"), 3.25, 4.5), (wrap("new"), 12.75, None)),
        wrap("of the corpus"),
    )
    return replace(
        result,
        refusals=(Notice("tokenizer", wrap("counts are of two tokenizers"), ("output_tokens",)),),
        tables=(*result.tables, perplexity),
        curves=(curve,),
    )
