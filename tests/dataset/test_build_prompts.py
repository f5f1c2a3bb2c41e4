"""Rows become prompts one for one; what is wrong with a row is that row's error."""

from __future__ import annotations

import re
from datetime import date

import numpy as np
import pyarrow as pa
import pytest

from batchinfer.dataset import prompts as prompts_module
from batchinfer.dataset.columns import InputColumns, find_columns
from batchinfer.dataset.messages import clean_messages
from batchinfer.dataset.prompts import build_prompts
from batchinfer.dataset.row_input_error import RowInputError
from batchinfer.errors import InputError
from batchinfer.models.chat import ChatTemplate
from batchinfer.types import ErrorCode, Prompt, RowError, SamplingParams, row_key

DEFAULTS = SamplingParams(max_tokens=9, temperature=0.5)


def build(table: pa.Table, tokenizer, first: int = 0, find: dict | None = None, **options) -> list[Prompt]:
    columns = find_columns(table.schema, **(find or {}))
    return build_prompts(table, first, columns, tokenizer, DEFAULTS, **options)


def codes(prompts: list[Prompt]) -> list[str | None]:
    return [p.error.code.value if p.error else None for p in prompts]


def texts(prompts: list[Prompt]) -> list[str]:
    return [bytes(t for t in p.token_ids.tolist() if t < 256).decode() for p in prompts]


def invalid_utf8() -> pa.Array:
    """["ok", <bytes that are no UTF-8>, null, "ü"], as files hold them; Arrow does not look."""
    binary = pa.array([b"ok", b"\xed\xa0\xbd", None, "ü".encode()], pa.binary())
    return pa.Array.from_buffers(pa.string(), 4, binary.buffers())


@pytest.mark.parametrize(
    "type_",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
    ids=str,
)
def test_null_and_empty_prompts_are_row_errors(tokenizer, type_: pa.DataType) -> None:
    values = pa.array(["a", "", None, "  "])
    column = values.dictionary_encode().cast(type_) if pa.types.is_dictionary(type_) else values.cast(type_)
    prompts = build(pa.table({"prompt": column}), tokenizer, first=10)
    assert [p.row_index for p in prompts] == [10, 11, 12, 13]
    assert codes(prompts) == [None, "prompt_empty", "prompt_null", None]
    assert texts(prompts) == ["a", "", "", "  "]
    assert all(p.token_ids.dtype == np.int32 for p in prompts)


def test_with_a_start_token_an_empty_prompt_runs(bos_tokenizer) -> None:
    prompts = build(pa.table({"prompt": ["a", "", None]}), bos_tokenizer)
    assert codes(prompts) == [None, None, "prompt_null"]
    assert [p.token_ids.tolist() for p in prompts] == [[256, 97], [256], []]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_text_that_is_not_unicode_is_a_row_error(tokenizer, type_: pa.DataType) -> None:
    column = invalid_utf8()
    if type_ != pa.string():
        column = column.cast(pa.binary()).view(pa.binary()).cast(pa.large_binary())
        column = pa.Array.from_buffers(pa.large_string(), 4, column.buffers()).cast(type_, safe=False)
    prompts = build(pa.table({"prompt": column, "n": [0, 1, 2, 3]}), tokenizer)
    assert codes(prompts) == [None, "invalid_prompt", "prompt_null", None]
    assert texts(prompts) == ["ok", "", "", "ü"]


def test_a_dictionary_of_text_that_is_not_unicode(tokenizer) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([3, 1, 0, 1]), invalid_utf8())
    prompts = build(pa.table({"prompt": column}), tokenizer)
    assert codes(prompts) == [None, "invalid_prompt", None, "invalid_prompt"]
    assert texts(prompts) == ["ü", "", "ok", ""]


