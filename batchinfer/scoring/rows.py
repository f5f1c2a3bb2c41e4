"""Rows of a table -> items to score. One bad row is that row's error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.dataset.prompts import build_prompts, cells
from batchinfer.scoring.chat import ChatEncoder, Turns
from batchinfer.scoring.columns import RunColumns, ScoreColumns
from batchinfer.scoring.encode import Bos, ScoreTokenizer, TextEncoder
from batchinfer.scoring.item import ScoreItem
from batchinfer.types import ErrorCode, Prompt, SamplingParams


class RowReader:
    """Makes the items of windows of rows.

    Args:
        vocab_size: bounds given token ids.
        eos_token_ids: ids that end a turn of a chat.
        checks_text: compare a run's outputs with their texts: the run had another tokenizer.
        row_errors: the source's, by row.
    Raises:
        InputError: the tokenizer cannot do what the columns or `bos` need.
    """

    def __init__(
        self,
        columns: ScoreColumns,
        tokenizer: ScoreTokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        bos: Bos = "auto",
        turns: Turns = "assistant",
        system: str | None = None,
        checks_text: bool = False,
        row_errors: Mapping[int, str] | None = None,
    ) -> None:
        self.columns = columns
        self._row_errors = row_errors or {}
        self.encoder = TextEncoder(tokenizer, vocab_size, bos)
        self._chat = ChatEncoder(tokenizer, eos_token_ids, turns, system) if columns.messages is not None else None
        self._checks_text = checks_text

    def read(self, table: pa.Table, first_row_index: int = 0) -> list[ScoreItem]:
        """One item per row."""
        items = self._read(table, first_row_index)
        for place in range(table.num_rows if self._row_errors else 0):
            message = self._row_errors.get(first_row_index + place)
            if message is not None:
                items[place] = ScoreItem.failed(ErrorCode.INVALID_ROW, message)
        return items

    def _read(self, table: pa.Table, first_row_index: int) -> list[ScoreItem]:
        columns = self.columns
        if columns.run is not None:
            return self._read_run(table, first_row_index, columns.run)
        if self._chat is not None:
            return [self._chat.item(value) for value in cells(table.column(columns.messages))]
        if columns.text is not None:
            values = list(cells(table.column(columns.text)))
            return self.encoder.token_ids(values) if columns.holds_ids else self.encoder.texts(values)
        pairs = zip(cells(table.column(columns.context)), cells(table.column(columns.continuation)), strict=True)
        return self.encoder.pairs(list(pairs))

    def _read_run(self, table: pa.Table, first_row_index: int, run: RunColumns) -> list[ScoreItem]:
        prompts = build_prompts(
            table,
            first_row_index,
            run.input,
            self.encoder.tokenizer,
            SamplingParams(),
            system=run.system,
            vocab_size=self.encoder.vocab_size,
        )
        names = (run.output_token_ids, run.num_prompt_tokens, run.output)
        return [
            self._run_item(prompt, *row)
            for prompt, *row in zip(prompts, *(cells(table.column(name)) for name in names), strict=True)
        ]

    def _run_item(self, prompt: Prompt, output_ids: list[int] | None, num_prompt_tokens: int, output: Any) -> ScoreItem:
        if output_ids is None:
            return ScoreItem.failed(ErrorCode.NO_OUTPUT, "the run's row failed: it has no output")
        if prompt.error is not None:
            return ScoreItem(error=prompt.error)
        if len(prompt.token_ids) != num_prompt_tokens:
            return ScoreItem.failed(
                ErrorCode.PROMPT_DIFFERS,
                f"the run's prompt had {num_prompt_tokens} tokens and has {len(prompt.token_ids)} under this model's "
                "tokenizer and chat template",
            )
        bad = [token_id for token_id in output_ids if not 0 <= token_id < self.encoder.vocab_size]
        if bad:
            message = f"the run's output has token id {bad[0]}, this model {self.encoder.vocab_size} ids"
            return ScoreItem.failed(ErrorCode.PROMPT_DIFFERS, message)
        if self._checks_text and not self.encoder.tokenizer.decode(output_ids).startswith(output):
            message = "the run's output is another text under this model's tokenizer"
            return ScoreItem.failed(ErrorCode.PROMPT_DIFFERS, message)
        return self.encoder.continued(prompt.token_ids, np.array(output_ids, dtype=np.int32))
