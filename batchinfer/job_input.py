"""What a job reads: its rows and the description of its model. No weights are touched here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from batchinfer.errors import InputError
from batchinfer.params import ResolvedParams, resolve_params
from batchinfer.settings import JobSettings
from batchinfer.types import Prompt, SamplingParams

if TYPE_CHECKING:
    import pyarrow as pa

    from batchinfer.dataset.columns import InputColumns
    from batchinfer.dataset.prompts import PromptTokenizer
    from batchinfer.dataset.source import PromptSource
    from batchinfer.dataset.windows import InputWindow
    from batchinfer.models.source import ModelSource

ModelResolver = Callable[[str], "ModelSource"]
T = TypeVar("T")


class JobError(RuntimeError):
    """A job that had begun could not go on. The message names the rows."""


@contextmanager
def unreadable_is_input_error(what: str) -> Iterator[None]:
    """The system's refusals (rights, broken links, disks) before a job begins are the user's to fix."""
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise InputError(f"{what}: {error.strerror or error}{place}") from error


@dataclass(frozen=True)
class InputRows:
    """Rows opened and checked: readable, not empty, columns there and of the right type."""

    name: str
    source: PromptSource
    columns: InputColumns
    row_fields: frozenset[str]  # sampling parameters that rows may set themselves
    windows: Iterator[pa.Table] = field(repr=False)

    @property
    def schema(self) -> pa.Schema:
        return self.source.schema


def check_is_no_input(settings: JobSettings) -> None:
    """Refuse an output that would replace a file of the input, which --overwrite does not mean. Raises InputError."""
    from batchinfer.dataset.source import reads_file
    from batchinfer.output.place import JobPlace

    assert settings.output is not None
    if JobPlace.of(settings.output).kind == "folder":
        _check_folders_are_apart(settings.prompts, settings.output)
    if reads_file(settings.prompts, settings.output):
        raise InputError(
            f"output {settings.output} is a file of the input {settings.prompts}, which it would replace: "
            "choose another name"
        )


def _check_folders_are_apart(prompts: str, output: Path) -> None:
    """Parts would be read as prompts by the run that continues the job, and --overwrite would remove prompts."""
    from batchinfer.dataset.parquet import find_parquet_files

    target = output.resolve()
    if Path(prompts).is_dir() and Path(prompts).resolve() in (target, *target.parents):
        raise InputError(f"output {output} lies in the folder of the input {prompts}: choose another folder")
    if target.is_dir():
        try:
            files = find_parquet_files(prompts)
        except InputError:  # no files, or none that are there
            return
        inside = [path for path in files if target in path.resolve().parents]
        if inside:
            raise InputError(f"{inside[0]} of the input lies in output {output}: choose another folder")


def open_input(settings: JobSettings, window_rows: int | None = None) -> InputRows:
    """Open PROMPTS, `window_rows` at a time (None: WINDOW_ROWS). Raises InputError naming the file or column."""
    from batchinfer.dataset.columns import find_columns, row_param_names
    from batchinfer.dataset.source import WINDOW_ROWS, open_source

    with unreadable_is_input_error(f"cannot read {settings.prompts}"):
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
    with unreadable_is_input_error(f"cannot read {settings.prompts}"):
        # Read now: what is empty or damaged from the beginning is known before the model loads.
        first = next(source.windows(1, columns=columns.used(source.schema) if source.rereads else None), None)
    if first is None or first.num_rows == 0:
        raise InputError(f"{settings.prompts} has no rows; nothing to do")
    windows = source.windows(window_rows or WINDOW_ROWS)
    return InputRows(settings.prompts, source, columns, row_param_names(source.schema, columns), windows)


def resolve_job(
    settings: JobSettings, rows: InputRows, resolve: ModelResolver | None = None
) -> tuple[ModelSource, ResolvedParams]:
    """The model's description and the sampling parameters. Raises InputError if they cannot be used."""
    from batchinfer.dataset.prompts import check_can_build
    from batchinfer.models.spec import choose_max_model_len

    check_device(settings.engine.device)
    model = find_model(settings.model, settings.adapter, resolve)
    tokenizer = model.tokenizer
    choose_max_model_len(settings.engine.max_model_len, model.spec, settings.model)  # before the weights are read
    check_can_build(rows.columns, tokenizer, settings.system)
    return model, resolve_params(settings.sampling, model.generation_defaults, rows.row_fields)


def check_device(name: str) -> None:
    """Raises InputError for a device that is not there, before anything is read for it."""
    if name not in ("auto", "cpu"):  # which are always there: no need to load torch yet
        from batchinfer.engine.machine import choose_device

        choose_device(name)


def find_model(name: str, adapter: str | None, resolve: ModelResolver | None = None) -> ModelSource:
    """The model, with its adapter and its tokenizer read. Raises InputError if they cannot be used."""
    from batchinfer.models.source import resolve_model, with_adapter

    with unreadable_is_input_error(f"cannot read model {name}"):
        model = (resolve or resolve_model)(name)
        if adapter is not None:
            model = with_adapter(model, adapter)
        assert model.tokenizer  # reads it
        return model


def prompt_windows(
    rows: InputRows,
    tokenizer: PromptTokenizer,
    params: SamplingParams,
    system: str | None,
    vocab_size: int,
    *,
    window_rows: int,
    start: int = 0,
) -> Iterator[tuple[InputWindow, list[Prompt]]]:
    """Windows from row `start` on with their prompts; nothing is held of those that were handed out.

    Raises JobError naming the window's rows.
    """
    from batchinfer.dataset.prompts import build_prompts
    from batchinfer.dataset.windows import input_windows

    def build(window: InputWindow) -> tuple[InputWindow, list[Prompt]]:
        first, full = window.first_row_index, window.full
        window = replace(window, full=lambda: _readable(rows.name, full()))
        try:
            return window, build_prompts(
                window.table,
                first,
                rows.columns,
                tokenizer,
                params,
                system=system,
                vocab_size=vocab_size,
                row_errors=rows.source.row_errors,
            )
        except InputError:
            raise
        except Exception as error:
            raise JobError(f"{rows.name}, rows {first} to {first + window.num_rows - 1}: {error}") from error

    columns = rows.columns.used(rows.schema)
    return map(build, _readable(rows.name, input_windows(rows.source, window_rows, columns=columns, start=start)))


def _readable(name: str, pieces: Iterator[T]) -> Iterator[T]:
    """Once the job has begun, what cannot be read is no longer a reason to refuse it, but to stop."""
    try:
        yield from pieces
    except InputError as error:  # which names the file
        raise JobError(str(error)) from error
    except Exception as error:
        raise JobError(f"{name}: {error}") from error


def prompts_of(
    rows: InputRows, tokenizer: PromptTokenizer, params: SamplingParams, system: str | None, vocab_size: int
) -> Iterator[tuple[int, pa.Table, list[Prompt]]]:
    """(index of the first row, rows, prompts) of each window. Raises JobError naming the window's rows."""
    from batchinfer.dataset.prompts import build_prompts

    first_row_index = 0
    while True:
        try:
            table = next(rows.windows, None)
            if table is None:
                return
            prompts = build_prompts(
                table,
                first_row_index,
                rows.columns,
                tokenizer,
                params,
                system=system,
                vocab_size=vocab_size,
                row_errors=rows.source.row_errors,
            )
        except InputError as error:
            if first_row_index == 0:
                raise
            raise JobError(f"rows from {first_row_index} on: {error}") from error
        except Exception as error:
            raise JobError(f"{rows.name}, rows from {first_row_index} on: {error}") from error
        yield first_row_index, table, prompts
        first_row_index += table.num_rows