def test_tokenized_in_batches_and_in_order(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [None if i % 10 == 3 else f"prompt {i}" for i in range(5000)]
    prompts = build(pa.table({"prompt": values}), tokenizer)
    assert texts(prompts) == [value or "" for value in values]
    assert tokenizer.num_calls == 5
    monkeypatch.setattr(prompts_module, "_BATCH_CHARS", 100)
    assert texts(build(pa.table({"prompt": values[:200]}), tokenizer)) == [value or "" for value in values[:200]]
    assert tokenizer.num_calls > 10


def test_chunks_of_a_window_are_one_sequence(tokenizer) -> None:
    table = pa.concat_tables(
        [
            pa.table({"prompt": ["a", "b"]}),
            pa.table({"prompt": ["c"]}),
            pa.table({"prompt": [None, "d"]}, pa.schema([("prompt", pa.string())])),
        ]
    )
    assert texts(build(table.slice(1), tokenizer)) == ["b", "c", "", "d"]


def test_text_that_the_tokenizer_refuses_is_a_row_error(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = tokenizer.encode_batch

    def refuses(texts, add_special_tokens=True):
        if "bad" in texts:
            raise Exception("Missing [UNK] token")
        return encode(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", refuses)
    prompts = build(pa.table({"prompt": ["a", "bad", "b"]}), tokenizer)
    assert codes(prompts) == [None, "invalid_prompt", None]
    assert prompts[1].error is not None
    assert "Missing [UNK] token" in prompts[1].error.message
    assert texts(prompts) == ["a", "", "b"]


def test_keys_come_from_ids_or_tokens(tokenizer) -> None:
    table = pa.table({"prompt": ["a", "a", "a", "b", None], "id": ["x", "x", None, "y", "z"]})
    prompts = build(table, tokenizer)
    tokens = np.array([97], dtype=np.int32)
    assert [p.key for p in prompts] == [row_key("x", tokens)] * 2 + [
        row_key(None, tokens),
        row_key("y", tokens),
        row_key("z", tokens),
    ]
    numbered = build(pa.table({"prompt": ["a", "b"], "id": pa.array([2**64 - 1, 7], pa.uint64())}), tokenizer)
    assert [p.key for p in numbered] == [row_key(2**64 - 1, tokens), row_key(7, tokens)]
    unnamed = build(pa.table({"prompt": ["a", "a", "b"]}), tokenizer)
    assert unnamed[0].key == unnamed[1].key != unnamed[2].key


def test_an_id_that_is_not_unicode_still_is_an_id(tokenizer) -> None:
    prompts = build(pa.table({"prompt": ["a"] * 4, "id": invalid_utf8()}), tokenizer)
    assert codes(prompts) == [None] * 4
    assert len({p.key for p in prompts}) == 4


def test_priorities(tokenizer) -> None:
    table = pa.table({"prompt": ["a"] * 4, "w": [2.5, None, -1.0, float("nan")]})
    prompts = build(table, tokenizer, find={"priority": "w"})
    assert [p.priority for p in prompts] == [2.5, 0.0, -1.0, 0.0]
    assert codes(prompts) == [None, None, None, "invalid_params"]


# Token ids


@pytest.mark.parametrize("type_", [pa.list_(pa.int64()), pa.large_list(pa.uint32()), pa.list_view(pa.int32())], ids=str)
def test_token_ids_run_as_they_are(tokenizer, type_: pa.DataType) -> None:
    column = pa.array([[1, 2], None, [], [256]], type_)
    prompts = build(pa.table({"token_ids": column}), tokenizer)
    assert codes(prompts) == [None, "prompt_null", "prompt_empty", None]
    assert [p.token_ids.tolist() for p in prompts] == [[1, 2], [], [], [256]]
    assert tokenizer.num_calls == 0


def test_token_ids_out_of_range_are_row_errors(tokenizer) -> None:
    table = pa.table({"token_ids": [[1, 257], [-1], [1, None], [2**40], [300]]})
    assert codes(build(table, tokenizer)) == ["invalid_prompt"] * 5
    prompts = build(table, tokenizer, vocab_size=301)
    assert codes(prompts) == [None, "invalid_prompt", "invalid_prompt", "invalid_prompt", None]
    assert prompts[3].error is not None
    assert prompts[3].error.message == f"token id {2**40} at position 0 is not between 0 and 300"


# Messages


def chat(*rows: object) -> pa.Table:
    return pa.table({"messages": list(rows)})


def test_messages_are_rendered_without_a_second_start_token(bos_tokenizer) -> None:
    prompts = build(chat([{"role": "user", "content": "hi"}]), bos_tokenizer)
    assert prompts[0].token_ids.tolist() == list(b"<user>hi<assistant>")


def test_keys_that_only_other_rows_have_are_not_there(tokenizer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": None}}
    rows = [
        [{"role": "user", "content": "hi"}],
        [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "1", "name": "f"}],
    ]
    assert codes(build(chat(*rows), tokenizer)) == [None, None]
    assert tokenizer.seen_messages == [
        [{"role": "user", "content": "hi"}],
        [
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]},
            {"role": "tool", "content": "1", "name": "f"},
        ],
    ]


def test_text_parts_are_joined(tokenizer) -> None:
    parts = [{"type": "text", "text": "a", "url": None}, {"type": "text", "text": "b"}]
    assert codes(build(chat([{"role": "user", "content": parts}]), tokenizer)) == [None]
    assert tokenizer.seen_messages == [[{"role": "user", "content": "ab"}]]
    image = [{"type": "text", "text": "a"}, {"type": "image", "text": None}]
    prompts = build(chat([{"role": "user", "content": image}]), tokenizer)
    assert codes(prompts) == ["invalid_image"]


PNG = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": PNG}}, "message 1 has an image, and the model reads text only"),
        ({"type": "input_image", "image_url": PNG}, "message 1 has an image, and the model reads text only"),
        ({"type": "image", "image": "https://example.org/a.png"}, "the model reads text only"),
        ({"type": "image", "image": {"bytes": b"\xff\xd8\xff\xe0", "path": None}}, "the model reads text only"),
        ({"type": "image_url", "image_url": {"url": ""}}, "message 1 has an unreadable image: it names none"),
        ({"type": "image"}, "message 1 has an unreadable image: it names none"),
        ({"type": "image_url", "image_url": {"url": PNG[:-1]}}, "an unreadable image: its base64 cannot be decoded"),
        (
            {"type": "image_url", "image_url": "data:image/png,x"},
            "an unreadable image: its data URL does not hold base64",
        ),
        ({"type": "image", "image": {"bytes": b"<html>", "path": None}}, "an unreadable image: its bytes are no PNG"),
        ({"type": "image", "image": 5}, "an unreadable image: it is of type int"),
    ],
)
def test_images_are_errors_of_their_own(tokenizer, part: dict, message: str) -> None:
    with pytest.raises(RowInputError, match=re.escape(message)) as error:
        clean_messages([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert error.value.error.code == ErrorCode.INVALID_IMAGE


def test_a_row_with_an_image_leaves_the_others_alone(tokenizer) -> None:
    struct = [{"type": "text", "text": "a", "image_url": None}, {"type": "image_url", "text": None, "image_url": PNG}]
    prompts = build(chat([{"role": "user", "content": struct}], [{"role": "user", "content": struct[:1]}]), tokenizer)
    assert codes(prompts) == ["invalid_image", None]


def test_numbers_in_messages_are_plain_and_nulls_are_gone_everywhere() -> None:
    call = {"function": {"name": "f", "arguments": {"x": np.int64(3), "y": None, "z": np.array([1, 2])}}}
    cleaned = clean_messages([{"role": "assistant", "content": None, "tool_calls": [call], "when": date(2024, 1, 2)}])
    expected = {"function": {"name": "f", "arguments": {"x": 3, "z": [1, 2]}}}
    assert cleaned == [{"role": "assistant", "tool_calls": [expected], "when": "2024-01-02"}]


def test_what_the_template_says_is_said_once(tokenizer) -> None:
    template = ChatTemplate("{{ raise_exception('no ' ~ messages[0].role) }}", {})
    tokenizer.render_chat = template.render
    prompts = build(chat([{"role": "user", "content": "hi"}]), tokenizer)
    assert prompts[0].error == RowError(ErrorCode.INVALID_MESSAGES, "the chat template refused the messages: no user")


def test_rows_that_the_source_could_not_read(tokenizer) -> None:
    columns = InputColumns(prompt="prompt")
    table = pa.table({"prompt": pa.array(["a", None, "c"])})
    prompts = build_prompts(
        table, 10, columns, tokenizer, SamplingParams(), row_errors={11: "x.jsonl, line 12: not JSON", 2: "other"}
    )
    assert [p.error for p in prompts] == [None, RowError(ErrorCode.INVALID_ROW, "x.jsonl, line 12: not JSON"), None]


@pytest.mark.parametrize(
    ("row", "code", "message"),
    [
        (None, "prompt_null", "the messages are null"),
        ([], "invalid_messages", "there are no messages"),
        ([None], "invalid_messages", "message 1 is null, not an object"),
        ([{"role": None, "content": "x"}], "invalid_messages", "message 1 has no role"),
        ([{"role": "", "content": "x"}], "invalid_messages", "message 1 has no role"),
        ([{"role": "user", "content": None}], "invalid_messages", "message 1 (user) has no content"),
        ([{"role": "refused", "content": "x"}], "invalid_messages", "role 'refused' is unknown"),
    ],
)
def test_bad_messages_are_row_errors(tokenizer, row: object, code: str, message: str) -> None:
    good = [{"role": "user", "content": "hi"}]
    prompts = build(chat(good, row, good), tokenizer)
    assert codes(prompts) == [None, code, None]
    assert prompts[1].error is not None
    assert message in prompts[1].error.message
    assert texts(prompts) == ["<user>hi<assistant>", "", "<user>hi<assistant>"]


def test_messages_that_are_not_unicode_are_row_errors(tokenizer) -> None:
    struct = pa.StructArray.from_arrays([pa.array(["user"] * 4), invalid_utf8()], ["role", "content"])
    column = pa.ListArray.from_arrays([0, 1, 2, 3, 4], struct)
    prompts = build(pa.table({"messages": column}), tokenizer)
    assert codes(prompts) == [None, "invalid_messages", "invalid_messages", None]
    assert prompts[1].error is not None
    assert "UTF-8" in prompts[1].error.message


def test_system_goes_first_unless_there_is_one(tokenizer) -> None:
    user = {"role": "user", "content": "hi"}
    prompts = build(chat([user], [{"role": "system", "content": "own"}, user]), tokenizer, system="S")
    assert texts(prompts) == ["<system>S<user>hi<assistant>", "<system>own<user>hi<assistant>"]


def test_what_concerns_all_rows_is_an_input_error(tokenizer, plain_tokenizer) -> None:
    with pytest.raises(InputError, match="--system needs messages: column 'prompt' holds plain prompts"):
        build(pa.table({"prompt": ["a"]}), tokenizer, system="S")
    with pytest.raises(InputError, match="column 'messages' holds messages and the model has no chat template"):
        build(chat([{"role": "user", "content": "hi"}]), plain_tokenizer)


# Sampling parameters of rows


def with_params(*rows: object, type_: pa.DataType | None = None) -> pa.Table:
    return pa.table({"prompt": ["a"] * len(rows), "sampling_params": pa.array(list(rows), type_)})


def test_a_rows_own_parameters_count_before_the_defaults(tokenizer) -> None:
    rows = [
        {"temperature": 1.0, "stop": ["x"]},
        {"temperature": None, "stop": None},
        None,
        {"temperature": 0.0, "stop": []},
    ]
    prompts = build(with_params(*rows), tokenizer)
    assert [p.params.temperature for p in prompts] == [1.0, 0.5, 0.5, 0.0]
    assert [p.params.stop for p in prompts] == [("x",), (), (), ()]
    assert {p.params.max_tokens for p in prompts} == {9}


def test_whole_numbers_may_be_stored_as_floats_and_the_reverse(tokenizer) -> None:
    prompts = build(
        with_params({"max_tokens": 5.0, "temperature": 1}, {"max_tokens": None, "temperature": 0}), tokenizer
    )
    assert [p.params.max_tokens for p in prompts] == [5, 9]
    assert prompts[0].params == SamplingParams(max_tokens=5, temperature=1.0)
    assert type(prompts[0].params.max_tokens) is int
    assert type(prompts[0].params.temperature) is float
    assert codes(build(with_params({"max_tokens": 5.5}), tokenizer)) == ["invalid_params"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be between 1"),
        ({"temperature": -0.5}, "temperature must be between"),
        ({"temperature": float("nan")}, "temperature must be between"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"min_tokens": 10}, "min_tokens (10) is above max_tokens (9)"),
        ({"stop": [""]}, "stop must be non-empty strings"),
        ({"stop": ["a", None]}, "stop must be non-empty strings"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be whole numbers from 0"),
        ({"logprobs_mode": "half"}, "logprobs_mode must be"),
        ({"seed": float("inf")}, "seed must be a whole number, got inf"),
    ],
)
def test_bad_parameters_are_row_errors(tokenizer, values: dict, words: str) -> None:
    prompts = build(with_params(None, values, None), tokenizer)
    assert codes(prompts) == [None, "invalid_params", None]
    assert prompts[1].error is not None
    assert re.search(re.escape(words), prompts[1].error.message)
    assert prompts[1].params == DEFAULTS


def test_equal_parameters_are_checked_once_and_shared(tokenizer) -> None:
    prompts = build(with_params(*({"seed": i % 3} for i in range(300))), tokenizer)
    assert len({id(p.params) for p in prompts}) == 3
    assert [p.params.seed for p in prompts] == [i % 3 for i in range(300)]


def test_large_seeds_are_exact(tokenizer) -> None:
    prompts = build(with_params({"seed": 2**64 - 1}, type_=pa.struct([("seed", pa.uint64())])), tokenizer)
    assert prompts[0].params.seed == 2**64 - 1
