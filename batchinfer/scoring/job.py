"""One scoring job: texts -> tokens -> engine -> scores, a window of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from batchinfer.errors import InputError
from batchinfer.job import EngineFactory, EngineLike, engine_settings
from batchinfer.job_input import JobError, ModelResolver, check_device, find_model, unreadable_is_input_error
from batchinfer.progress import ProgressReporter, QuietProgress, Snapshot, TokensLeft
from batchinfer.scoring.metadata import score_metadata, token_policy
from batchinfer.scoring.run import score_items
from batchinfer.scoring.settings import ScoreSettings
from batchinfer.scoring.summary import ScoreSummary, ScoreTally
from batchinfer.scoring.windows import Window
from batchinfer.summary import EngineCounts

if TYPE_CHECKING:
    import pyarrow as pa

    from batchinfer.config import EngineConfig
    from batchinfer.dataset.source import PromptSource
    from batchinfer.models.source import ModelSource
    from batchinfer.output.writer import ParquetOutput
    from batchinfer.scoring.columns import ScoreColumns
    from batchinfer.scoring.item import ScoreItem
    from batchinfer.scoring.rows import RowReader


#: Put before the names of the columns that a run's output gets: it has a column error itself.
RUN_PREFIX = "score_"


@dataclass(frozen=True)
class _Texts:
    """The input, opened and checked."""

    source: PromptSource
    columns: ScoreColumns
    windows: Iterator[pa.Table]


def run_score(
    settings: ScoreSettings,
    progress: ProgressReporter | None = None,
    *,
    engine_factory: EngineFactory | None = None,
    resolve: ModelResolver | None = None,
    check_interrupt: Callable[[], None] = lambda: None,
    window_rows: int | None = None,
) -> ScoreSummary:
    """Score the texts and write the scores; returns the figures of the corpus.

    Everything that can be checked without the model's weights is checked before they are read. The output
    appears whole at its name or not at all. `check_interrupt` is called after every step.

    Raises:
        InputError: the settings, the input, the output's place or the model are not usable.
        JobError: rows could not be read after the job had begun.
    """
    from batchinfer.output.schema import extended_schema
    from batchinfer.output.writer import ParquetOutput
    from batchinfer.scoring.output import ScoreResultColumns, score_fields

    progress = progress or QuietProgress()
    tally = ScoreTally()
    _check_output(settings)
    with tally.timed("read"):
        texts = _open(settings, window_rows)
    settings = _with_prefix(settings, texts.columns)
    assert settings.output_prefix is not None
    fields = score_fields(
        texts.source.schema.names,
        token_logprobs=settings.token_logprobs,
        entropies=settings.entropies,
        prefix=settings.output_prefix,
    )
    schema = extended_schema(texts.source.schema, fields)
    try:
        with tally.timed("load"):
            model, window = _resolve(settings, resolve)
            digests = _digests(model)
            warnings = _warnings(texts.columns, model, digests)
            reader = _reader(settings, texts, model, checks_text=bool(warnings))
            progress.stage(f"loading {settings.model}")
            engine = (engine_factory or _load_engine)(model, settings.engine)
            if engine.device_note:
                progress.stage(engine.device_note)
        with ParquetOutput(settings.output, schema, settings.overwrite, ScoreResultColumns()) as output:
            progress.stage(f"scoring {settings.texts}")
            job = _Job(settings, engine, reader, window, tally, progress, check_interrupt, texts.source.num_rows)
            job.run(texts.windows, output)
            policy = token_policy(texts.columns, reader.encoder, window, settings)
            summary = tally.summary(str(settings.output), policy, warnings)
            names = [field.name.removeprefix(settings.output_prefix) for field in fields]
            with tally.timed("write"):
                output.commit(
                    score_metadata(settings, texts.columns, model, digests, engine_settings(engine), summary, names)
                )
    except BaseException as error:
        error.add_note(f"nothing was written to {settings.output}")
        raise
    return tally.summary(str(settings.output), policy, warnings)


class _Job:
    """The windows of rows of one job, scored one after the other."""

    def __init__(
        self,
        settings: ScoreSettings,
        engine: EngineLike,
        reader: RowReader,
        window: Window,
        tally: ScoreTally,
        progress: ProgressReporter,
        check_interrupt: Callable[[], None],
        num_rows: int | None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._reader = reader
        self._window = window
        self._tally = tally
        self._progress = progress
        self._check_interrupt = check_interrupt
        self._num_rows = num_rows

    def run(self, tables: Iterator[pa.Table], output: ParquetOutput) -> None:
        while True:
            with self._tally.timed("read"):
                window = self._next(tables)
            if window is None:
                return
            table, items = window
            first_row_index = self._tally.num_rows
            with self._tally.timed("run"):
                rows = score_items(
                    self._engine,
                    items,
                    self._window,
                    token_logprobs=self._settings.token_logprobs,
                    entropies=self._settings.entropies,
                    on_step=self._on_step,
                    first_row_index=first_row_index,
                )
            for row in rows:
                self._tally.add(row)
            self._tally.end_window(self._engine.stats)
            with self._tally.timed("write"):
                output.write_window(table, first_row_index, rows)

    def _next(self, tables: Iterator[pa.Table]) -> tuple[pa.Table, list[ScoreItem]] | None:
        """Raises JobError naming the rows."""
        try:
            table = next(tables, None)
            return None if table is None else (table, self._reader.read(table, self._tally.num_rows))
        except InputError:
            raise
        except Exception as error:
            raise JobError(f"{self._settings.texts}, rows from {self._tally.num_rows} on: {error}") from error

    def _on_step(self, stats: EngineCounts) -> None:
        self._check_interrupt()
        tally, num_rows = self._tally, self._num_rows
        left = stats.num_prompt_tokens - stats.num_prompt_tokens_shareable - stats.num_prompt_tokens_computed
        # The engine counts a row's windows one by one.
        num_done = tally.num_rows if num_rows is None else min(num_rows, tally.num_rows + stats.num_rows_done)
        self._progress.update(
            Snapshot(
                num_rows=num_rows,
                num_rows_done=num_done,
                num_rows_failed=tally.num_rows_failed + stats.num_rows_failed,
                num_seqs_running=stats.num_seqs_running,
                num_prompt_tokens_computed=tally.engine["num_prompt_tokens_computed"]
                + stats.num_prompt_tokens_computed,
                num_prompt_tokens_reused=tally.engine["num_prompt_tokens_reused"] + stats.num_prompt_tokens_reused,
                num_output_tokens=0,
                kv_use=stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0,
                left=TokensLeft(max(0, left), 0),
            )
        )


def _check_output(settings: ScoreSettings) -> None:
    from batchinfer.dataset.source import reads_file
    from batchinfer.output.writer import check_output

    with unreadable_is_input_error(f"cannot write output {settings.output}"):
        check_output(settings.output, settings.overwrite)
        if reads_file(settings.texts, settings.output):
            raise InputError(
                f"output {settings.output} is a file of the input {settings.texts}, which it would replace: "
                "choose another name"
            )


def _open(settings: ScoreSettings, window_rows: int | None) -> _Texts:
    from batchinfer.dataset.source import WINDOW_ROWS, open_source
    from batchinfer.scoring.columns import find_score_columns

    with unreadable_is_input_error(f"cannot read {settings.texts}"):
        source = open_source(settings.texts, limit=settings.limit)
        columns = find_score_columns(
            source.schema,
            text=settings.text_column,
            context=settings.context_column,
            continuation=settings.continuation_column,
            messages=settings.messages_column,
        )
        windows = iter(source.windows(window_rows or WINDOW_ROWS))
        first = next(windows, None)  # read now: an empty input is known before the model loads
    if first is None or first.num_rows == 0:
        raise InputError(f"{settings.texts} has no rows; nothing to do")
    _check_options(settings, columns)
    return _Texts(source, columns, chain([first], windows))


def _check_options(settings: ScoreSettings, columns: ScoreColumns) -> None:
    """Options that would change nothing are refused: whoever gives one expects that it does."""
    if settings.system is not None and columns.messages is None:
        raise InputError("--system needs messages; give it with --messages-column, or put it into the texts")
    if settings.turns != "assistant" and columns.messages is None:
        raise InputError(f"--score {settings.turns} is about messages, and there are none; give --messages-column")
    if settings.bos != "auto" and (columns.messages or columns.run or columns.holds_ids):
        what = "messages" if columns.messages else "the outputs of a run" if columns.run else "token ids"
        raise InputError(f"--bos {settings.bos} is about texts: {what} are read as they are, so leave it out")


def _with_prefix(settings: ScoreSettings, columns: ScoreColumns) -> ScoreSettings:
    if settings.output_prefix is not None:
        return settings
    return replace(settings, output_prefix="" if columns.run is None else RUN_PREFIX)


def _resolve(settings: ScoreSettings, resolve: ModelResolver | None) -> tuple[ModelSource, Window]:
    from batchinfer.models.spec import choose_max_model_len

    check_device(settings.engine.device)
    model = find_model(settings.model, settings.adapter, resolve)
    max_model_len = choose_max_model_len(settings.engine.max_model_len, model.spec, settings.model)
    return model, Window.of(settings.window, settings.stride, max_model_len)


def _reader(settings: ScoreSettings, texts: _Texts, model: ModelSource, *, checks_text: bool) -> RowReader:
    from batchinfer.scoring.rows import RowReader

    return RowReader(
        texts.columns,
        model.tokenizer,
        model.spec.vocab_size,
        model.eos_token_ids,
        bos=settings.bos,
        turns=settings.turns,
        system=settings.system,
        checks_text=checks_text,
        row_errors=texts.source.row_errors,
    )


def _warnings(columns: ScoreColumns, model: ModelSource, digests: dict[str, str | None]) -> tuple[str, ...]:
    """What may make the scores of a run's output mean something else than they seem to."""
    run = columns.run
    if run is None:
        return ()
    uses_template = run.input.messages is not None or run.input.body is not None
    names = ("tokenizer", "chat_template") if uses_template else ("tokenizer",)
    if all(run.digests.get(name) == digests[name] for name in names):
        return ()
    return (
        f"the run's model {run.model} had another tokenizer or chat template than {model.name}: rows whose "
        "prompt or output is not the same under both are errors (prompt_differs)",
    )


def _digests(model: ModelSource) -> dict[str, str | None]:
    from batchinfer.metadata import model_digests

    return model_digests(model)


def _load_engine(model: ModelSource, config: EngineConfig) -> EngineLike:
    from batchinfer.engine.engine import Engine

    return Engine(model, config)
