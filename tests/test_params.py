"""Where sampling parameters come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchinfer.errors import InputError
from batchinfer.params import SamplingLayers, resolve_params
from batchinfer.types import DEFAULT_MAX_TOKENS, SamplingParams


def test_precedence_is_flag_config_model_default_each_value_by_itself() -> None:
    resolved = resolve_params(
        SamplingLayers(flags={"temperature": 0.1}, config={"temperature": 0.2, "top_p": 0.3}),
        {"temperature": 0.4, "top_p": 0.5, "top_k": 6},
    )
    assert resolved.params == SamplingParams(temperature=0.1, top_p=0.3, top_k=6)
    origins = resolved.origins
    assert (origins["temperature"], origins["top_p"], origins["top_k"]) == ("flag", "config", "model")
    assert origins["seed"] == "default"
    assert set(origins) == set(SamplingParams.names())


def test_nothing_given_is_greedy_with_the_documented_default_length() -> None:
    resolved = resolve_params(SamplingLayers(), {})
    assert resolved.params == SamplingParams()
    assert resolved.params.temperature == 0.0
    assert resolved.params.max_tokens == DEFAULT_MAX_TOKENS == 1024
    assert set(resolved.origins.values()) == {"default"}


def test_a_flag_of_the_default_value_is_still_a_flag() -> None:
    resolved = resolve_params(SamplingLayers(flags={"temperature": 0.0}), {"temperature": 0.7, "top_p": 0.9})
    assert resolved.params.temperature == 0.0
    assert resolved.origins["temperature"] == "flag"
    assert resolved.origins["top_p"] == "model"


def test_a_row_field_has_no_single_value_and_says_what_counts_where_it_is_null() -> None:
    report = resolve_params(SamplingLayers(flags={"seed": 7}), {}, {"seed", "stop"}).to_dict()
    assert report["seed"] == {"value": None, "origin": "row", "if_null": {"value": 7, "origin": "flag"}}
    assert report["stop"] == {"value": None, "origin": "row", "if_null": {"value": [], "origin": "default"}}
    assert report["n"] == {"value": 1, "origin": "default"}


@pytest.mark.parametrize(
    ("model", "origin"), [({}, "the default"), ({"max_tokens": 10}, "the model's generation_config")]
)
def test_min_tokens_above_a_max_tokens_nobody_typed(model: dict[str, int], origin: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_params(SamplingLayers(flags={"min_tokens": 2000}), model)
    assert f"max_tokens comes from {origin}; raise --max-tokens" in str(caught.value)


def test_a_model_with_impossible_values_says_so() -> None:
    with pytest.raises(InputError, match="generation_config: top_p must be between"):
        resolve_params(SamplingLayers(), {"top_p": 3.0})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": 5}, "stop must be a list, got 5"),
        ({"stop": {"a": 1}}, "stop must be a list, got {'a': 1}"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list, got '12'"),
        ({"repetition_penalty": 1e-40}, "between 0.01 and 100.0, got 1e-40 \\(1 is off\\)"),
        ({"repetition_penalty": 0.0}, "between 0.01 and 100.0, got 0.0"),
    ],
)
def test_values_that_cannot_be_used_are_told(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_a_lone_stop_string_null_and_lists_are_taken() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=[3]) == SamplingParams(stop_token_ids=(3,))  # type: ignore[arg-type]


def test_numpy_numbers_are_numbers() -> None:
    """What comes out of a data frame or an array."""
    params = SamplingParams(n=np.int64(2), temperature=np.float32(0.5), max_tokens=np.int32(7))
    assert params == SamplingParams(n=2, temperature=0.5, max_tokens=7)
    assert type(params.n) is int
    with pytest.raises(ValueError, match="n must be a whole number"):
        SamplingParams(n=np.float64(2.5))
