"""Runs prompts as a job does, keeps nothing of the results, and says how near it came to the optimum."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from batchinfer.bench.floor import floor_of
from batchinfer.bench.report import BenchReport, KvUse
from batchinfer.config import EngineConfig
from batchinfer.errors import InputError
from batchinfer.job import EngineFactory, EngineLike, engine_settings
from batchinfer.job_input import ModelResolver, open_input, prompts_of, resolve_job
from batchinfer.progress import ProgressReporter, QuietProgress, Snapshot
from batchinfer.settings import JobSettings
from batchinfer.summary import EngineCounts, Tally
from batchinfer.types import Completion, Prompt

if TYPE_CHECKING:
    from batchinfer.machine_speed import MachineSpeed
    from batchinfer.models.source import ModelSource
    from batchinfer.planner.cost import JobPlan


def run_bench(
    settings: JobSettings,
    progress: ProgressReporter | None = None,
    *,
    startup_s: float = 0.0,
    engine_factory: EngineFactory | None = None,
    resolve: ModelResolver | None = None,
    check_interrupt: Callable[[], None] = lambda: None,
    window_rows: int | None = None,
) -> BenchReport:
    """Run the prompts; the machine's speed is measured before and after, and the better one counts.

    Args:
        startup_s: what the process took before, which counts towards the first row.

    Raises:
        InputError: the settings, the input or the model are not usable, or no row can run.
        JobError: rows could not be read any more.
    """
    began = time.perf_counter() - startup_s
    progress = progress or QuietProgress()
    tally = Tally()
    with tally.timed("read"):
        rows = open_input(settings, window_rows)
    with tally.timed("load"):
        model, params = resolve_job(settings, rows, resolve)
        progress.stage(f"loading {settings.model}")
        engine = (engine_factory or _load_engine)(model, settings.engine)
        if engine.device_note:
            progress.stage(engine.device_note)
    progress.stage("measuring the machine")
    measuring_began = time.perf_counter()
    speed = measure_for(engine)
    began += time.perf_counter() - measuring_began
    progress.stage(f"running {settings.prompts}")
    run = _Run(engine, tally, progress, check_interrupt, rows.source.num_rows)
    kernel_times = getattr(getattr(engine, "model", None), "kernel_times", None)
    if kernel_times is not None:
        kernel_times()  # from here on
    windows = prompts_of(rows, model.tokenizer, params.params, settings.system, model.spec.vocab_size)
    while True:
        with tally.timed("read"):
            window = next(windows, None)
        if window is None:
            break
        run.complete(window[2], model)
    kernel_seconds = None if kernel_times is None else kernel_times()
    if run.first_row_at is None:
        counts = ", ".join(f"{code}: {count:,}" for code, count in tally.failed_by_code.items())
        raise InputError(f"no row of {settings.prompts} could run ({counts}): there is nothing to measure")
    speed = speed.best_with(measure_for(engine))
    plan = run.plan()
    return BenchReport(
        prompts=settings.prompts,
        model=settings.model,
        machine=describe_machine(),
        engine=engine_settings(engine),
        params={name: said["value"] for name, said in params.to_dict().items()},
        counts=tally.counts(),
        failed_by_code=dict(sorted(tally.failed_by_code.items())),
        num_unique_prompt_tokens=plan.num_unique_prompt_tokens,
        seconds={stage: seconds for stage, seconds in tally.seconds.items() if stage not in ("journal", "write")},
        first_row_s=run.first_row_at - began,
        floor=floor_of(plan.with_sharing, speed),
        kernel_seconds=kernel_seconds,
        kv=KvUse(
            pool_bytes=run.num_kv_blocks * engine.config.block_size * plan.kv.bytes_per_token,
            used_bytes=run.num_kv_blocks_used * engine.config.block_size * plan.kv.bytes_per_token,
            planned_bytes=plan.kv.peak_bytes,
        ),
    )


@dataclass
class _Run:
    """The windows of one measurement, run one after the other."""

    engine: EngineLike
    tally: Tally
    progress: ProgressReporter
    check_interrupt: Callable[[], None]
    num_rows: int | None
    first_row_at: float | None = None  # perf_counter() when the first result came
    num_kv_blocks: int = 0  # of the pool; the most of all windows
    num_kv_blocks_used: int = 0
    _plans: list[JobPlan] = field(default_factory=list)

    def complete(self, prompts: list[Prompt], model: ModelSource) -> None:
        from batchinfer.bench.work import lengths_of, plan_work

        completions: list[Completion] = []
        with self.tally.timed("run"), closing(self.engine.run(prompts, self._on_step)) as finished:  # type: ignore[type-var]
            for completion in finished:
                if self.first_row_at is None and completion.error is None:
                    self.first_row_at = time.perf_counter()
                self.tally.add_completion(completion)
                completions.append(completion)
        self.tally.end_window(self.engine.stats)
        lengths = lengths_of(completions)
        self._plans.append(plan_work(prompts, lengths, model.spec, self.engine.dtype.itemsize, self.engine.config))

    def plan(self) -> JobPlan:
        from batchinfer.plan_report import combine

        return combine(self._plans)

    def _on_step(self, stats: EngineCounts) -> None:
        self.check_interrupt()
        self.num_kv_blocks = max(self.num_kv_blocks, stats.num_kv_blocks)
        self.num_kv_blocks_used = max(self.num_kv_blocks_used, stats.num_kv_blocks_used)
        self.progress.update(Snapshot.take(self.tally, stats, self.num_rows))


def measure_for(engine: EngineLike) -> MachineSpeed:
    """Of the kernels, dtype, device and threads that the engine uses."""
    from batchinfer.engine.machine import free_memory_bytes
    from batchinfer.machine_speed import measure

    return measure(engine.kernels, free_memory_bytes(), engine.dtype, engine.device)


def describe_machine() -> dict[str, Any]:
    import torch

    from batchinfer.doctor import examine_processor

    return {**asdict(examine_processor()), "threads": torch.get_num_threads()}


def _load_engine(model: ModelSource, config: EngineConfig) -> EngineLike:
    from batchinfer.engine.engine import Engine

    return Engine(model, config)
