"""Counters of a run, for progress and the summary."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class EngineStats:
    """Cumulative over one `run`. Prompt tokens are counted once per sample: a row with n = 4 counts four times."""

    num_rows: int = 0
    num_rows_done: int = 0
    num_rows_failed: int = 0
    num_seqs_running: int = 0
    num_seqs_waiting: int = 0
    num_prompt_tokens: int = 0  # of the rows that can run
    num_prompt_tokens_computed: int = 0
    num_prompt_tokens_reused: int = 0  # from a shared node or an exact duplicate
    num_prompt_tokens_shareable: int = 0  # what the plan says could be reused at most
    num_prompt_tokens_recomputed: int = 0  # tokens computed again after a preemption
    num_output_tokens: int = 0  # of samples that have ended, duplicates' copies included
    num_output_tokens_unfinished: int = 0  # drawn for samples that have not ended
    max_output_tokens_left: int = 0  # to draw if no sample ends before its limit
    num_preemptions: int = 0
    num_steps: int = 0
    num_steps_without_memory: int = 0  # each has halved the token budget of the following ones
    num_tokens_discarded: int = 0  # computed ahead for samples that turned out to have ended, or behind a NaN
    num_kv_blocks: int = 0
    num_kv_blocks_used: int = 0
    planning_s: float = 0.0
    running_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
