"""Which columns are used, and what is said when that is not clear."""

from __future__ import annotations

import pyarrow as pa
import pytest

from batchinfer.dataset.columns import InputColumns, find_columns, row_param_names
from batchinfer.errors import InputError

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


def schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema(list(types.items()))


@pytest.mark.parametrize("type_", TEXT_TYPES, ids=str)
def test_text_of_every_layout(type_: pa.DataType) -> None:
    assert find_columns(schema(prompt=type_)) == InputColumns(prompt="prompt")
    assert find_columns(schema(q=type_), prompt="q") == InputColumns(prompt="q")


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({"text": pa.string()}, InputColumns(prompt="text")),
        ({"text": pa.string(), "prompt": pa.string()}, InputColumns(prompt="prompt")),
        ({"text": pa.int64(), "messages": MESSAGES}, InputColumns(messages="messages")),
        ({"prompt": MESSAGES}, InputColumns(messages="prompt")),
        ({"messages": pa.large_list(MESSAGES.value_type)}, InputColumns(messages="messages")),
        ({"token_ids": pa.list_(pa.int64())}, InputColumns(token_ids="token_ids")),
        ({"prompt_token_ids": pa.list_(pa.uint16(), 3)}, InputColumns(token_ids="prompt_token_ids")),
        ({"prompt": pa.string(), "id": pa.uint64()}, InputColumns(prompt="prompt", id="id")),
        ({"prompt": pa.string(), "custom_id": pa.string()}, InputColumns(prompt="prompt", id="custom_id")),
        ({"prompt": pa.string(), "custom_id": pa.string(), "id": pa.int8()}, InputColumns(prompt="prompt", id="id")),
        ({"prompt": pa.string(), "id": pa.float64()}, InputColumns(prompt="prompt")),
        (
            {"prompt": pa.string(), "body": pa.string(), "custom_id": pa.string()},
            InputColumns("prompt", id="custom_id"),
        ),
        ({"body": pa.string(), "custom_id": pa.string()}, InputColumns(body="body", id="custom_id")),
    ],
)
def test_found_by_name_and_type(types: dict[str, pa.DataType], expected: InputColumns) -> None:
    assert find_columns(schema(**types)) == expected


def test_named_columns_count_before_found_ones() -> None:
    both = schema(
        prompt=pa.string(), messages=MESSAGES, q=pa.string(), ids=pa.list_(pa.int32()), k=pa.int64(), w=pa.float32()
    )
    assert find_columns(both, prompt="q").prompt == "q"
    assert find_columns(both, prompt="prompt") == InputColumns(prompt="prompt")
    assert find_columns(both, messages="messages") == InputColumns(messages="messages")
    assert find_columns(both, prompt="ids", id="k", priority="w") == InputColumns(token_ids="ids", id="k", priority="w")


def test_two_that_could_be_meant() -> None:
    with pytest.raises(InputError, match="choose --prompt-column prompt or --messages-column messages"):
        find_columns(schema(prompt=pa.string(), messages=MESSAGES))
    with pytest.raises(InputError, match="choose --prompt-column prompt or --prompt-column prompt_token_ids"):
        find_columns(schema(prompt=pa.string(), prompt_token_ids=pa.list_(pa.int32())))
    with pytest.raises(InputError, match="--prompt-column or --messages-column, not both"):
        find_columns(schema(prompt=pa.string(), messages=MESSAGES), prompt="prompt", messages="messages")


def test_nothing_found_lists_what_is_there() -> None:
    with pytest.raises(InputError, match=r"--prompt-column or --messages-column\. Columns: q \(string\), n \(int64\)$"):
        find_columns(schema(q=pa.string(), n=pa.int64()))
    with pytest.raises(InputError, match=r"and 50 more$"):
        find_columns(schema(**{f"c{i}": pa.int8() for i in range(100)}))


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ({"prompt": pa.int64()}, "column 'prompt' must hold text, not int64"),
        ({"prompt": pa.null()}, "column 'prompt' must hold text, not null"),
        ({"messages": pa.string()}, "column 'messages' must hold lists of structs with role and content, not string"),
        ({"messages": pa.list_(pa.struct([("from", pa.string())]))}, "column 'messages' must hold lists of structs"),
        ({"token_ids": pa.list_(pa.float32())}, "column 'token_ids' must hold lists of whole numbers, not list"),
    ],
)
def test_a_usual_name_of_the_wrong_type(types: dict[str, pa.DataType], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_columns(schema(**types))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt": "nope"},
            r"--prompt-column nope: there is no such column. Columns: prompt \(string\), n \(double\)",
        ),
        ({"messages": "nope"}, "--messages-column nope: there is no such column"),
        ({"id": "nope"}, "--id-column nope: there is no such column"),
        ({"priority": "nope"}, "--priority-column nope: there is no such column"),
        ({"prompt": "n"}, "--prompt-column n: the column must hold text or lists of token ids, not double"),
        ({"prompt": "m"}, "column 'm' holds messages: use --messages-column m"),
        ({"messages": "prompt"}, "--messages-column prompt: the column must hold lists of structs.* not string"),
        ({"id": "n"}, "--id-column n: the column must hold text or whole numbers, not double"),
        ({"priority": "prompt"}, "--priority-column prompt: the column must hold numbers, not string"),
    ],
)
def test_a_named_column_that_is_missing_or_wrong(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_columns(schema(prompt=pa.string(), n=pa.float64(), m=MESSAGES), **options)


@pytest.mark.parametrize(
    ("field", "type_"),
    [
        ("max_tokens", pa.float64()),
        ("temperature", pa.int8()),
        ("stop", pa.string()),
        ("stop", pa.list_(pa.large_string())),
        ("stop", pa.list_(pa.null())),
        ("stop_token_ids", pa.list_(pa.int16())),
        ("ignore_eos", pa.bool_()),
        ("logprobs_mode", pa.string()),
        ("seed", pa.null()),
    ],
)
def test_sampling_params_of_fitting_types(field: str, type_: pa.DataType) -> None:
    with_params = schema(prompt=pa.string(), sampling_params=pa.struct([(field, type_)]))
    columns = find_columns(with_params)
    assert columns.params == "sampling_params"
    assert row_param_names(with_params, columns) == {field}


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        (pa.string(), "column 'sampling_params' must be a struct of sampling parameters, not string"),
        (
            pa.struct([("temprature", pa.float32())]),
            "has field 'temprature', which is no sampling parameter; known: max_",
        ),
        (pa.struct([("temperature", pa.string())]), "field 'temperature' cannot have type string"),
        (pa.struct([("ignore_eos", pa.int8())]), "field 'ignore_eos' cannot have type int8"),
        (pa.struct([("stop", pa.list_(pa.int8()))]), "field 'stop' cannot have type list"),
    ],
)
def test_sampling_params_that_cannot_be_used(type_: pa.DataType, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_columns(schema(prompt=pa.string(), sampling_params=type_))


def test_which_parameters_rows_may_set() -> None:
    plain = schema(prompt=pa.string())
    assert row_param_names(plain, find_columns(plain)) == frozenset()
    batch = schema(custom_id=pa.string(), body=pa.string())
    assert {"logprobs", "n"} <= row_param_names(batch, find_columns(batch))
