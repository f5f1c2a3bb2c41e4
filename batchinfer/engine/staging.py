"""Host arrays to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Every array begins at a multiple of this: kernels are compiled once for aligned pointers.
ALIGNMENT_BYTES = 64


class Event(Protocol):
    """Of torch.cuda.Event, what is needed."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Staging:
    """Gathers arrays in one pinned buffer and copies them at once, behind whatever the device does.

    A copy from ordinary memory waits until the device has come to it. There are several buffers in turn; one is
    written again only when the copy out of it is done. On a CPU arrays become tensors as they are.
    """

    def __init__(self, device: torch.device, num_buffers: int = 3) -> None:
        self.device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * num_buffers
        self._copied: list[Event | None] = [None] * num_buffers
        self._next = 0

    def put(self, arrays: Sequence[npt.NDArray[np.generic]]) -> list[Tensor]:
        """A tensor on the device for each array, of its shape and type. They share memory of their own."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        begins, num_bytes = [], 0
        for array in arrays:
            begins.append(num_bytes)
            num_bytes += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        index, buffer = self._free_buffer(num_bytes)
        host = buffer.numpy()
        for begin, array in zip(begins, arrays, strict=True):
            host[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        out = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        out.copy_(buffer[:num_bytes], non_blocking=True)
        self._copied[index] = self._record()
        return [
            out[begin : begin + array.nbytes].view(_dtype(array)).view(array.shape)
            for begin, array in zip(begins, arrays, strict=True)
        ]

    def _free_buffer(self, num_bytes: int) -> tuple[int, Tensor]:
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        copied = self._copied[index]
        if copied is not None:
            copied.synchronize()
        if self._buffers[index].numel() < num_bytes:
            self._buffers[index] = self._pinned(max(num_bytes, 1 << 16))
        return index, self._buffers[index]

    def _pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _record(self) -> Event:
        event = torch.cuda.Event()
        event.record()
        return event


def _dtype(array: npt.NDArray[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
