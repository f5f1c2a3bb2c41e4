"""Where the threads of the C++ kernels run: each on a core of its own while they compute, the caller only then."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_calls import Kernels, num_threads, randn
from tiny_models import INSTRUCTION_SETS

from batchinfer.engine.machine import cores
from batchinfer.kernels.cpu.decoder import core_of_cpu

pytestmark = [
    pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ kernels were built"),
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(cores()) < 2, reason="one core, or not Linux"),
]


def test_cores_are_numbered_in_their_order() -> None:
    assert core_of_cpu([{1, 5}, {2}]).tolist() == [-1, 0, 1, -1, -1, 0]
    assert core_of_cpu([]).tolist() == []


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    kernels = Kernels(INSTRUCTION_SETS[0])
    yield kernels
    kernels.c.bi_bind_threads(None, 0)


def bind(kernels: Kernels) -> None:
    numbers = core_of_cpu(cores())
    kernels.c.bi_bind_threads(numbers.ctypes.data, len(numbers))


def compute(kernels: Kernels) -> None:
    kernels.head(randn(64, 32), kernels.pack(randn(4096, 32)), 4096)


def masks() -> dict[int, set[int]]:
    """The CPUs of each thread of this process, by its number."""
    return {int(task.name): os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}


def test_each_thread_has_a_core_and_the_caller_is_let_go(kernels: Kernels) -> None:
    before = os.sched_getaffinity(0)
    with num_threads(len(cores())):
        bind(kernels)
        compute(kernels)
        assert os.sched_getaffinity(0) == before
        bound = [mask for task, mask in masks().items() if mask != before]
        for core in cores()[1:]:
            assert core in bound, f"no thread stays on {core}"
        seen: list[set[int]] = []
        started = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        started.start()
        started.join()
        assert seen == [before]


def test_with_fewer_threads_than_cores_nobody_is_bound(kernels: Kernels) -> None:
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []

    def work() -> None:  # a thread of its own: it has no workers that were bound before
        torch.set_num_threads(1)
        bind(kernels)
        known = set(masks())
        compute(kernels)
        seen.append(os.sched_getaffinity(0))
        assert set(masks()) <= known

    with num_threads(1):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [before]


def test_a_core_that_was_taken_away_is_no_fault(kernels: Kernels) -> None:
    before = os.sched_getaffinity(0)
    numbers = np.array([-1] * 1000 + [0, 1], np.int32)  # CPUs that are not there
    kernels.c.bi_bind_threads(numbers.ctypes.data, len(numbers))
    with num_threads(2):
        compute(kernels)
    assert os.sched_getaffinity(0) == before
