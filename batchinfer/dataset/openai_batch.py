"""The OpenAI Batch format: JSON Lines of {custom_id, method, url, body}.

The request body passes through as JSON text; what it asks for is read from there, row by row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from batchinfer.dataset.json_lines import Record, batches
from batchinfer.dataset.row_input_error import RowInputError
from batchinfer.types import ErrorCode

_BASE_COLUMNS = ("custom_id", "method", "url", "body")

#: Body fields that mean what the sampling parameter of that name means (or, after "->", another one).
_PARAMS = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "n": "n",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "include_stop_str_in_output": "include_stop",
}
_READ_APART = ("messages", "prompt", "input", "instructions", "logprobs", "top_logprobs")
#: Fields that say who asks, how it is billed or how the answer travels, never what it says.
_IGNORED = (
    "model",
    "user",
    "metadata",
    "store",
    "stream",
    "stream_options",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
)
#: Fields that would change the result, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "truncation": ("disabled",),
}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What one body asks for: exactly one of messages, prompt and token_ids is set."""

    messages: list[Any] | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    params: dict[str, Any] = field(default_factory=dict)  # SamplingParams field -> value; None is a value


def is_openai_batch(values: Mapping[str, Any]) -> bool:
    return "custom_id" in values and isinstance(values.get("body"), dict)


def clean_request(record: Record) -> Record:
    """Without those of custom_id, method and url that are not text, which become the record's problem."""
    values, problem = {}, record.problem
    for key, value in record.values.items():
        found = None if value is None else _problem_of(key, value)
        if found is None:
            values[key] = value
        problem = problem or found
    return record if problem == record.problem else record._replace(values=values, problem=problem)


def _problem_of(key: str, value: Any) -> str | None:
    if key in ("custom_id", "method", "url") and not isinstance(value, str):
        return f"{key} must be a string, found {json.dumps(value)[:50]}"
    try:
        (key + value if key != "body" and isinstance(value, str) else key).encode()
    except UnicodeEncodeError:
        return f"{key!r} holds half of a surrogate pair: not valid text"
    return None


def batch_columns(records: Iterable[Record]) -> pa.Schema:
    """custom_id, method, url, body, and one column of JSON text for any other key."""
    names = dict.fromkeys(_BASE_COLUMNS)
    for record in records:
        names.update(dict.fromkeys(record.values))
    return pa.schema([(name, pa.string()) for name in names])


def request_tables(records: Iterable[Record], schema: pa.Schema) -> Iterator[pa.Table]:
    for batch in batches(records):
        columns = [
            pa.array([_cell(r.values.get(name), name) for r in batch], type=pa.string()) for name in schema.names
        ]
        yield pa.Table.from_arrays(columns, schema=schema)


def _cell(value: Any, name: str) -> str | None:
    if value is None or name in ("custom_id", "method", "url"):
        return value
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)  # keeps half a surrogate pair as its escape
    return text


def parse_body(text: str | None, url: str | None = None) -> BatchRequest:
    """Read one request body. Raises RowInputError with the code that fits."""
    body = _load(text)
    if url and url.rstrip("/").endswith(("/embeddings", "/moderations")):
        raise RowInputError(ErrorCode.INVALID_PROMPT, f"requests to {url} do not ask for a completion")
    params = _read_params(body)
    if body.get("messages") is not None:
        return BatchRequest(messages=_as_list(body["messages"]), params=params)
    if body.get("prompt") is not None:
        return _read_prompt(body["prompt"], params)
    if body.get("input") is not None:
        return _read_input(body["input"], body.get("instructions"), params)
    raise RowInputError(ErrorCode.PROMPT_NULL, "the body has none of messages, prompt and input")


def _load(text: str | None) -> dict[str, Any]:
    if text is None:
        raise RowInputError(ErrorCode.PROMPT_NULL, "the row has no body")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowInputError(ErrorCode.INVALID_PROMPT, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RowInputError(ErrorCode.INVALID_PROMPT, "the body is not a JSON object")
    return body


def _as_list(messages: Any) -> list[Any]:
    if not isinstance(messages, list):
        raise RowInputError(ErrorCode.INVALID_MESSAGES, "messages must be a list")
    return messages


def _read_prompt(prompt: Any, params: dict[str, Any]) -> BatchRequest:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return BatchRequest(prompt=prompt, params=params)
    if isinstance(prompt, list) and all(type(item) is int for item in prompt):
        return BatchRequest(token_ids=prompt, params=params)
    raise RowInputError(
        ErrorCode.INVALID_PROMPT, "prompt must be one text or one list of token ids; use a row for each"
    )


def _read_input(value: Any, instructions: Any, params: dict[str, Any]) -> BatchRequest:
    """The Responses API: a text stands for one user message, instructions for a system message."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    messages = _as_list(value)
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *messages]
    return BatchRequest(messages=messages, params=params)


def _read_params(body: Mapping[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for key, value in body.items():
        if value is None or key in _READ_APART or key in _IGNORED:
            continue
        if key in _PARAMS:
            name = _PARAMS[key]
            if name in params and params[name] != value:
                raise _bad_params(f"{key}={value!r} contradicts another name for it ({params[name]!r})")
            params[name] = value
        elif value not in _NEUTRAL.get(key, ()):
            raise _bad_params(f"field {key!r} of the body would change the result and is not supported")
    params.update(_read_logprobs(body))
    return params


def _read_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Chat: a boolean, with top_logprobs saying how many; completions: a number."""
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    if logprobs is None and top is None:
        return {}
    if logprobs is False:
        if top:
            raise _bad_params("top_logprobs needs logprobs: true")
        return {"logprobs": None}
    if top is not None and (isinstance(top, bool) or not isinstance(top, int)):
        raise _bad_params(f"top_logprobs must be a whole number, got {top!r}")
    if logprobs is True or logprobs is None:
        return {"logprobs": top or 0} if logprobs or top else {}
    if top is not None and top != logprobs:
        raise _bad_params(f"logprobs={logprobs!r} contradicts top_logprobs={top!r}")
    return {"logprobs": logprobs}


def _bad_params(message: str) -> RowInputError:
    return RowInputError(ErrorCode.INVALID_PARAMS, message)
