"""Prompts built with the embedded model's own tokenizer and chat template."""

from __future__ import annotations

import pyarrow as pa
import pytest

from batchinfer.dataset.columns import find_columns
from batchinfer.dataset.prompts import build_prompts
from batchinfer.types import SamplingParams


@pytest.fixture(scope="module")
def real_tokenizer():
    from batchinfer.models.source import resolve_model

    return resolve_model("smollm2-135m").tokenizer


def build(table: pa.Table, tokenizer, **options):
    return build_prompts(table, 0, find_columns(table.schema), tokenizer, SamplingParams(), **options)


def test_messages_equal_one_by_one_encoding(real_tokenizer) -> None:
    rows = [
        [{"role": "user", "content": "What is 12 + 30?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Héllo 🙂 汉字\n\n  x"}],
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello!", "name": "bot"},
            {"role": "user", "content": ""},
        ],
    ]
    prompts = build(pa.table({"messages": rows}), real_tokenizer)
    assert [p.error for p in prompts] == [None] * 3
    assert [p.token_ids.tolist() for p in prompts] == [real_tokenizer.encode_chat(row).tolist() for row in rows]
    with_system = build(pa.table({"messages": rows[:1]}), real_tokenizer, system="Be kind.")
    expected = real_tokenizer.encode_chat([{"role": "system", "content": "Be kind."}, *rows[0]])
    assert with_system[0].token_ids.tolist() == expected.tolist()


def test_plain_prompts_and_rows_that_cannot_run(real_tokenizer) -> None:
    prompts = build(pa.table({"prompt": ["a 123", "", None, "  "]}), real_tokenizer)
    assert [p.error and p.error.code.value for p in prompts] == [None, "prompt_empty", "prompt_null", None]
    assert prompts[0].token_ids.tolist() == real_tokenizer.encode_batch(["a 123"])[0].tolist()
    assert real_tokenizer.decode(prompts[3].token_ids) == "  "


def test_token_ids_of_the_models_whole_vocabulary(real_tokenizer) -> None:
    last = real_tokenizer.num_ids - 1
    prompts = build(pa.table({"prompt_token_ids": [[0, last], [last + 1]]}), real_tokenizer)
    assert [p.error and p.error.code.value for p in prompts] == [None, "invalid_prompt"]
