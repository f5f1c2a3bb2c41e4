"""Estimates from sampled tokens need tokens that were drawn from the model's own distribution."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.evals.metrics.sampling import sampling_warning
from batchinfer.evals.pairing import pair_rows
from batchinfer.evals.run_output import load_run_output


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"temperature": 1.0}, {"temperature": 1}, None),
        ({"temperature": 1.0}, {"temperature": 0.7, "top_k": 40}, "(after with temperature 0.7, top_k 40)"),
        ({"temperature": 0.0, "top_p": 0.9}, {"temperature": 1.0}, "(before with temperature 0)"),
        (
            {"temperature": 1.0, "repetition_penalty": 1.1},
            {"temperature": 1.0, "min_p": 0.05},
            "(before with repetition_penalty 1.1; after with min_p 0.05)",
        ),
    ],
)
def test_what_makes_tokens_no_draws_is_named(
    make_run: Any, before: dict[str, float], after: dict[str, float], said: str | None
) -> None:
    found = sampling_warning(_pairs(make_run(["a"], params=before), make_run(["b"], params=after)))
    assert len(found) == (said is not None)
    assert all(said is not None and said in text for text in found)


def test_rows_with_temperatures_of_their_own(make_run: Any) -> None:
    params = {"temperature": {"value": None, "origin": "row", "if_null": {"value": 1.0, "origin": "default"}}}
    run = make_run(["a"])
    run = run.replace_schema_metadata({"batchinfer": _with_params(run, params)})
    (text,) = sampling_warning(_pairs(run, run))
    assert "before with temperature by row" in text


def _with_params(run: Any, params: dict[str, Any]) -> str:
    return json.dumps(json.loads(run.schema.metadata[b"batchinfer"]) | {"params": params})


def _pairs(before: Any, after: Any) -> Any:
    return pair_rows(load_run_output(before), load_run_output(after))
