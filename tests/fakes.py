"""Stand-ins for the costly parts. Each keeps the contract of what it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.config import EngineConfig
from batchinfer.models.spec import DecoderSpec, RopeSpec
from batchinfer.types import Completion, ErrorCode, FinishReason, Prompt, RowError, SamplingParams, TokenIds, failed

TINY_SPEC = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeSpec("default", 10_000.0, 8),
    max_position=512,
    tie_word_embeddings=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    hidden_act="silu",
    sliding_windows=(None, None),
    dtype="float32",
)


class FakeTokenizer:
    """One token per UTF-8 byte, no special tokens; chats are `role: content` lines."""

    num_ids = 256
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    chat_template: str | None = "role: content"
    special_ids: frozenset[int] = frozenset()

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokenIds]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def encode_with_ends(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[tuple[TokenIds, npt.NDArray[np.int32]]]:
        num_bytes = [[len(char.encode()) for char in text] for text in texts]
        ends = [np.repeat(np.arange(1, len(counts) + 1, dtype=np.int32), counts) for counts in num_bytes]
        return list(zip(self.encode_batch(texts), ends, strict=True))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(int(i) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < self.num_ids else b""  # of a padded vocabulary's further ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join([*lines, "assistant: "] if add_generation_prompt else lines)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> TokenIds:
        return self.encode_batch([self.render_chat(messages, add_generation_prompt=add_generation_prompt)])[0]

    def render_chat_turns(self, messages: Sequence[Mapping[str, Any]]) -> None:
        return None

    def digest(self) -> str:
        return "tokenizer-digest"


@dataclass
class FakeModelSource:
    name: str = "fake"
    path: Path = Path("fake")
    format: str = "hf"
    spec: DecoderSpec = TINY_SPEC
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    adapter: Any = None

    def digest(self) -> str:
        return "model-digest"


def _is_done(prompt: Prompt) -> bool:
    """Whether an earlier run has all its samples; of a row that is refused there is one."""
    return bool(prompt.done_samples) and (prompt.error is not None or len(prompt.done_samples) == prompt.params.n)


@dataclass
class FakeEngineStats:
    num_rows: int = 0
    num_rows_done: int = 0
    num_rows_failed: int = 0
    num_seqs_running: int = 0
    num_seqs_waiting: int = 0
    num_prompt_tokens: int = 0
    num_prompt_tokens_computed: int = 0
    num_prompt_tokens_reused: int = 0
    num_prompt_tokens_shareable: int = 0
    num_prompt_tokens_recomputed: int = 0
    num_output_tokens: int = 0
    num_output_tokens_unfinished: int = 0
    max_output_tokens_left: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_kv_blocks: int = 10
    num_kv_blocks_used: int = 0
    planning_s: float = 0.0
    running_s: float = 0.0


class FakeEngine:
    """Answers each prompt with its own text, cut to max_tokens, in reverse order: rows finish as they like.

    `on_row(row_index)` is called before each row and may raise or sleep.
    """

    def __init__(
        self,
        source: FakeModelSource | None = None,
        config: EngineConfig | None = None,
        on_row: Callable[[int], None] = lambda row: None,
    ) -> None:
        self.source = source or FakeModelSource()
        self.model = SimpleNamespace(spec=self.source.spec)
        self.tokenizer = self.source.tokenizer
        self.default_params = SamplingParams.from_mapping(self.source.generation_defaults)
        self.config = config or EngineConfig()
        self.max_model_len = self.config.max_model_len or self.source.spec.max_position
        self.stats = FakeEngineStats()
        self.dtype = self.kv_dtype = "float32"
        self.device = "cpu"
        self.kernels = "torch"
        self.device_note: str | None = None
        self.num_runs_closed = 0
        self.prompts: list[Prompt] = []  # of the last run
        self._on_row = on_row

    def run(self, prompts: Sequence[Prompt], on_step: Callable[[Any], None] | None = None) -> Iterator[Completion]:
        return self.run_windows([prompts], on_step)

    def run_windows(
        self, windows: Iterable[Sequence[Prompt]], on_step: Callable[[Any], None] | None = None
    ) -> Iterator[Completion]:
        self.prompts = []
        self.stats = stats = FakeEngineStats()
        try:
            for window in windows:
                self.prompts += window
                waiting = [prompt for prompt in window if not _is_done(prompt)]
                stats.num_rows += len(waiting)
                stats.num_prompt_tokens += sum(len(prompt.token_ids) for prompt in waiting)
                for prompt in reversed(waiting):
                    self._on_row(prompt.row_index)
                    yield from self._complete(prompt)
                    stats.num_rows_done += 1
                    stats.num_steps += 1
                    if on_step is not None:
                        on_step(stats)
        finally:
            self.num_runs_closed += 1

    def _complete(self, prompt: Prompt) -> Iterator[Completion]:
        error = prompt.error
        if error is None and len(prompt.token_ids) >= self.max_model_len:
            error = RowError(ErrorCode.PROMPT_TOO_LONG, f"{len(prompt.token_ids)} tokens")
        if error is not None:
            self.stats.num_rows_failed += 1
            yield failed(prompt, error)
            return
        self.stats.num_prompt_tokens_computed += len(prompt.token_ids)
        for sample_index in reversed(range(prompt.params.n)):
            if sample_index in prompt.done_samples:
                continue
            ids = [int(i) for i in prompt.token_ids[: prompt.params.max_tokens]]
            is_cut = len(prompt.token_ids) > prompt.params.max_tokens
            self.stats.num_output_tokens += len(ids)
            yield Completion(
                row_index=prompt.row_index,
                sample_index=sample_index,
                token_ids=ids,
                text=self.tokenizer.decode(ids),
                finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
                num_prompt_tokens=len(prompt.token_ids),
                logprobs=None if prompt.params.logprobs is None else [-0.5] * len(ids),
                top_logprobs=[[(i, -0.5)] for i in ids] if prompt.params.logprobs else None,
                prompt_logprobs=[None, *[-1.0] * (len(prompt.token_ids) - 1)]
                if prompt.params.prompt_logprobs
                else None,
            )
