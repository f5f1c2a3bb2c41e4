"""Weights in a Hugging Face folder: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, sorted. Reads the index only. Raises InputError naming what is missing."""
    if (folder / INDEX_FILE).is_file():
        files = [folder / name for name in sorted(set(_weight_map(folder).values()))]
    elif (folder / SINGLE_FILE).is_file():
        files = [folder / SINGLE_FILE]
    else:
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
        found = f" (found {', '.join(others[:3])}: convert it with transformers' save_pretrained)" if others else ""
        raise InputError(f"{folder}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there{found}")
    for file in files:
        if not file.is_file():
            raise InputError(f"{folder}: {INDEX_FILE} names {file.name}, which is missing")
    return files


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise InputError(f"{path}: weight_map must map tensor names to file names")
    outside = [file for file in names.values() if Path(file).name != file]
    if outside:
        raise InputError(f"{path}: weight_map names {outside[0]!r}, which is not a file of this folder")
    return names


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises InputError when it cannot be read or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: cannot read it as JSON: {e}") from e
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


class SafetensorsFile:
    """The tensors of one safetensors file, which is mapped, not read whole. Raises InputError if it is no such file.

    Attributes:
        shapes: of all tensors.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt", device="cpu")
            names = list(self._file.keys())
        except (SafetensorError, OSError) as e:
            raise InputError(f"{path}: not a whole safetensors file ({e}); download it again") from e
        self.shapes: dict[str, tuple[int, ...]] = {name: self._shape(name) for name in names}

    def _shape(self, name: str) -> tuple[int, ...]:
        info = self._file.get_slice(name)
        if info.get_dtype() not in _DTYPES:
            raise InputError(
                f"{self.path}: tensor {name} has type {info.get_dtype()}, which is not supported; "
                f"supported: {', '.join(sorted(_DTYPES))}"
            )
        return tuple(info.get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor, in the file's dtype. Raises InputError if its bytes cannot be read."""
        from safetensors import SafetensorError

        try:
            return self._file.get_tensor(name)
        except (SafetensorError, OSError) as e:
            raise InputError(f"{self.path}: cannot read tensor {name}: {e}") from e

    def close(self) -> None:
        self._file = None


class HFCheckpoint:
    """A `Checkpoint` over the safetensors files of a folder; files are mapped, not read whole."""

    def __init__(self, folder: Path) -> None:
        self._files = [SafetensorsFile(path) for path in weight_files(folder)]
        self._owner: dict[str, SafetensorsFile] = {}
        for file in self._files:
            for name in file.shapes:
                if name in self._owner:
                    raise InputError(f"{file.path}: tensor {name} is also in {self._owner[name].path.name}")
                self._owner[name] = file
        if (folder / INDEX_FILE).is_file():
            absent = sorted(set(_weight_map(folder)) - set(self._owner))
            if absent:
                raise InputError(f"{folder}: {INDEX_FILE} lists {absent[0]}, which is in none of the files")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: file.shapes[name] for name, file in self._owner.items()}

    def read_into(self, name: str, out: Tensor) -> None:
        out.copy_(self._owner[name].read(name))

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._owner.clear()
