"""Reading of GGUF files: metadata, tensor table, and dequantization into place.

The `gguf` package's reader takes seconds for a vocabulary (one array view per token); this one walks the same
format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) once. Block formats come from the package.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchinfer.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

#: Tensor types that are read, by name. Everything else is refused by name.
TENSOR_TYPES = frozenset(
    {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
)
# GGUF value type -> struct code; 8 is a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Dequantized at a time, so that the working set stays in the cache and is not mapped anew for every chunk:
# SmolLM2-135M takes 0.5 s on one core with 2^16, 0.8 s with 2^14 and 1.5 s with 2^18.
_CHUNK_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    name: str
    type_name: str  # "Q4_1", ...
    shape: tuple[int, ...]  # rows first, as numpy and torch have it
    offset: int  # of the first byte, from the start of the file
    num_bytes: int


class GGUFFile:
    """A mapped GGUF file. `metadata` holds plain Python values; arrays of numbers are numpy arrays.

    Raises InputError when the file cannot be read, is not GGUF (little-endian, version 2 or 3) or is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._map = _map_file(path)
        try:
            self._parse()
        except (struct.error, ValueError, TypeError, LookupError, ArithmeticError, MemoryError) as e:
            self.close()
            if isinstance(e, InputError):
                raise
            raise InputError(f"{path}: not a whole GGUF file ({e}); download or convert it again") from e

    def close(self) -> None:
        # A view that is still held (a traceback holds frames) keeps the mapping; it ends with the view.
        with suppress(BufferError):
            self._map.close()

    def raw(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, [rows, bytes of a row]; a view of the file."""
        data = np.frombuffer(self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        num_rows = 1
        for size in tensor.shape[:-1]:
            num_rows *= size
        return data.reshape(num_rows, -1)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A small tensor, dequantized."""
        import torch

        tensor = self.tensors[name]
        out = torch.empty(tensor.shape, dtype=torch.float32)
        dequantize_into(self.raw(tensor), tensor, out)
        return out.numpy()

    def _parse(self) -> None:
        cursor = _Cursor(self._map)
        if bytes(self._map[:4]) != b"GGUF":
            raise InputError(f"{self.path}: not a GGUF file (it starts with {bytes(self._map[:4])!r})")
        cursor.at = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise InputError(f"{self.path}: GGUF version {version} is not supported (2 and 3 little-endian are)")
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        infos = [cursor.tensor_info() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-cursor.at // alignment) * alignment
        for name, dims, type_id, offset in infos:
            self._add_tensor(name, dims, type_id, start + offset)

    def _add_tensor(self, name: str, dims: tuple[int, ...], type_id: int, offset: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise InputError(f"{self.path}: tensor {name} has unknown type number {type_id}") from None
        if kind.name not in TENSOR_TYPES:
            raise InputError(
                f"{self.path}: tensor {name} has type {kind.name}, which is not supported; "
                f"supported: {', '.join(sorted(TENSOR_TYPES))}"
            )
        if name in self.tensors:
            raise InputError(f"{self.path}: tensor {name} is there twice")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        num_elements = 1
        for size in dims:
            num_elements *= size
        if dims[0] % block:
            raise InputError(f"{self.path}: tensor {name} has rows of {dims[0]} values, not a multiple of {block}")
        num_bytes = num_elements // block * block_bytes
        if offset + num_bytes > len(self._map):
            raise InputError(
                f"{self.path}: cut short: tensor {name} ends at byte {offset + num_bytes}, the file at {len(self._map)}"
            )
        self.tensors[name] = GGUFTensor(name, kind.name, tuple(reversed(dims)), offset, num_bytes)


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        end = self.at + size
        if end > len(self.buffer):
            raise ValueError("a string runs past its end")
        text = self.buffer[self.at : end].decode("utf-8")
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind, size = self.scalar("I"), self.scalar("Q")
        if size > len(self.buffer):
            raise ValueError("an array runs past its end")
        if item_kind == _STRING:
            return self._strings(size)
        if item_kind == _ARRAY:
            return [self.value(item_kind) for _ in range(size)]
        items = np.frombuffer(self.buffer, dtype="<" + _numpy_code(item_kind), count=size, offset=self.at)
        self.at += items.nbytes
        return items.copy()

    def _strings(self, size: int) -> list[str]:
        # Inlined: a vocabulary has 10^5 of them.
        length, buffer, at, end = struct.Struct("<Q").unpack_from, self.buffer, self.at, len(self.buffer)
        texts = []
        for _ in range(size):
            start = at + 8
            at = start + length(buffer, at)[0]
            if at > end:
                raise ValueError("a string runs past its end")
            texts.append(buffer[start:at].decode("utf-8"))
        self.at = at
        return texts

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= 4:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        dims = tuple(self.scalar("Q") for _ in range(num_dims))
        return name, dims, self.scalar("I"), self.scalar("Q")


def dequantize_into(raw: npt.NDArray[np.uint8], tensor: GGUFTensor, out: Tensor) -> None:
    """Dequantize rows `raw` [rows, bytes of a row] into `out` (`tensor.shape`), a chunk of rows at a time."""
    import torch

    decode = _decoder(tensor.type_name)
    width = tensor.shape[-1]
    flat = out.view(-1, width)
    step = max(1, _CHUNK_ELEMENTS // width)
    for start in range(0, raw.shape[0], step):
        chunk = decode(raw[start : start + step].copy().reshape(1, -1))
        flat[start : start + step].copy_(torch.from_numpy(chunk.reshape(-1, width)))


def _decoder(type_name: str) -> Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[type_name]
    return lambda data: dequantize(data, kind)


def _numpy_code(kind: int) -> str:
    return np.dtype(_SCALARS[kind]).str[1:]


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as e:  # ValueError: an empty file
        raise InputError(f"{path}: cannot read the GGUF file: {e}") from e
