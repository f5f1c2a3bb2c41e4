"""Reference texts for perplexity: a file of them, or the reference column behind the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from batchinfer.errors import InputError
from batchinfer.evals.model_inputs import build, continued, prompt_columns
from batchinfer.evals.result import Cell, Table
from batchinfer.evals.rows import PairedRows, Side
from batchinfer.evals.stats.bootstrap import bca_intervals
from batchinfer.scoring.item import ScoreItem
from batchinfer.scoring.result import RowScore
from batchinfer.types import ErrorCode, TokenIds

if TYPE_CHECKING:
    from batchinfer.engine.engine import Engine

Floats = npt.NDArray[np.float64]


def read_texts(spec: str) -> list[str | None]:
    """The column text of a dataset. Raises InputError if it cannot be read or has no such column of text."""
    from batchinfer.dataset.prompts import cells
    from batchinfer.dataset.row_params import is_text
    from batchinfer.dataset.source import open_source

    try:
        source = open_source(spec)
        if "text" not in source.schema.names or not is_text(source.schema.field("text").type):
            raise InputError(f"--texts {spec}: there must be a column 'text' of text")
        return [value for table in source.windows() for value in cells(table.column("text"))]
    except OSError as error:
        raise InputError(f"--texts {spec}: cannot be read: {error.strerror or error}") from error


def reference_items(pairs: PairedRows, side: Side, engine: Engine) -> list[ScoreItem]:
    """The reference of each prompt behind it, as the side's model would read both; [num_prompts].

    A plain prompt that does not end in whitespace and a reference that does not begin with it get a space in
    between, as in most few-shot prompts; a chat's answer begins where the generation prompt ends.
    """
    assert pairs.references is not None
    rows = np.unique(pairs.prompt_index, return_index=True)[1].tolist()  # the first sample of each prompt
    columns = prompt_columns(pairs, side)
    prompts = None if columns is None else build(pairs, side, engine, columns)
    texts = None if columns is None or columns.prompt is None else pairs.inputs.column(columns.prompt).to_pylist()
    items = []
    for row in rows:
        reference = pairs.references[row]
        if reference is None:
            items.append(ScoreItem.failed(ErrorCode.PROMPT_NULL, "no reference"))
        elif prompts is not None and prompts[row].error is not None:
            items.append(ScoreItem(error=prompts[row].error))
        else:
            prompt = np.empty(0, dtype=np.int32) if prompts is None else prompts[row].token_ids
            before = texts[row] if texts is not None else ""
            items.append(continued(engine, prompt, _ids(engine, _joint(before, reference) + reference)))
    return items


def _joint(prompt: str | None, reference: str) -> str:
    is_apart = not prompt or prompt[-1].isspace() or reference[:1].isspace()
    return "" if is_apart else " "


def _ids(engine: Engine, text: str) -> TokenIds:
    return engine.tokenizer.encode_batch([text], add_special_tokens=False)[0]


@dataclass(frozen=True, slots=True)
class TextScores:
    """One model on the texts; rows that have no score are zeros."""

    nll: Floats  # [num_texts] nats
    num_tokens: Floats
    num_bytes: Floats

    @classmethod
    def of(cls, rows: Sequence[RowScore]) -> TextScores:
        return cls(
            nll=np.array([row.nll or 0.0 for row in rows]),
            num_tokens=np.array([row.num_scored_tokens for row in rows], dtype=np.float64),
            num_bytes=np.array([row.num_scored_bytes for row in rows], dtype=np.float64),
        )


def texts_table(before: TextScores, after: TextScores, seed: int) -> Table:
    """Figures of the corpus under both models, with 95 % intervals of their differences over texts."""
    sums = np.stack(
        (before.nll, before.num_tokens, before.num_bytes, after.nll, after.num_tokens, after.num_bytes), axis=1
    )

    def statistic(totals: Floats) -> Floats:
        nll_1, tokens_1, bytes_1, nll_2, tokens_2, bytes_2 = np.moveaxis(totals, -1, 0)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            per_token = np.exp(nll_2 / tokens_2) - np.exp(nll_1 / tokens_1)
            per_byte = (nll_2 / bytes_2 - nll_1 / bytes_1) / np.log(2)
        return np.stack((per_token, per_byte), axis=-1)

    found = bca_intervals(sums, statistic, np.random.default_rng(seed))
    figures = [
        ("perplexity", np.exp(_ratio(before.nll, before.num_tokens)), np.exp(_ratio(after.nll, after.num_tokens))),
        (
            "bits per byte",
            _ratio(before.nll, before.num_bytes) / np.log(2),
            _ratio(after.nll, after.num_bytes) / np.log(2),
        ),
    ]
    rows: list[tuple[Cell, ...]] = [
        (name, _cell(one), _cell(two), *map(_cell, (interval.value, interval.low, interval.high)))
        for (name, one, two), interval in zip(figures, found, strict=True)
    ]
    rows.append(("tokens", before.num_tokens.sum(), after.num_tokens.sum(), None, None, None))
    rows.append(("texts", *(int((one.num_tokens > 0).sum()) for one in (before, after)), None, None, None))
    return Table(
        "reference_texts",
        "Reference texts",
        ("of all texts", "before", "after", "difference", "95 % from", "to"),
        tuple(rows),
        note="exp(sum of nll / tokens), and sum of nll / ln 2 / bytes; intervals by resampling texts.",
    )


def _ratio(sums: Floats, counts: Floats) -> float:
    total = float(counts.sum())
    return float(sums.sum()) / total if total else float("nan")


def _cell(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
