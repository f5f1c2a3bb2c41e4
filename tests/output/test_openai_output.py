"""OpenAI Batch lines out: the API's forms, joined by custom_id, whole at their name or not there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeTokenizer

from batchinfer.dataset.columns import InputColumns, find_columns
from batchinfer.dataset.source import open_source
from batchinfer.output.openai import openai_lines
from batchinfer.output.schema import output_schema
from batchinfer.output.writer import ParquetOutput
from batchinfer.types import Completion, ErrorCode, FinishReason

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def results(folder: Path, table: pa.Table, completions: list[Completion], **options: Any) -> pa.Table:
    """The output table of a run."""
    path = folder / "results.parquet"
    with ParquetOutput(path, output_schema(table.schema, **options), overwrite=True) as output:
        output.write_window(table, 0, completions)
        output.commit()
    return pq.read_table(path)


def requests(folder: Path, *lines: dict) -> tuple[pa.Table, InputColumns]:
    (folder / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = open_source(str(folder / "batch.jsonl"))
    return pa.concat_tables(source.windows()), find_columns(source.schema)


def lines_of(tables: list[pa.Table], columns: InputColumns, **options: Any) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    given = {"tokenizer": FakeTokenizer(), "model": "tiny", "created": 1_700_000_000, **options}
    data = b"".join(openai_lines(tables, columns=columns, **given))
    assert data.endswith(b"\n")
    return [json.loads(line, parse_constant=refuse) for line in data.decode().removesuffix("\n").split("\n")]


def test_a_chat_completion(tmp_path: Path, complete: Callable[..., Completion]) -> None:
    table, columns = requests(tmp_path, {"custom_id": "a ü", "url": "/v1/chat/completions", "body": CHAT})
    done = complete(0, finish_reason=FinishReason.LENGTH, text="ü", token_ids=[195, 188])
    (line,) = lines_of([results(tmp_path, table, [done])], columns)
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert (line["custom_id"], line["error"]) == ("a ü", None)
    assert line["id"].startswith("batch_req_")
    response = line["response"]
    assert (list(response), response["status_code"]) == (["status_code", "request_id", "body"], 200)
    body = response["body"]
    assert body.pop("id").startswith("chatcmpl-")
    assert body == {
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ü", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
        "system_fingerprint": None,
    }


def test_samples_are_choices_wherever_tables_are_cut(tmp_path: Path, complete: Callable[..., Completion]) -> None:
    lines = [{"custom_id": f"r{i}", "url": "/v1/chat/completions", "body": CHAT} for i in range(3)]
    table, columns = requests(tmp_path, *lines)
    done = [complete(row, sample) for row, n in enumerate((3, 1, 2)) for sample in range(n)]
    out = results(tmp_path, table, done)
    whole = lines_of([out], columns)
    assert [line["custom_id"] for line in whole] == ["r0", "r1", "r2"]
    choices = [line["response"]["body"]["choices"] for line in whole]
    assert [[c["message"]["content"] for c in row] for row in choices] == [
        ["row 0 sample 0", "row 0 sample 1", "row 0 sample 2"],
        ["row 1 sample 0"],
        ["row 2 sample 0", "row 2 sample 1"],
    ]
    assert [[c["index"] for c in row] for row in choices] == [[0, 1, 2], [0], [0, 1]]
    assert whole[0]["response"]["body"]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    for cut in range(1, out.num_rows):
        assert lines_of([out.slice(0, cut), out.slice(cut)], columns) == whole


def test_logprobs_of_a_chat(tmp_path: Path, complete: Callable[..., Completion]) -> None:
    table, columns = requests(tmp_path, {"custom_id": "a", "url": "/v1/chat/completions", "body": CHAT})
    ids = [ord("o"), *"ü".encode()]
    tops = [[(ord("o"), -0.25), (ord("n"), -1.5)], [(195, -0.5), (0, -math.inf)], [(188, -0.75), (1, -2.0)]]
    done = complete(0, text="oü", token_ids=ids, logprobs=[-0.25, -math.inf, -0.75], top_logprobs=tops)
    out = results(tmp_path, table, [done], logprobs=True, top_logprobs=True)
    (line,) = lines_of([out], columns)
    logprobs = line["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert logprobs["content"][0] == {
        "token": "o",
        "logprob": -0.25,
        "bytes": [111],
        "top_logprobs": [
            {"token": "o", "logprob": -0.25, "bytes": [111]},
            {"token": "n", "logprob": -1.5, "bytes": [110]},
        ],
    }
    second = logprobs["content"][1]
    assert (second["token"], second["logprob"], second["bytes"]) == ("bytes:\\xc3", -9999.0, [195])
    assert second["top_logprobs"][1] == {"token": "\x00", "logprob": -9999.0, "bytes": [0]}
    assert bytes(b for token in logprobs["content"] for b in token["bytes"]).decode() == "oü"


def test_a_completion_of_a_plain_prompt(tmp_path: Path, complete: Callable[..., Completion]) -> None:
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "logprobs": 1}}
    table, columns = requests(tmp_path, line)
    ids = [*"üa".encode(), ord("b")]
    tops = [[(i, -1.0), (65, -2.0)] for i in ids]
    done = complete(0, text="üab", token_ids=ids, logprobs=[-1.0] * 4, top_logprobs=tops)
    (found,) = lines_of([results(tmp_path, table, [done], logprobs=True, top_logprobs=True, prefix="x_")], columns)
    body = found["response"]["body"]
    assert (body["object"], body["id"][:5]) == ("text_completion", "cmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "üab",
            "logprobs": {
                "tokens": ["bytes:\\xc3", "bytes:\\xbc", "a", "b"],
                "token_logprobs": [-1.0] * 4,
                "top_logprobs": [
                    {"bytes:\\xc3": -1.0, "A": -2.0},
                    {"bytes:\\xbc": -1.0, "A": -2.0},
                    {"a": -1.0, "A": -2.0},
                    {"b": -1.0, "A": -2.0},
                ],
                "text_offset": [0, 0, 1, 2],
            },
            "finish_reason": "stop",
        }
    ]
    without_tops = results(tmp_path, table, [complete(0, logprobs=[-1.0] * 3)], logprobs=True)
    (found,) = lines_of([without_tops], columns)
    assert found["response"]["body"]["choices"][0]["logprobs"]["top_logprobs"] is None


def test_a_response(tmp_path: Path, complete: Callable[..., Completion]) -> None:
    table, columns = requests(tmp_path, *({"custom_id": i, "body": {"input": "x"}} for i in "ab"))
    done = [complete(0), complete(1, finish_reason=FinishReason.LENGTH)]
    whole, cut = (line["response"]["body"] for line in lines_of([results(tmp_path, table, done)], columns))
    assert (whole["object"], whole["status"], whole["incomplete_details"]) == ("response", "completed", None)
    assert whole["output"][0]["content"] == [
        {"type": "output_text", "text": "row 0 sample 0", "annotations": [], "logprobs": []}
    ]
    assert whole["usage"] == {
        "input_tokens": 5,
        "output_tokens": 3,
        "total_tokens": 8,
        "input_tokens_details": {"cached_tokens": 3},
    }
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("code", "theirs"),
    [
        (ErrorCode.PROMPT_NULL, "prompt_null"),
        (ErrorCode.INVALID_PARAMS, "invalid_params"),
        (ErrorCode.INVALID_ROW, "invalid_row"),
        (ErrorCode.PROMPT_TOO_LONG, "context_length_exceeded"),
        (ErrorCode.NEVER_FITS, "context_length_exceeded"),
    ],
)
def test_a_request_at_fault_is_a_response_with_status_400(
    tmp_path: Path, fail: Callable[..., Completion], code: ErrorCode, theirs: str
) -> None:
    table, columns = requests(tmp_path, {"custom_id": "a", "url": "/v1/chat/completions", "body": CHAT})
    (line,) = lines_of([results(tmp_path, table, [fail(0, code)])], columns)
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("a", None, 400)
    assert line["response"]["body"] == {
        "error": {"message": "row 0 cannot run", "type": "invalid_request_error", "param": None, "code": theirs}
    }


def test_what_is_not_the_requests_fault_is_an_error_of_the_line(
    tmp_path: Path, fail: Callable[..., Completion]
) -> None:
    table, columns = requests(tmp_path, {"custom_id": "a", "body": CHAT})
    (line,) = lines_of([results(tmp_path, table, [fail(0, ErrorCode.NON_FINITE_LOGITS)])], columns)
    assert line["response"] is None
    assert line["error"] == {"code": "non_finite_logits", "message": "row 0 cannot run"}


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, "chat.completion"),
        ("https://host/v1/completions/", {"prompt": "x"}, "text_completion"),
        ("/v1/responses", CHAT, "response"),
        (None, CHAT, "chat.completion"),
        (None, {"prompt": "x"}, "text_completion"),
        ("/other", {"input": "x"}, "response"),
        (None, {}, "chat.completion"),
    ],
)
def test_the_form_is_that_of_the_endpoint(
    tmp_path: Path, complete: Callable[..., Completion], url: str | None, body: dict, kind: str
) -> None:
    table, columns = requests(tmp_path, {"custom_id": "a", "url": url, "body": body})
    (line,) = lines_of([results(tmp_path, table, [complete(0)])], columns)
    assert line["response"]["body"]["object"] == kind


@pytest.mark.parametrize(
    ("columns", "kind", "ids"),
    [
        ({"prompt": ["x", "y"], "id": [7, None]}, "text_completion", ["7", None]),
        ({"prompt": ["x", "y"], "url": ["a", "b"]}, "text_completion", ["row-0", "row-1"]),
        (
            {"messages": [CHAT["messages"]] * 2, "id": pa.array(["p", "q"]).dictionary_encode()},
            "chat.completion",
            ["p", "q"],
        ),
    ],
)
def test_other_inputs_have_their_ids_or_their_row_numbers(
    tmp_path: Path, complete: Callable[..., Completion], columns: dict, kind: str, ids: list
) -> None:
    table = pa.table(columns)
    out = results(tmp_path, table, [complete(0), complete(1)])
    lines = lines_of([out], find_columns(table.schema))
    assert [line["custom_id"] for line in lines] == ids
    assert {line["response"]["body"]["object"] for line in lines} == {kind}


def test_ids_are_the_rows_and_differ(tmp_path: Path, complete: Callable[..., Completion]) -> None:
    table, columns = requests(tmp_path, *({"custom_id": "same", "body": CHAT} for _ in range(3)))
    out = results(tmp_path, table, [complete(row) for row in range(3)])
    lines = lines_of([out], columns)
    assert len({line["id"] for line in lines}) == 3
    assert lines_of([out.slice(0, 1), out.slice(1)], columns) == lines
    assert lines_of([out], columns, created=1)[0]["id"] != lines[0]["id"]


def test_a_body_with_half_a_surrogate_pair_is_that_lines_error(tmp_path: Path, fail: Callable[..., Completion]) -> None:
    table, columns = requests(tmp_path, {"custom_id": "a", "body": {"messages": [{"role": "\ud83d"}]}})
    (line,) = lines_of([results(tmp_path, table, [fail(0, ErrorCode.INVALID_MESSAGES)])], columns)
    assert line["response"]["status_code"] == 400
