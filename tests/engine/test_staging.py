"""Host arrays to the device: on a CPU, and with made-up events where the copy is late."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer.engine.staging import ALIGNMENT_BYTES, Staging

ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],  # not contiguous
    np.array([], dtype=np.int64),
    np.array([[1.5], [2.5]], dtype=np.float32),
    np.array([True, False, True]),
]


def equal(tensors: list[Tensor], arrays: list[np.ndarray]) -> bool:
    return all(
        np.array_equal(tensor.cpu().numpy(), array) and tensor.numpy().dtype == array.dtype
        for tensor, array in zip(tensors, arrays, strict=True)
    )


def test_on_a_cpu_arrays_are_taken_as_they_are() -> None:
    array = np.arange(4)
    (tensor,) = Staging(torch.device("cpu")).put([array])
    assert tensor.data_ptr() == array.ctypes.data


class LateDevice(Staging):
    """A device that copies only when it comes to it: its memory is the host's."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.num_recorded = 0
        self.num_done = 0
        self.num_pinned = 0

    def _pinned(self, num_bytes: int) -> Tensor:
        self.num_pinned += 1
        return torch.empty(num_bytes, dtype=torch.uint8)

    def _record(self) -> LateEvent:
        self.num_recorded += 1
        return LateEvent(self, self.num_recorded)


class LateEvent:
    def __init__(self, device: LateDevice, number: int) -> None:
        self.device, self.number = device, number

    def query(self) -> bool:
        return self.device.num_done >= self.number

    def synchronize(self) -> None:
        self.device.num_done = max(self.device.num_done, self.number)


def test_a_buffer_is_written_again_only_after_its_copy_and_nobody_waits() -> None:
    staging = LateDevice()
    for _ in range(5):
        staging.put(ARRAYS)
    assert staging.num_done == 0, "not waited for"
    assert staging.num_pinned == 5, "no copy is done"
    staging.num_done = 3
    for _ in range(3):
        staging.put(ARRAYS)
    assert staging.num_pinned == 5
    staging.put(ARRAYS)
    assert staging.num_pinned == 6


class SameMemory(LateDevice):
    """Its tensors can be read here."""

    def put(self, arrays: list[np.ndarray]) -> list[Tensor]:  # type: ignore[override]
        with pytest.MonkeyPatch.context() as patch:
            empty = torch.empty
            patch.setattr(torch, "empty", lambda *size, **options: empty(*size, dtype=options["dtype"]))
            return super().put(arrays)


def test_arrays_arrive_whole_and_aligned() -> None:
    staging = SameMemory()
    first = staging.put(ARRAYS)
    second = staging.put([np.full(3, 9, dtype=np.int64)])
    assert equal(first, ARRAYS)
    assert second[0].tolist() == [9, 9, 9]
    starts = [tensor.data_ptr() - first[0].data_ptr() for tensor in first if tensor.numel()]
    assert all(start % ALIGNMENT_BYTES == 0 for start in starts)


def test_buffers_grow() -> None:
    staging = SameMemory()
    small, large = np.arange(3), np.arange(100_000)
    for array in (small, large, small):
        staging.num_done = staging.num_recorded
        assert staging.put([array])[0].tolist() == array.tolist()
    assert staging.num_pinned == 2


RESULTS = [
    torch.tensor(1.5),
    torch.tensor([True, False, True]),
    torch.arange(6, dtype=torch.int32).reshape(2, 3).T,  # not contiguous
    torch.empty(0, dtype=torch.int64),
    torch.tensor([[-1, 7]]),
]


def as_lists(arrays: list[np.ndarray]) -> list[object]:
    return [(array.dtype, array.shape, array.tolist()) for array in arrays]


def test_results_come_in_one_copy_and_are_waited_for_only_when_they_are_read() -> None:
    staging = LateDevice()
    first, second = staging.fetch(RESULTS), staging.fetch(RESULTS[:1])
    assert (staging.num_recorded, staging.num_done) == (2, 0)
    assert as_lists(first.arrays()) == as_lists([tensor.numpy() for tensor in RESULTS])
    assert staging.num_done == 1, "not for the copy behind it"
    assert as_lists(second.arrays()) == as_lists([np.array(1.5, dtype=np.float32)])


def test_on_a_cpu_results_are_taken_as_they_are() -> None:
    tensor = torch.arange(4)
    (array,) = Staging(torch.device("cpu")).fetch([tensor]).arrays()
    assert array.ctypes.data == tensor.data_ptr()
