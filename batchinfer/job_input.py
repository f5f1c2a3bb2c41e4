"""What a job reads: its rows and the description of its model. No weights are touched here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from batchinfer.errors import InputError
from batchinfer.params import ResolvedParams, resolve_params
from batchinfer.settings import JobSettings
from batchinfer.types import Prompt, SamplingParams

if TYPE_CHECKING:
    import pyarrow as pa

    from batchinfer.dataset.columns import InputColumns
    from batchinfer.dataset.source import PromptSource
    from batchinfer.models.source import ModelSource

#: Rows that are planned, run and written together.
WINDOW_ROWS = 65_536

ModelResolver = Callable[[str], "ModelSource"]


class JobError(RuntimeError):
    """A job that had begun could not go on. The message names the rows."""


@dataclass(frozen=True)
class InputRows:
    """Rows opened and checked: readable, not empty, columns there and of the right type."""

    source: PromptSource
    columns: InputColumns
    row_fields: frozenset[str]  # of the sampling_params column; empty without one
    windows: Iterator[pa.Table] = field(repr=False)

    @property
    def schema(self) -> pa.Schema:
        return self.source.schema


def open_input(settings: JobSettings, window_rows: int = WINDOW_ROWS) -> InputRows:
    """Raises InputError naming the file or column at fault."""
    from batchinfer.dataset.columns import find_columns
    from batchinfer.dataset.source import open_source

    source = open_source(settings.prompts, limit=settings.limit)
    columns = find_columns(
        source.schema,
        prompt=settings.prompt_column,
        messages=settings.messages_column,
        id=settings.id_column,
        priority=settings.priority_column,
    )
    if settings.engine.policy == "priority" and columns.priority is None:
        raise InputError("--policy priority needs --priority-column, a column of numbers")
    windows = iter(source.windows(window_rows))
    first = next(windows, None)  # read now: an empty input is known before the model loads
    if first is None or first.num_rows == 0:
        raise InputError(f"{settings.prompts} has no rows; nothing to do")
    return InputRows(source, columns, _row_fields(source.schema, columns), chain([first], windows))


def resolve_job(
    settings: JobSettings, rows: InputRows, resolve: ModelResolver | None = None
) -> tuple[ModelSource, ResolvedParams]:
    """The model's description and the sampling parameters. Raises InputError if they cannot be used."""
    if resolve is None:
        from batchinfer.models.source import resolve_model as resolve
    model = resolve(settings.model)
    limit = settings.engine.max_model_len
    if limit is not None and limit > model.spec.max_position:
        raise InputError(
            f"--max-model-len {limit} is above the {model.spec.max_position} tokens that {settings.model} was made for"
        )
    return model, resolve_params(settings.sampling, model.generation_defaults, rows.row_fields)


def prompts_of(
    settings: JobSettings, rows: InputRows, model: ModelSource, params: SamplingParams
) -> Iterator[tuple[int, pa.Table, list[Prompt]]]:
    """(index of the first row, rows, prompts) of each window."""
    from batchinfer.dataset.prompts import build_prompts

    first_row_index = 0
    while True:
        try:
            table = next(rows.windows, None)
            if table is None:
                return
            prompts = build_prompts(
                table, first_row_index, rows.columns, model.tokenizer, params, system=settings.system
            )
        except InputError:
            raise
        except Exception as error:
            raise JobError(f"{settings.prompts}, rows from {first_row_index} on: {error}") from error
        yield first_row_index, table, prompts
        first_row_index += table.num_rows


def _row_fields(schema: pa.Schema, columns: InputColumns) -> frozenset[str]:
    if columns.params is None:
        return frozenset()
    return frozenset(part.name for part in schema.field(columns.params).type)
