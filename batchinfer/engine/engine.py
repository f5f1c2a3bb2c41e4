"""The public engine: a loaded model that runs windows of prompts."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from batchinfer.attention.backend import ReferenceAttention
from batchinfer.config import EngineConfig
from batchinfer.engine.core import EngineRun, RunLimits
from batchinfer.engine.feed import Feed, Prepared
from batchinfer.engine.kv_memory import CudaMemory, KVMemory
from batchinfer.engine.machine import (
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    cores,
    fallback_note,
    free_memory_bytes,
    num_physical_cores,
)
from batchinfer.engine.prompts import make_prompt
from batchinfer.engine.sampler import Sampler
from batchinfer.engine.stats import EngineStats
from batchinfer.engine.window import WindowPlan, WindowPlanner
from batchinfer.errors import InputError, KernelsWarning
from batchinfer.kernels.choice import TRITON_DETERMINISTIC, TRITON_KERNELS, choose_kernels
from batchinfer.kernels.cpu.choice import TORCH, KernelChoice
from batchinfer.kernels.fp8_kv import FP8
from batchinfer.models.decoder import Decoder, KVPool, LanguageModel, kv_bytes_per_block
from batchinfer.models.source import ModelSource, resolve_model
from batchinfer.models.spec import DecoderSpec, choose_max_model_len
from batchinfer.models.weights import DecoderWeights
from batchinfer.types import (
    Completion,
    ErrorCode,
    Messages,
    Prompt,
    RowError,
    SamplingParams,
    TokenIds,
)

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import pyarrow as pa

    from batchinfer.scoring.api import Scorable
    from batchinfer.scoring.result import RowScore

#: Token budget of the steps before the first row has ended: few enough to be quick, enough to keep the cores busy.
FIRST_ROW_TOKENS = 16
#: Part of the free memory that the KV pool may take when nobody says how much.
KV_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """A window that is ready to run."""

    plan: WindowPlan
    needed_blocks: int
    planning_s: float


WindowFeed = Feed[Sequence[Prompt], PlannedWindow] | Prepared[Sequence[Prompt], PlannedWindow]


class Engine:
    """A model in memory, ready to run prompts.

    Args:
        model: alias, folder, GGUF file, hub id, or a resolved ModelSource.
        config: see EngineConfig.

    Raises:
        InputError: for a model, device or setting that cannot work.
    """

    def __init__(self, model: str | ModelSource, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        source = resolve_model(model) if isinstance(model, str) else model
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, source.spec.dtype, device)
        kv_dtype = choose_kv_dtype(config.kv_dtype, dtype)
        max_model_len = choose_max_model_len(config.max_model_len, source.spec, source.name)
        if config.kv_memory_bytes is not None:  # known before the weights are read
            _num_blocks(config, kv_bytes_per_block(source.spec, kv_dtype, config.block_size))
        torch.set_num_threads(config.threads or num_physical_cores())
        kernels = choose_kernels(
            source.spec, dtype, device, deterministic=config.deterministic, has_fp8_kv=kv_dtype != dtype
        )
        _warn_of_missing(kernels)
        weights = source.load_weights(dtype, device)
        decoder = _make_decoder(source.spec, weights, kernels.name, max_model_len, kv_dtype)
        self._set_up(decoder, source.tokenizer, source.eos_token_ids, max_model_len, config)
        self.source: ModelSource | None = source
        self.device_note = fallback_note(config.device, device)
        self.default_params = SamplingParams.from_mapping(source.generation_defaults)

    @classmethod
    def from_parts(
        cls,
        model: LanguageModel,
        tokenizer: Any,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        config: EngineConfig | None = None,
    ) -> Engine:
        """An engine over a model object of one's own; see LanguageModel.

        Raises ValueError if `config` asks for KV in fp8 and the model was not made with it.
        """
        self = cls.__new__(cls)
        self._set_up(model, tokenizer, eos_token_ids, max_model_len, config or EngineConfig())
        self.source = None
        self.device_note = None
        self.default_params = SamplingParams()
        return self

    def _set_up(
        self,
        model: LanguageModel,
        tokenizer: Any,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        config: EngineConfig,
    ) -> None:
        if config.kv_dtype == "fp8" and _kv_dtype(model) != FP8:
            raise ValueError(
                f"kv_dtype is fp8, but the model keeps its KV in {_kv_dtype(model)}: make it with kv_dtype"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.config = config
        self.stats = EngineStats()
        #: Launch a step before the one before it is taken: a GPU works meanwhile, a CPU would only wait later.
        self.looks_ahead = model.device.type == "cuda"
        self.check_integrity = False  # tests: assert all invariants after each step
        self._sampler = Sampler(tokenizer.num_ids, eos_token_ids, model)
        self._kv: KVPool | None = None
        is_on_gpu = model.device.type == "cuda"
        self._kv_memory = KVMemory(model, max_model_len, CudaMemory(model.device)) if is_on_gpu else None
        self._is_running = False

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def kernels(self) -> str:
        """What runs the model: an instruction set of the C++ kernels, Triton's, or "torch". Bits depend on it."""
        return getattr(self.model, "kernels", TORCH)

    @property
    def kv_dtype(self) -> torch.dtype:
        return _kv_dtype(self.model)

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_block(self.model.spec, self.kv_dtype, 1)

    def run(
        self, prompts: Sequence[Prompt], on_step: Callable[[EngineStats], None] | None = None
    ) -> Iterator[Completion]:
        """Run prompts; yields completions in the order they finish.

        Every prompt gets `params.n` completions, less its `done_samples`, or exactly one (sample_index 0)
        if it is refused: its own error, too long, never fits. Closing the iterator stops the run.

        Args:
            on_step: called after each step with `stats`, which is reset when the run begins.
        """
        return self.run_windows([prompts], on_step)

    def run_windows(
        self, windows: Iterable[Sequence[Prompt]], on_step: Callable[[EngineStats], None] | None = None
    ) -> Iterator[Completion]:
        """Run windows of prompts, one after the other; otherwise as `run`.

        Each window is planned by itself. The next one is taken from `windows` and planned in a background
        thread while this one runs, and it starts where this one no longer fills the batch: its first
        completions come before the last ones of this. Row indices are distinct over all windows.
        """
        if self._is_running:
            raise RuntimeError("this engine is running; finish or close the iterator of its last run first")
        self._is_running = True
        self.stats = EngineStats()
        most_blocks = self._most_blocks()
        planner = WindowPlanner(
            self.tokenizer, self.max_model_len, self.config.policy, prefix_sharing=self.config.prefix_sharing
        )
        prepare = partial(self._plan, planner, most_blocks)
        is_one = isinstance(windows, Sequence) and len(windows) == 1
        feed: WindowFeed = Prepared(windows, prepare) if is_one else Feed(windows, prepare)
        try:
            following = feed.take(wait=True)
            while following is not None:
                following = yield from self._run(following, feed, most_blocks, on_step)
        finally:
            feed.close()
            self._is_running = False

    def _plan(self, planner: WindowPlanner, most_blocks: int, prompts: Sequence[Prompt]) -> PlannedWindow:
        began = time.perf_counter()
        plan = planner.plan(self._refuse_unfit(prompt, most_blocks) for prompt in prompts)
        return PlannedWindow(plan, self._needed_blocks(plan), time.perf_counter() - began)

    def _run(
        self,
        first: PlannedWindow,
        feed: WindowFeed,
        most_blocks: int,
        on_step: Callable[[EngineStats], None] | None,
    ) -> Generator[Completion, None, PlannedWindow | None]:
        """Run the window and those after it while the KV pool is large enough; returns the first that needs more."""
        config, stats = self.config, self.stats
        kv = self._make_kv(first.needed_blocks, most_blocks)
        stats.num_kv_blocks = kv.num_blocks
        first_row = FIRST_ROW_TOKENS if stats.num_rows == 0 else 0
        limits = RunLimits(config.max_batch_tokens, config.max_num_seqs, self.max_model_len, first_row)
        samples_left: dict[int, int] = {}
        following: PlannedWindow | None = None
        refused = self._begin(first, samples_left)
        run = EngineRun(
            first.plan,
            self.model,
            kv,
            self._sampler,
            limits,
            stats,
            looks_ahead=self.looks_ahead,
            check=self.check_integrity,
        )
        try:
            yield from refused
            while True:
                if following is None and run.has_room:
                    following = feed.take(wait=not run.has_work)
                if following is not None and run.has_room:
                    if min(following.needed_blocks, most_blocks) > kv.num_blocks:
                        if not run.has_work:
                            return following
                    else:
                        refused = self._begin(following, samples_left)
                        run.add(following.plan)
                        following = None
                        yield from refused
                if not run.has_work:
                    if feed.is_at_end:
                        return None
                    continue
                finished = run.step()
                for completion in finished:
                    self._count(completion, samples_left)
                if on_step is not None:
                    on_step(stats)
                yield from finished
        finally:
            if run.may_hold_non_finite:
                self._kv = None  # NaN in a stale block must not reach the next run

    def _begin(self, window: PlannedWindow, samples_left: dict[int, int]) -> list[Completion]:
        """Count the window in; the completions of its refused rows."""
        plan, stats = window.plan, self.stats
        stats.num_rows += len(plan.samples_left)
        stats.num_prompt_tokens += plan.num_prompt_tokens
        stats.num_prompt_tokens_shareable += plan.num_shareable_tokens
        stats.planning_s += window.planning_s
        samples_left.update(plan.samples_left)
        for completion in plan.refused:
            stats.num_rows_done += 1
            stats.num_rows_failed += 1
            del samples_left[completion.row_index]
        refused, plan.refused = plan.refused, []
        return refused

    def _count(self, completion: Completion, samples_left: dict[int, int]) -> None:
        self.stats.num_output_tokens += len(completion.token_ids)
        samples_left[completion.row_index] -= 1
        if not samples_left[completion.row_index]:
            del samples_left[completion.row_index]
            self.stats.num_rows_done += 1
            self.stats.num_rows_failed += completion.error is not None

    def _refuse_unfit(self, prompt: Prompt, most_blocks: int) -> Prompt:
        """A row that would not fit even if it ran alone gets its error before anything runs."""
        max_tokens = 0 if prompt.score else prompt.params.max_tokens
        num_tokens = min(len(prompt.token_ids) + max_tokens, self.max_model_len) - (prompt.score is None)
        needed = -(-num_tokens // self.config.block_size)
        is_too_long = len(prompt.token_ids) >= self.max_model_len + (
            prompt.score is not None
        )  # which the planner refuses
        if prompt.error is not None or is_too_long or needed <= most_blocks:
            return prompt
        message = (
            f"{len(prompt.token_ids)} prompt tokens and max_tokens {max_tokens} need {needed} KV "
            f"blocks of {self.config.block_size} tokens, the pool has {most_blocks}: raise --kv-memory to "
            f"{needed * self._bytes_per_block():,} bytes or lower max_tokens"
        )
        return replace(prompt, error=RowError(ErrorCode.NEVER_FITS, message))

    def _bytes_per_block(self) -> int:
        return kv_bytes_per_block(self.model.spec, self.kv_dtype, self.config.block_size)

    def _kv_limit_bytes(self) -> int:
        """The largest pool that may be made when no size is given."""
        held = 0 if self._kv is None else self._kv.nbytes
        if self._kv_memory is not None:
            return self._kv_memory.limit_bytes(self.config, held)
        return int((free_memory_bytes() + held) * KV_SHARE)

    def _most_blocks(self) -> int:
        """Blocks of the largest pool this run may make. Raises InputError for --kv-memory below one block."""
        if self.config.kv_memory_bytes is None:
            return max(1, self._kv_limit_bytes() // self._bytes_per_block())
        return _num_blocks(self.config, self._bytes_per_block())

    def _needed_blocks(self, plan: WindowPlan) -> int:
        """KV blocks that the window can use at most."""
        block_size = self.config.block_size
        needs = sorted(
            (-(-(seq.num_prompt + seq.max_tokens) // block_size) + 1 for seq in plan.sequences), reverse=True
        )
        kept = sum(-(-(node.end - node.start) // block_size) + 1 for node in plan.nodes)
        return max(1, sum(needs[: self.config.max_num_seqs]) + kept)

    def _make_kv(self, needed_blocks: int, most_blocks: int) -> KVPool:
        """The KV pool: of the size asked for, else what the window can use within the limit."""
        num_blocks, block_size = most_blocks, self.config.block_size
        if self.config.kv_memory_bytes is None:
            num_blocks = min(needed_blocks, most_blocks)
        if self._kv is None or self._kv.num_blocks != num_blocks:
            self._kv = None  # free the old pool first
            try:
                self._kv = self.model.make_kv(num_blocks, block_size)
            except (OSError, MemoryError, RuntimeError) as error:
                size = num_blocks * self._bytes_per_block()
                raise InputError(f"no memory for {size:,} bytes of KV: lower --kv-memory ({error})") from error
        return self._kv

    def prompt(
        self,
        content: str | Sequence[int] | TokenIds | Messages,
        params: SamplingParams,
        row_index: int = 0,
        row_id: str | int | None = None,
    ) -> Prompt:
        """A Prompt from text, token ids or chat messages; see make_prompt."""
        return make_prompt(content, params, self.tokenizer, self.model.spec.vocab_size, row_index, row_id)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | TokenIds | Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ids: Sequence[str | int] | None = None,
    ) -> list[list[Completion]]:
        """Complete prompts: texts, lists of token ids, or lists of chat messages.

        Args:
            params: for all, or one for each prompt; None: the model's own defaults.
            ids: row ids, which fix each row's random numbers; see row_key.

        Returns:
            For each prompt its samples, in order. A prompt that cannot run (null, not valid Unicode, too
            long, ...) has one, with `error` set.

        Raises:
            ValueError: for something that is no prompt, or lists of unequal length.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list, got one string: wrap it in a list")
        for_all = params if isinstance(params, SamplingParams) else self.default_params
        each = [for_all] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if any(not isinstance(one, SamplingParams) for one in each):
            raise ValueError(f"params must be SamplingParams, or a list of one for each prompt, got {params!r:.100}")
        if len(each) != len(prompts) or (ids is not None and len(ids) != len(prompts)):
            raise ValueError(
                f"{len(prompts)} prompts, {len(each)} params, {len(ids) if ids is not None else len(prompts)} ids"
            )
        rows = [
            self.prompt(content, each[row], row, None if ids is None else ids[row])
            for row, content in enumerate(prompts)
        ]
        out: list[list[Completion]] = [[] for _ in rows]
        for completion in self.run(rows):
            out[completion.row_index].append(completion)
        for samples in out:
            samples.sort(key=lambda completion: completion.sample_index)
        return out

    def generate_dataset(
        self,
        dataset: datasets.Dataset | datasets.IterableDataset | pd.DataFrame | pa.Table,
        params: SamplingParams | None = None,
        **columns: Any,
    ) -> Any:
        """Complete a dataset, data frame or table; all its columns are kept, the results are added.

        A stream (IterableDataset) gives a stream: rows run as they are asked for, window by window.

        See `batchinfer.pipeline.generate_dataset` for the options.
        """
        from batchinfer.pipeline import generate_dataset

        return generate_dataset(self, dataset, params, **columns)

    def score(self, inputs: Sequence[Scorable], **options: Any) -> list[RowScore]:
        """Log-likelihoods of given texts, teacher-forced. What they have in common is computed once.

        Args:
            inputs: any mix of texts; lists of token ids; pairs (context, continuation) of two texts or two
                lists of ids, of which the continuation is scored; lists of chat messages. None is a row's error.
            turns: of chats: "assistant", what the assistant says; or "all".
            system: system message for chats that have none.
            bos: a beginning-of-sequence token as context, never scored: "auto", as the tokenizer does;
                "always"; or "never".
            window, stride: see scoring.windows.Window. None: the model's context, and windows side by side.
            token_logprobs, entropies: keep these of each token. Default: log-probabilities alone.

        Returns:
            A RowScore for each input, in order. One that cannot be scored has `error` set.

        Raises:
            ValueError: for something that is none of these.
            InputError: for an option that cannot work.
        """
        from batchinfer.scoring.api import score_inputs

        return score_inputs(self, inputs, **options)


def _kv_dtype(model: LanguageModel) -> torch.dtype:
    """FP8, or the model's own."""
    return getattr(model, "kv_dtype", model.dtype)


def _make_decoder(
    spec: DecoderSpec, weights: DecoderWeights, kernels: str, max_model_len: int, kv_dtype: torch.dtype
) -> LanguageModel:
    if kernels == TORCH:
        return Decoder(spec, weights, ReferenceAttention, max_model_len, kv_dtype)
    if kernels in TRITON_KERNELS:
        from batchinfer.kernels.triton.decoder import TritonDecoder

        deterministic = kernels == TRITON_DETERMINISTIC
        return TritonDecoder(spec, weights, max_model_len, deterministic=deterministic, kv_dtype=kv_dtype)
    from batchinfer.kernels.cpu.decoder import CpuDecoder

    decoder = CpuDecoder(spec, weights, kernels, max_model_len)
    if "OMP_PROC_BIND" not in os.environ:  # else it is the user's choice
        decoder.bind_threads(cores())
    return decoder


def _warn_of_missing(kernels: KernelChoice) -> None:
    if kernels.is_missing:
        remedy = f". {kernels.remedy}" if kernels.remedy else ""
        message = f"running on plain torch, which is slower: {kernels.reason}{remedy}"
        warnings.warn(message, KernelsWarning, stacklevel=3)


def _num_blocks(config: EngineConfig, bytes_per_block: int) -> int:
    """KV blocks in --kv-memory. Raises InputError if it does not hold one."""
    assert config.kv_memory_bytes is not None
    if config.kv_memory_bytes < bytes_per_block:
        raise InputError(
            f"--kv-memory is {config.kv_memory_bytes:,} bytes, one KV block of {config.block_size} tokens takes "
            f"{bytes_per_block:,}: raise it"
        )
    return config.kv_memory_bytes // bytes_per_block
