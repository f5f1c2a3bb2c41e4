"""Decode steps recorded as CUDA graphs (HIP graphs on AMD): one launch instead of some ten for each layer.

A graph replays the same kernels on the same addresses, so a step's inputs are copied into buffers that stay, and a
step of fewer rows is padded to the next of a few sizes. Padding rows compute at position 0 and store no KV. A size is
recorded when it has been met a few times: most sizes of a run's tail are met once and never again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from batchinfer.attention.tree import RaggedBatch
from batchinfer.errors import KernelsWarning
from batchinfer.kernels.fp8_kv import KVScales
from batchinfer.models.decoder import KVCache, StepInputs

#: Steps of a size before it is recorded. The first ones compile its kernels, which must not happen while recording.
STEPS_BEFORE = 3
#: Rows that are recorded at most. Beyond them a step takes so long that its launches hide behind it.
MOST_ROWS = 512


def padded_size(num_rows: int) -> int | None:
    """Rows that a decode step of so many is padded to: 1, 2, 4, 8, 16, 24, 32, then multiples of 32, then of 64."""
    if num_rows > MOST_ROWS:
        return None
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = 8 if num_rows <= 32 else 32 if num_rows <= 256 else 64
    return -(-num_rows // step) * step


class StaticAttention(Protocol):
    """An AttentionBackend whose plan lies in buffers that stay, and whose launches do not depend on the plan."""

    def plan(self, batch: RaggedBatch, windows: frozenset[int | None]) -> None:
        """Write the plan into the buffers. Raises ValueError if it does not fit them."""

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int | None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """As AttentionBackend.forward; rows of q behind the planned ones may give anything."""


@dataclass(frozen=True, slots=True)
class StaticStep:
    """What a recorded step reads."""

    token_ids: Tensor  # [size] int64
    positions: Tensor  # [size] int64
    slots: Tensor  # [size] int64
    attention: StaticAttention

    @classmethod
    def make(cls, size: int, attention: StaticAttention, device: torch.device) -> StaticStep:
        token_ids, positions = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        return cls(token_ids, positions, torch.full_like(token_ids, -1), attention)

    def fill(self, inputs: StepInputs, windows: frozenset[int | None]) -> None:
        """Raises ValueError if the step's attention does not fit."""
        self.attention.plan(inputs.ragged, windows)
        num_rows = len(inputs.token_ids)
        self.token_ids[:num_rows].copy_(inputs.token_ids)
        self.positions[:num_rows].copy_(inputs.positions)
        self.slots[:num_rows].copy_(inputs.slots)
        self.slots[num_rows:].fill_(-1)  # an id and a position of an earlier step do no harm


#: Runs a step on the pool; final hidden states [size, hidden_size].
RunStep = Callable[[StaticStep, KVCache], Tensor]


class Recorded(Protocol):
    """A step that was recorded."""

    @property
    def hidden(self) -> Tensor:
        """[size, hidden_size]; written by `replay`."""

    def replay(self) -> None: ...


#: Records what a call launches, its result being the hidden states.
Record = Callable[[Callable[[], Tensor]], Recorded]


class DecodeGraphs:
    """Recorded steps of a decoder, by size.

    Args:
        make_attention: for so many rows.
        record: with `CudaRecorder`, or what stands for it in a test.
    """

    def __init__(
        self,
        run: RunStep,
        make_attention: Callable[[int, KVCache], StaticAttention],
        windows: frozenset[int | None],
        record: Record,
    ) -> None:
        self._run = run
        self._make_attention = make_attention
        self._windows = windows
        self._record = record
        self._num_met: dict[int, int] = {}
        self._recorded: dict[int, tuple[StaticStep, Recorded]] = {}
        self._failed = False  # recording does not work here: every step runs as it is
        self._addresses: tuple[int, ...] = ()  # of the pool that the recorded steps use

    def clear(self) -> None:
        """Forget recorded steps: their pool goes."""
        self._recorded.clear()
        self._num_met.clear()

    def forward(self, inputs: StepInputs, kv: KVCache) -> Tensor | None:
        """Final hidden states [num_tokens, hidden_size]; None: this step is to be run as it is."""
        size = _decode_size(inputs)
        if size is None or self._failed:
            return None
        addresses = tuple(tensor.data_ptr() for tensor in kv.tensors)
        if addresses != self._addresses:
            self.clear()
            self._addresses = addresses
        if size not in self._recorded and not self._record_now(size, inputs, kv):
            return None
        step, recorded = self._recorded[size]
        try:
            step.fill(inputs, self._windows)
        except ValueError:
            return None
        recorded.replay()
        return recorded.hidden[: len(inputs.token_ids)].clone()  # the next step writes there

    def _record_now(self, size: int, inputs: StepInputs, kv: KVCache) -> bool:
        self._num_met[size] = self._num_met.get(size, 0) + 1
        if self._num_met[size] <= STEPS_BEFORE:
            return False
        step = StaticStep.make(size, self._make_attention(size, kv), inputs.token_ids.device)
        try:
            step.fill(inputs, self._windows)
        except ValueError:
            return False
        try:
            self._recorded[size] = (step, self._record(lambda: self._run(step, kv)))
        except RuntimeError as error:
            self._failed = True
            warnings.warn(f"decode steps are not recorded, which is slower: {error}", KernelsWarning, stacklevel=2)
        return not self._failed


def _decode_size(inputs: StepInputs) -> int | None:
    """The size that the step is padded to; None: it is no plain decode step."""
    num_seqs = len(inputs.ragged.query_lens)
    if inputs.outputs is not None or inputs.ragged.num_tokens != num_seqs:
        return None
    return padded_size(num_seqs)


class CudaRecorder:
    """Records on a GPU. All graphs take their memory from one pool: they never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, call: Callable[[], Tensor]) -> Recorded:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once before: libraries set up their workspaces, kernels are compiled
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            hidden = call()
        self._pool = self._pool or graph.pool()
        return _Graph(graph, hidden)


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor

    def replay(self) -> None:
        self.graph.replay()
