"""Recorded decode steps, with a recorder that runs the step again where a GPU would replay it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer.attention.tree import RaggedBatch
from batchinfer.errors import KernelsWarning
from batchinfer.kernels.fp8_kv import KVScales
from batchinfer.kernels.triton.graphs import (
    MOST_ROWS,
    STEPS_BEFORE,
    DecodeGraphs,
    StaticStep,
    padded_size,
)
from batchinfer.models.decoder import KVCache, StepInputs

WINDOWS: frozenset[int | None] = frozenset({None})


def test_sizes_waste_little() -> None:
    sizes = [padded_size(rows) for rows in range(1, MOST_ROWS + 1)]
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert padded_size(MOST_ROWS) == MOST_ROWS
    assert padded_size(MOST_ROWS + 1) is None
    for rows, size in enumerate(sizes, 1):
        assert size is not None
        assert rows <= size < 2 * rows + (rows == 1)
        assert rows < 64 or size < 1.5 * rows
        assert padded_size(size) == size
    assert len(set(sizes)) < 24, "each size costs a recording"


class Attention:
    """Remembers what was planned; room for so many blocks of a row."""

    def __init__(self, most_blocks: int = 4) -> None:
        self.most_blocks = most_blocks
        self.planned: list[RaggedBatch] = []

    def plan(self, batch: RaggedBatch, windows: frozenset[int | None]) -> None:
        assert windows == WINDOWS
        if batch.block_tables.shape[1] > self.most_blocks:
            raise ValueError("too many blocks")
        self.planned.append(batch)

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int | None,
        scales: KVScales | None = None,
    ) -> Tensor:
        raise AssertionError("the step of this test attends to nothing")


@dataclass
class Replayed:
    call: Callable[[], Tensor]
    hidden: Tensor

    def replay(self) -> None:
        self.hidden.copy_(self.call())  # as on a GPU: at the same address


@dataclass
class Recorder:
    """Counts what it records."""

    sizes: list[int] = field(default_factory=list)
    error: RuntimeError | None = None

    def __call__(self, call: Callable[[], Tensor]) -> Replayed:
        if self.error is not None:
            raise self.error
        hidden = call()
        self.sizes.append(len(hidden))
        return Replayed(call, hidden)


@dataclass
class Model:
    """Final hidden states that tell the step's inputs."""

    steps: list[StaticStep] = field(default_factory=list)

    def run(self, step: StaticStep, kv: KVCache) -> Tensor:
        if not any(step is known for known in self.steps):
            self.steps.append(step)
        return torch.stack([step.token_ids, step.positions, step.slots], 1).float()


def inputs(rows: int, first: int = 0, blocks: int = 2, lens: int = 1, outputs: Tensor | None = None) -> StepInputs:
    tokens = torch.arange(first, first + rows * lens)
    ragged = RaggedBatch(
        np.zeros((rows, blocks), np.int32), np.zeros(rows, np.int32), np.full(rows, lens, np.int32), 16
    )
    return StepInputs(tokens, tokens + 100, tokens + 200, ragged, outputs)


def pool() -> KVCache:
    return KVCache(torch.zeros(1, 16, 1, 1), torch.zeros(1, 16, 1, 1), 16)


def expected(step: StepInputs) -> Tensor:
    return torch.stack([step.token_ids, step.positions, step.slots], 1).float()


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def graphs(model: Model, recorder: Recorder) -> DecodeGraphs:
    return DecodeGraphs(model.run, lambda size, kv: Attention(), WINDOWS, recorder)


def meet(graphs: DecodeGraphs, kv: KVCache, rows: int) -> Tensor:
    """Steps of so many rows until one is replayed; its result."""
    for _ in range(STEPS_BEFORE):
        assert graphs.forward(inputs(rows), kv) is None
    found = graphs.forward(inputs(rows), kv)
    assert found is not None
    return found


def test_a_size_is_recorded_when_it_was_met_a_few_times(graphs: DecodeGraphs, recorder: Recorder) -> None:
    kv = pool()
    assert torch.equal(meet(graphs, kv, 3), expected(inputs(3)))
    assert recorder.sizes == [4]
    step = inputs(4, first=50)  # the same size
    found = graphs.forward(step, kv)
    assert torch.equal(found, expected(step))  # type: ignore[arg-type]
    assert recorder.sizes == [4]
    assert graphs.forward(inputs(5), kv) is None, "another size"


def test_rows_of_an_earlier_step_store_no_kv(graphs: DecodeGraphs, model: Model) -> None:
    kv = pool()
    meet(graphs, kv, 4)
    graphs.forward(inputs(3), kv)
    assert model.steps[0].slots.tolist() == [200, 201, 202, -1]


def test_a_result_outlives_the_next_step(graphs: DecodeGraphs) -> None:
    """Scores keep hidden states of steps that are long over."""
    kv = pool()
    meet(graphs, kv, 2)
    first = graphs.forward(inputs(2, first=10), kv)
    graphs.forward(inputs(2, first=70), kv)
    assert torch.equal(first, expected(inputs(2, first=10)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "step",
    [
        inputs(2, lens=2),
        inputs(2, outputs=torch.tensor([0])),
        inputs(MOST_ROWS + 1),
    ],
    ids=["chunks", "some outputs only", "too many rows"],
)
def test_other_steps_run_as_they_are(graphs: DecodeGraphs, recorder: Recorder, step: StepInputs) -> None:
    kv = pool()
    for _ in range(2 * STEPS_BEFORE):
        assert graphs.forward(step, kv) is None
    assert recorder.sizes == []


def test_what_does_not_fit_the_buffers_runs_as_it_is(graphs: DecodeGraphs, recorder: Recorder) -> None:
    kv = pool()
    for _ in range(2 * STEPS_BEFORE):
        assert graphs.forward(inputs(2, blocks=9), kv) is None
    assert graphs.forward(inputs(2), kv) is not None
    assert graphs.forward(inputs(2, blocks=9), kv) is None
    assert graphs.forward(inputs(2), kv) is not None
    assert recorder.sizes == [2]


def test_another_pool_is_recorded_anew(graphs: DecodeGraphs, recorder: Recorder) -> None:
    """A recorded step writes to the addresses that it was recorded with."""
    first, second = pool(), pool()
    meet(graphs, first, 1)
    meet(graphs, second, 1)
    assert recorder.sizes == [1, 1]
    graphs.clear()
    meet(graphs, second, 1)
    assert recorder.sizes == [1, 1, 1]


def test_where_recording_fails_steps_run_as_they_are(graphs: DecodeGraphs, recorder: Recorder) -> None:
    kv = pool()
    recorder.error = RuntimeError("not while capturing")
    for _ in range(STEPS_BEFORE):
        assert graphs.forward(inputs(2), kv) is None
    with pytest.warns(KernelsWarning, match="not recorded, which is slower: not while capturing"):
        assert graphs.forward(inputs(2), kv) is None
    recorder.error = None
    for _ in range(2 * STEPS_BEFORE):
        assert graphs.forward(inputs(2), kv) is None
    assert recorder.sizes == []
