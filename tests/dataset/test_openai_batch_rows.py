"""The OpenAI Batch format: requests read row by row, the body passed through."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.dataset.columns import find_columns
from batchinfer.dataset.openai_batch import parse_body
from batchinfer.dataset.prompts import build_prompts
from batchinfer.dataset.row_input_error import RowInputError
from batchinfer.dataset.source import open_source
from batchinfer.types import ErrorCode, SamplingParams

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def write(tmp_path: Path, *lines: object) -> str:
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def request(custom_id: str, **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, **body}}


def prompts(tmp_path: Path, tokenizer, *lines: object, defaults: SamplingParams | None = None, system=None):
    source = open_source(write(tmp_path, *lines))
    columns = find_columns(source.schema)
    (table,) = source.windows()
    return build_prompts(table, 0, columns, tokenizer, defaults or SamplingParams(), system=system)


def text_of(prompt) -> str:
    return bytes(prompt.token_ids.tolist()).decode()


def test_lines_pass_through(tmp_path: Path) -> None:
    lines = [request("a", temperature=0.50, text="ü"), request("b", big=2**70), {**request("c"), "extra": {"x": [1]}}]
    source = open_source(write(tmp_path, *lines))
    table = pa.concat_tables(source.windows(2))
    assert source.schema == pa.schema([(n, pa.string()) for n in ("custom_id", "method", "url", "body", "extra")])
    assert table.column("custom_id").to_pylist() == ["a", "b", "c"]
    assert [json.loads(body) for body in table.column("body").to_pylist()] == [line["body"] for line in lines]
    assert "ü" in table.column("body")[0].as_py()
    assert table.column("extra").to_pylist() == [None, None, '{"x": [1]}']


def test_limit(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, *(request(str(i)) for i in range(5))), limit=3)
    assert source.num_rows == 3
    assert [i for t in source.windows(2) for i in t.column("custom_id").to_pylist()] == ["0", "1", "2"]


def test_columns_are_found_and_a_parquet_copy_works_alike(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, request("a")))
    columns = find_columns(source.schema)
    assert (columns.body, columns.id, columns.prompt, columns.messages) == ("body", "custom_id", None, None)
    pq.write_table(pa.concat_tables(source.windows()), tmp_path / "a.parquet")
    assert find_columns(open_source(str(tmp_path / "a.parquet")).schema) == columns


def test_rows_become_prompts(tmp_path: Path, tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    built = prompts(
        tmp_path,
        tokenizer,
        request("1"),
        request("2", messages=[{"role": "user", "content": parts}], max_tokens=5, stop="x"),
        {"custom_id": "3", "url": "/v1/completions", "body": {"prompt": "plain", "logprobs": 2}},
        {"custom_id": "4", "url": "/v1/completions", "body": {"prompt": [104, 105]}},
        {"custom_id": "5", "url": "/v1/responses", "body": {"input": "hi", "instructions": "be kind"}},
        {"custom_id": "6", "body": {"prompt": ["one"]}},
    )
    assert [p.error for p in built] == [None] * 6
    assert [text_of(p) for p in built] == [
        "<user>hi<assistant>",
        "<user>ab<assistant>",
        "plain",
        "hi",
        "<system>be kind<user>hi<assistant>",
        "one",
    ]
    assert (built[1].params.max_tokens, built[1].params.stop) == (5, ("x",))
    assert built[2].params.logprobs == 2
    assert len({p.key for p in built}) == 6


def test_every_known_parameter_and_ignored_field(tmp_path: Path, tokenizer) -> None:
    body = {
        "max_completion_tokens": 7, "temperature": 1, "top_p": 0.5, "stop": ["a", "b"], "seed": 3, "n": 2,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logprobs": True, "top_logprobs": 4, "top_k": 9,
        "user": "u", "metadata": {"a": 1}, "response_format": {"type": "text"}, "tools": [], "logit_bias": None,
        "stream": False,
    }  # fmt: skip
    (prompt,) = prompts(tmp_path, tokenizer, request("a", **body))
    assert prompt.error is None
    assert prompt.params == SamplingParams(
        max_tokens=7, temperature=1.0, top_p=0.5, stop=("a", "b"), seed=3, n=2, presence_penalty=0.5,
        frequency_penalty=-0.5, logprobs=4, top_k=9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": 3}, 3),
        ({"logprobs": None}, 20),
        ({}, 20),
    ],
)
def test_logprobs_of_both_interfaces(tmp_path: Path, tokenizer, body: dict, expected: int | None) -> None:
    (prompt,) = prompts(tmp_path, tokenizer, request("a", **body), defaults=SamplingParams(logprobs=20))
    assert prompt.error is None
    assert prompt.params.logprobs == expected


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"tools": [{"type": "function"}]}, ErrorCode.INVALID_PARAMS, "'tools'"),
        ({"response_format": {"type": "json_object"}}, ErrorCode.INVALID_PARAMS, "'response_format'"),
        ({"logit_bias": {"5": -100}}, ErrorCode.INVALID_PARAMS, "'logit_bias'"),
        ({"reasoning_effort": "low"}, ErrorCode.INVALID_PARAMS, "'reasoning_effort'"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, ErrorCode.INVALID_PARAMS, "contradicts"),
        ({"temperature": -1}, ErrorCode.INVALID_PARAMS, "temperature must be between"),
        ({"temperature": "hot"}, ErrorCode.INVALID_PARAMS, "temperature must be a number, got 'hot'"),
        ({"max_tokens": 0}, ErrorCode.INVALID_PARAMS, "max_tokens must be between 1"),
        ({"n": True}, ErrorCode.INVALID_PARAMS, "n must be a whole number"),
        ({"stop": 5}, ErrorCode.INVALID_PARAMS, "stop must be a list, got 5"),
        ({"logprobs": False, "top_logprobs": 3}, ErrorCode.INVALID_PARAMS, "top_logprobs needs logprobs: true"),
        ({"messages": []}, ErrorCode.INVALID_MESSAGES, "no messages"),
        ({"messages": "hi"}, ErrorCode.INVALID_MESSAGES, "must be a list"),
        ({"messages": [{"content": "hi"}]}, ErrorCode.INVALID_MESSAGES, "message 1 has no role"),
        ({"messages": [{"role": "user"}]}, ErrorCode.INVALID_MESSAGES, r"message 1 \(user\) has no content"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, ErrorCode.INVALID_MESSAGES, r"not valid Unicode"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            ErrorCode.INVALID_IMAGE,
            "message 1 has an unreadable image: it names none",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            ErrorCode.INVALID_MESSAGES,
            "content part of type 'input_audio': only text",
        ),
        ({"messages": None}, ErrorCode.PROMPT_NULL, "none of messages, prompt and input"),
        ({"messages": None, "prompt": ["a", "b"]}, ErrorCode.INVALID_PROMPT, "a row for each"),
        ({"messages": None, "prompt": [99999]}, ErrorCode.INVALID_PROMPT, "token id 99999 at position 0"),
        ({"messages": None, "prompt": "\udc80"}, ErrorCode.INVALID_PROMPT, "not valid Unicode"),
        ({"messages": None, "prompt": ""}, ErrorCode.PROMPT_EMPTY, "no tokens"),
    ],
)
def test_a_bad_body_is_that_rows_error(tmp_path: Path, tokenizer, body: dict, code: ErrorCode, words: str) -> None:
    before, bad, after = prompts(tmp_path, tokenizer, request("a"), request("b", **body), request("c"))
    assert before.error is None
    assert after.error is None
    assert bad.error is not None
    assert bad.error.code == code
    assert re.search(words, bad.error.message)
    assert len(bad.token_ids) == 0


def test_odd_bodies(tmp_path: Path, tokenizer) -> None:
    built = prompts(
        tmp_path,
        tokenizer,
        request("a"),
        {"custom_id": "b"},
        {"custom_id": "c", "body": 5},
        {"custom_id": "d", "body": "x"},
    )
    assert [p.error and p.error.code.value for p in built] == [None, "prompt_null", "invalid_prompt", "invalid_prompt"]
    with pytest.raises(RowInputError, match="the body is not JSON"):
        parse_body("{")
    with pytest.raises(RowInputError, match="/v1/embeddings do not ask for a completion"):
        parse_body('{"input": "x"}', "/v1/embeddings")


def test_half_a_surrogate_pair_in_a_body_passes_through(tmp_path: Path) -> None:
    line = request("a", messages=[{"role": "user", "content": "\ud83d"}])
    (table,) = open_source(write(tmp_path, line)).windows()
    assert json.loads(table.column("body")[0].as_py()) == line["body"]


def test_system_goes_before_messages_and_refuses_plain_prompts(tmp_path: Path, tokenizer) -> None:
    chat, plain = prompts(tmp_path, tokenizer, request("a"), {"custom_id": "b", "body": {"prompt": "x"}}, system="S")
    assert text_of(chat) == "<system>S<user>hi<assistant>"
    assert plain.error is not None
    assert plain.error.code == ErrorCode.INVALID_PROMPT


def test_a_model_without_chat_template_still_completes(tmp_path: Path, plain_tokenizer) -> None:
    chat, plain = prompts(tmp_path, plain_tokenizer, request("a"), {"custom_id": "b", "body": {"prompt": "x"}})
    assert chat.error is not None
    assert "no chat template" in chat.error.message
    assert text_of(plain) == "x"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"custom_id": 7, "body": {}}, "custom_id must be a string, found 7"),
        ({"custom_id": "\ud83d", "body": {}}, "'custom_id' holds half of a surrogate pair"),
        ({"custom_id": "b", "url": ["x"], "body": {}}, 'url must be a string, found ["x"]'),
    ],
)
def test_a_line_whose_names_are_no_text_is_a_row_error(tmp_path: Path, tokenizer, line: dict, message: str) -> None:
    source = open_source(write(tmp_path, request("a"), line, request("c")))
    assert source.row_errors == {1: f"{tmp_path}/batch.jsonl, line 2: {source.row_errors[1].split(': ', 1)[1]}"}
    assert message in source.row_errors[1]
    (table,) = source.windows()
    assert [value is None for value in table.column("custom_id").to_pylist()] == [False, "url" not in line, False]
    built = build_prompts(
        table, 0, find_columns(source.schema), tokenizer, SamplingParams(), row_errors=source.row_errors
    )
    assert [p.error and p.error.code for p in built] == [None, ErrorCode.INVALID_ROW, None]
