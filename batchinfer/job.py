"""One job: source -> prompts -> engine -> output, a window of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from batchinfer.config import EngineConfig
from batchinfer.job_input import (
    InputRows,
    ModelResolver,
    check_is_no_input,
    open_input,
    prompts_of,
    resolve_job,
    unreadable_is_input_error,
)
from batchinfer.metadata import model_digests, output_metadata
from batchinfer.params import ResolvedParams, logprob_columns
from batchinfer.progress import ProgressReporter, QuietProgress, Snapshot
from batchinfer.settings import JobSettings
from batchinfer.summary import EngineCounts, JobSummary, Tally
from batchinfer.types import Completion, Prompt

if TYPE_CHECKING:
    from batchinfer.models.source import ModelSource
    from batchinfer.output.writer import ParquetOutput


class EngineLike(Protocol):
    """What a job needs of an engine; see Engine.run for the contract."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def dtype(self) -> Any: ...  # a torch.dtype

    @property
    def device(self) -> Any: ...  # a torch.device

    @property
    def kernels(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def stats(self) -> EngineCounts: ...

    def run(self, prompts: Sequence[Prompt], on_step: Callable[[Any], None] | None = None) -> Iterator[Completion]: ...


EngineFactory = Callable[["ModelSource", EngineConfig], EngineLike]


def run_job(
    settings: JobSettings,
    progress: ProgressReporter | None = None,
    *,
    engine_factory: EngineFactory | None = None,
    resolve: ModelResolver | None = None,
    check_interrupt: Callable[[], None] = lambda: None,
    window_rows: int | None = None,
) -> JobSummary:
    """Run the job and write its output; returns what it did.

    Everything that can be checked without the model's weights is checked before they are read, cheapest
    first. OUT appears whole at its name or not at all. `check_interrupt` is called after every step.

    Raises:
        InputError: the settings, the input, the output's place or the model are not usable.
        JobError: rows could not be read after the job had begun.
    """
    from batchinfer.output.schema import output_schema
    from batchinfer.output.writer import ParquetOutput, check_output

    assert settings.output is not None, "a run has an output"
    progress = progress or QuietProgress()
    tally = Tally()
    with unreadable_is_input_error(f"cannot write output {settings.output}"):
        check_output(settings.output, settings.overwrite)
        check_is_no_input(settings)
    with tally.timed("read"):
        rows = open_input(settings, window_rows)
    sampling = settings.sampling
    has = logprob_columns({**sampling.config, **sampling.flags}, rows.row_fields)  # the model sets none of these
    schema = output_schema(rows.schema, prefix=settings.output_prefix, **asdict(has))  # refuses a clash of names
    try:
        with tally.timed("load"):
            model, params = resolve_job(settings, rows, resolve)
            progress.stage(f"loading {settings.model}")
            engine = (engine_factory or _load_engine)(model, settings.engine)
            digests = model_digests(model)
        with ParquetOutput(settings.output, schema, settings.overwrite) as output:
            progress.stage(f"running {settings.prompts}")
            runner = _Runner(engine, output, tally, progress, check_interrupt, rows.source.num_rows)
            runner.run(settings, rows, model, params)
            with tally.timed("write"):
                output.commit(output_metadata(settings, rows, model, digests, params, engine_settings(engine), tally))
    except BaseException as error:
        error.add_note(f"nothing was written to {settings.output}")
        raise
    return tally.summary(settings.output, params.to_dict())


class _Runner:
    """The windows of one job, run one after the other."""

    def __init__(
        self,
        engine: EngineLike,
        output: ParquetOutput,
        tally: Tally,
        progress: ProgressReporter,
        check_interrupt: Callable[[], None],
        num_rows: int | None,
    ) -> None:
        self._engine = engine
        self._output = output
        self._tally = tally
        self._progress = progress
        self._check_interrupt = check_interrupt
        self._num_rows = num_rows

    def run(self, settings: JobSettings, rows: InputRows, model: ModelSource, params: ResolvedParams) -> None:
        windows = prompts_of(rows, model.tokenizer, params.params, settings.system, model.spec.vocab_size)
        while True:
            with self._tally.timed("read"):
                window = next(windows, None)
            if window is None:
                return
            first_row_index, table, prompts = window
            with self._tally.timed("run"):
                completions = self._complete(prompts)
            with self._tally.timed("write"):
                self._output.write_window(table, first_row_index, completions)

    def _complete(self, prompts: list[Prompt]) -> list[Completion]:
        completions = []
        with closing(self._engine.run(prompts, self._on_step)) as finished:  # type: ignore[type-var]
            for completion in finished:
                self._tally.add_completion(completion)
                completions.append(completion)
        self._tally.end_window(self._engine.stats)
        return completions

    def _on_step(self, stats: EngineCounts) -> None:
        self._check_interrupt()
        self._progress.update(Snapshot.take(self._tally, stats, self._num_rows))


def engine_settings(engine: EngineLike) -> dict[str, Any]:
    """What the engine runs with: its configuration, "auto" and "as the model says" replaced by what they came to."""
    return {
        **asdict(engine.config),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "device": str(engine.device),
        "kernels": engine.kernels,
        "max_model_len": engine.max_model_len,
    }


def _load_engine(model: ModelSource, config: EngineConfig) -> EngineLike:
    from batchinfer.engine.engine import Engine

    return Engine(model, config)
