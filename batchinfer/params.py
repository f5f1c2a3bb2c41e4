"""Where each sampling parameter comes from.

Precedence, each value by itself: the row's own `sampling_params` > flag > config file > the model's
generation_config > default. What the model says is read by the rule in models/source.py: its
temperature, top_k, top_p and min_p count only where it says `do_sample: true`. temperature = 0 is
greedy whatever top_k, top_p and min_p are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batchinfer.errors import InputError
from batchinfer.types import DEFAULT_MAX_TOKENS, SamplingParams

Origin = Literal["row", "flag", "config", "model", "default"]


@dataclass(frozen=True, slots=True)
class SamplingLayers:
    """Sampling values that the user gave, by SamplingParams field name."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse values that contradict each other whatever the model says. Raises InputError."""
        given = {**self.config, **self.flags}
        low, high = given.get("min_tokens"), given.get("max_tokens")
        if low is not None and high is not None and low > high:
            raise InputError(f"min_tokens ({low}) is above max_tokens ({high})")


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """What rows run with unless they say otherwise, and who said so.

    `row_fields` are the fields that the input's sampling_params column has: a row's own non-null
    value counts there, and `params` only where it is null.
    """

    params: SamplingParams
    origins: Mapping[str, Origin]
    row_fields: frozenset[str] = frozenset()

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """name -> {value, origin}; for a row field {value: None, origin: "row", if_null: {value, origin}}."""
        result: dict[str, dict[str, Any]] = {}
        for name in SamplingParams.names():
            value = getattr(self.params, name)
            said = {"value": list(value) if isinstance(value, tuple) else value, "origin": self.origins[name]}
            if name in self.row_fields:
                said = {"value": None, "origin": "row", "if_null": said}
            result[name] = said
        return result


def resolve_params(
    layers: SamplingLayers, model_defaults: Mapping[str, Any], row_fields: Collection[str] = ()
) -> ResolvedParams:
    """Layer the values. Raises InputError if the result is impossible, naming the origin of the values."""
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(SamplingParams.names(), "default")
    by_precedence: tuple[tuple[Origin, Mapping[str, Any]], ...] = (
        ("model", model_defaults),
        ("config", layers.config),
        ("flag", layers.flags),
    )
    for origin, given in by_precedence:
        for name, value in given.items():
            values[name] = value
            origins[name] = origin
    try:
        params = SamplingParams(**values)
    except ValueError as error:
        if values.get("min_tokens", 0) > values.get("max_tokens", DEFAULT_MAX_TOKENS):
            said_by = f"max_tokens comes from {_SAID_BY[origins['max_tokens']]}; raise --max-tokens"
            raise InputError(f"{error}; {said_by}") from error
        raise InputError(f"the model's generation_config: {error}; override it with a flag") from error
    return ResolvedParams(params, origins, frozenset(row_fields))


_SAID_BY = {
    "flag": "the flag",
    "config": "the config file",
    "model": "the model's generation_config",
    "default": "the default",
}


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Which columns of log-probabilities an output has."""

    logprobs: bool
    top_logprobs: bool
    prompt_logprobs: bool


def logprob_columns(given: Mapping[str, Any], row_fields: Collection[str]) -> LogprobColumns:
    """Fixed before the first row, from the values for all rows, so any row may ask for its own."""
    by_row = "logprobs" in row_fields
    return LogprobColumns(
        logprobs=by_row or given.get("logprobs") is not None,
        top_logprobs=by_row or (given.get("logprobs") or 0) > 0,
        prompt_logprobs="prompt_logprobs" in row_fields or bool(given.get("prompt_logprobs")),
    )
