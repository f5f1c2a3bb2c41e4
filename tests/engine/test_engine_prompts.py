"""What Engine.generate takes for a prompt, and which of its faults are a row's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import TINY_SPEC, FakeModelSource
from tiny_models import tiny_engine

from batchinfer import Engine, SamplingParams
from batchinfer.config import EngineConfig
from batchinfer.engine.prompts import make_prompt
from batchinfer.errors import InputError
from batchinfer.types import ErrorCode

PARAMS = SamplingParams(max_tokens=2)


def test_bad_rows_are_row_errors_and_the_others_run() -> None:
    prompts: list[Any] = [
        "good",
        "half \ud83d",
        None,
        "",
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": "\ud83d"}],
        [{"content": "no role"}],
        [{"role": "user", "content": [{"type": "image_url", "url": "x"}]}],
        [9, 8],
    ]
    found = [samples[0] for samples in tiny_engine().generate(prompts, PARAMS)]
    assert [completion.error and completion.error.code for completion in found] == [
        None,
        ErrorCode.INVALID_PROMPT,
        ErrorCode.PROMPT_NULL,
        ErrorCode.PROMPT_EMPTY,
        None,
        *[ErrorCode.INVALID_MESSAGES] * 2,
        ErrorCode.INVALID_IMAGE,
        None,
    ]
    assert found[1].error is not None
    assert found[1].error.message == "the prompt is not valid Unicode: \\ud83d at character 5"


def test_messages_that_the_template_refuses_are_a_row_error() -> None:
    class Refusing:
        chat_template = "a template"

        def encode_chat(self, messages: list[dict[str, Any]]) -> np.ndarray:
            raise ValueError("roles must alternate")

    prompt = make_prompt([{"role": "user", "content": "a"}], PARAMS, Refusing(), 300, 3, None)
    assert (prompt.row_index, prompt.error and prompt.error.code) == (3, ErrorCode.INVALID_MESSAGES)
    assert "roles must alternate" in str(prompt.error)


def test_messages_come_as_lists_arrays_and_parts_of_text() -> None:
    engine = tiny_engine()
    plain = [{"role": "user", "content": "hi"}]
    arrays = np.array([{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None}], dtype=object)
    expected = engine.prompt(plain, PARAMS)
    assert expected.error is None
    for content in (tuple(plain), arrays):
        assert engine.prompt(content, PARAMS).token_ids.tolist() == expected.token_ids.tolist()


def test_messages_without_a_template_are_a_value_error() -> None:
    class Templateless:
        chat_template = None

    with pytest.raises(ValueError, match="no chat template"):
        make_prompt([{"role": "user", "content": "a"}], PARAMS, Templateless(), 300, 0, None)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [None], [{"max_tokens": 3}]])
def test_params_of_another_kind_are_told(params: Any) -> None:
    with pytest.raises(ValueError, match="params must be SamplingParams"):
        tiny_engine().generate(["a"], params)


def test_kv_memory_below_a_block_is_refused_before_the_weights_are_read() -> None:
    with pytest.raises(InputError, match=r"--kv-memory is 100 bytes, one KV block of 64 tokens takes"):
        Engine(FakeModelSource(spec=TINY_SPEC), EngineConfig(kv_memory_bytes=100))  # type: ignore[arg-type]


def test_kv_memory_that_cannot_be_had_is_an_input_error() -> None:
    engine = tiny_engine(EngineConfig(kv_memory_bytes=2**60))
    with pytest.raises(InputError, match=r"no memory for .* bytes of KV: lower --kv-memory"):
        engine.generate(["a"], PARAMS)
