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
    """A device that copies only when it is waited for: its memory is the host's."""

    def __init__(self, num_buffers: int = 2) -> None:
        super().__init__(torch.device("meta"), num_buffers)
        self.waits: list[int] = []
        self.num_recorded = 0

    def _pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def _record(self) -> LateEvent:
        self.num_recorded += 1
        return LateEvent(self, self.num_recorded)


class LateEvent:
    def __init__(self, device: LateDevice, number: int) -> None:
        self.device, self.number = device, number

    def record(self) -> None:
        raise AssertionError("recorded when it is made")

    def synchronize(self) -> None:
        self.device.waits.append(self.number)


def test_a_buffer_is_written_again_only_after_its_copy() -> None:
    staging = LateDevice()
    for _ in range(5):
        staging.put(ARRAYS)
    assert staging.waits == [1, 2, 3], "two buffers: the third put waits for the first copy, and so on"


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
    staging = SameMemory(num_buffers=1)
    small, large = np.arange(3), np.arange(100_000)
    assert staging.put([small])[0].tolist() == small.tolist()
    assert equal(staging.put([large]), [large])
    assert equal(staging.put([small]), [small])
