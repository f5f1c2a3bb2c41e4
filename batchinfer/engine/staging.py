"""Host arrays to the device and results back, without waiting for the device before it must be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.generic]

#: Every array begins at a multiple of this: kernels are compiled once for aligned pointers.
ALIGNMENT_BYTES = 64


class Event(Protocol):
    """Of torch.cuda.Event, what is needed."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Staging:
    """Gathers arrays in one pinned buffer and copies them at once, behind whatever the device does.

    A copy from or to ordinary memory waits until the device has come to it. A buffer is written again only when the
    copy out of it is done; if none is, there is one buffer more. On a CPU arrays become tensors as they are, and back.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: deque[tuple[Tensor, Event]] = deque()  # each with its last copy, the oldest first

    def put(self, arrays: Sequence[Array]) -> list[Tensor]:
        """A tensor on the device for each array, of its shape and type. They share memory of their own."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        begins, num_bytes = [], 0
        for array in arrays:
            begins.append(num_bytes)
            num_bytes += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        buffer = self._free_buffer(num_bytes)
        host = buffer.numpy()
        for begin, array in zip(begins, arrays, strict=True):
            host[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        out = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        out.copy_(buffer[:num_bytes], non_blocking=True)
        self._buffers.append((buffer, self._record()))
        return [
            out[begin : begin + array.nbytes].view(_dtype(array)).view(array.shape)
            for begin, array in zip(begins, arrays, strict=True)
        ]

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Begin to bring these to the host, in one copy behind what the device does."""
        if self.device.type == "cpu":
            return Fetched(tensors)
        packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        buffer = self._pinned(packed.numel())
        buffer.copy_(packed, non_blocking=True)
        return Fetched(tensors, buffer, self._record())

    def _free_buffer(self, num_bytes: int) -> Tensor:
        if self._buffers and self._buffers[0][1].query():  # copies are done in their order
            buffer, _ = self._buffers.popleft()
            if buffer.numel() >= num_bytes:
                return buffer
        return self._pinned(max(num_bytes, 1 << 16))

    def _pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _record(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event


class Fetched:
    """Tensors on their way to the host. See Staging.fetch."""

    def __init__(self, tensors: Sequence[Tensor], buffer: Tensor | None = None, copied: Event | None = None) -> None:
        self._tensors = tensors
        self._buffer = buffer
        self._copied = copied

    def arrays(self) -> list[Array]:
        """Each tensor's values, in its shape and type. Waits for the copy, and for nothing that came after it."""
        if self._buffer is None or self._copied is None:
            return [tensor.numpy() for tensor in self._tensors]
        self._copied.synchronize()
        host, found, begin = self._buffer.numpy(), [], 0
        for tensor in self._tensors:
            part = host[begin : begin + tensor.nbytes]
            found.append(np.frombuffer(part.tobytes(), _numpy_dtype(tensor)).reshape(tensor.shape))
            begin += tensor.nbytes
        return found


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """[len(values)] int64 on the device, without waiting for it. torch keeps pinned memory until its copy is done."""
    host = torch.tensor(values, dtype=torch.int64)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _dtype(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype


def _numpy_dtype(tensor: Tensor) -> np.dtype[np.generic]:
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype
