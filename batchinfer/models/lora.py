"""LoRA adapters in PEFT's file format, merged into their base while its weights are read.

A merged weight is W + s * B @ A, with s = lora_alpha / r (Hu et al. 2021, LoRA, section 4.1), or
lora_alpha / sqrt(r) with use_rslora (Kalajdzievski 2023). The sum is made in fp32 and rounded once, to the
dtype that the model runs in. After that the model is one like any other: it costs what its base costs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import InputError
from batchinfer.models.hf_checkpoint import SafetensorsFile, read_json
from batchinfer.models.weights import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.(lora_(?P<side>[AB])|base_layer)\.weight")
#: What an adapter may not have: it is more than a product of two matrices beside a linear layer.
_REFUSED = (
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "use_dora",
    "lora_bias",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
#: Ways to begin that leave the base as it is. The others (PiSSA, OLoRA, LoftQ, ...) train on a changed base.
_HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that has been found and understood, without its weights.

    Attributes:
        base: name of the base model, as the training wrote it; None if it wrote none.
        rank, alpha: of modules that no pattern matches.
        rank_pattern, alpha_pattern: regular expression of module names -> their own.
        is_rank_stabilised: the scale is alpha / sqrt(rank).
    """

    folder: Path
    base: str | None
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    is_rank_stabilised: bool

    @property
    def files(self) -> list[Path]:
        """What the merged weights depend on."""
        return [self.folder / CONFIG_FILE, self.folder / WEIGHTS_FILE]

    def rank_of(self, module: str) -> int:
        return _matched(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _matched(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def _matched(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """As PEFT: the first key that is the module's name from some dot on."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def read_adapter(folder: Path) -> LoraAdapter:
    """Raises InputError when the folder holds no LoRA adapter, or one that cannot be merged, naming why."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise InputError(f"{folder}: no {CONFIG_FILE}; a PEFT adapter folder is expected")
    config = read_json(path)
    _check(config, path)
    if not (folder / WEIGHTS_FILE).is_file():
        binary = (folder / "adapter_model.bin").is_file()
        hint = " (found adapter_model.bin: save it again with safe_serialization=True)" if binary else ""
        raise InputError(f"{folder}: no {WEIGHTS_FILE}{hint}")
    base = config.get("base_model_name_or_path")
    return LoraAdapter(
        folder=folder,
        base=base if isinstance(base, str) and base else None,
        rank=_number(config, "r", path, int),
        alpha=_number(config, "lora_alpha", path, float),
        rank_pattern=_pattern(config, "rank_pattern", path, int),
        alpha_pattern=_pattern(config, "alpha_pattern", path, float),
        is_rank_stabilised=bool(config.get("use_rslora")),
    )


def _check(config: Mapping[str, Any], path: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InputError(f"{path}: peft_type is {kind!r}; only LORA adapters can be merged")
    for name in _REFUSED:
        if config.get(name):
            raise InputError(f"{path}: {name} = {config[name]!r:.100} is not supported: merge the adapter with peft")
    if config.get("bias", "none") != "none":
        raise InputError(f"{path}: bias = {config['bias']!r} is not supported: merge the adapter with peft")
    begin = config.get("init_lora_weights", True)
    if begin not in _HARMLESS_INITS:
        raise InputError(
            f"{path}: init_lora_weights = {begin!r} trains on a changed base: save the adapter with "
            "path_initial_model_for_weight_conversion, which makes it one for the base itself"
        )


def _number(config: Mapping[str, Any], name: str, path: Path, kind: type) -> Any:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind is int and value != int(value)):
        raise InputError(f"{path}: {name} must be a number, got {value!r}")
    if kind is int and value < 1:  # a rank
        raise InputError(f"{path}: {name} must be at least 1, got {value!r}")
    return kind(value)


def _pattern(config: Mapping[str, Any], name: str, path: Path, kind: type) -> dict[str, Any]:
    """Names of modules, each a regular expression -> number."""
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise InputError(f"{path}: {name} must be an object, got {found!r:.100}")
    for key in found:
        try:
            re.compile(key)
        except re.error as error:
            raise InputError(f"{path}: {name} has {key!r}, which is no regular expression: {error}") from error
    return {key: _number(found, key, path, kind) for key in found}


class LoraCheckpoint:
    """A `Checkpoint` of the base with the adapter's products added.

    Raises InputError for tensors that are no pair of a linear layer of the base, and for wrong shapes.
    """

    def __init__(self, base: Checkpoint, adapter: LoraAdapter) -> None:
        self._base = base
        self._adapter = adapter
        self._file = SafetensorsFile(adapter.folder / WEIGHTS_FILE)
        try:
            self._modules = self._find_modules()  # name of the base's weight -> name of the module in the file
        except InputError:
            self._file.close()
            raise

    def _find_modules(self) -> dict[str, str]:
        sides: dict[str, set[str]] = {}
        for name in self._file.shapes:
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise InputError(
                    f"{self._file.path}: {name} is not the LoRA of a linear layer (embeddings, biases and whole "
                    "modules are not supported): merge the adapter with peft"
                )
            sides.setdefault(match["module"], set()).update(match["side"] or ())
        found: dict[str, str] = {}
        for module, both in sides.items():
            if both != {"A", "B"}:
                raise InputError(f"{self._file.path}: {module} lacks lora_{min({'A', 'B'} - both)}")
            weight = module.removeprefix(_PREFIX) + ".weight"
            found[weight] = module
            self._check_shapes(weight, module)
        if not found:
            raise InputError(f"{self._file.path}: holds no tensor")
        return found

    def _check_shapes(self, weight: str, module: str) -> None:
        shapes = self._base.shapes()
        if weight not in shapes:
            tied = ": the model's head is its embedding" if weight == "lm_head.weight" else ""
            raise InputError(f"{self._file.path}: {module} is no layer of the base, which has no {weight}{tied}")
        if weight.endswith(("embed_tokens.weight", "norm.weight")):
            raise InputError(f"{self._file.path}: {module} is not a linear layer, which is not supported")
        own = self._file.shapes.get(f"{module}.base_layer.weight", shapes[weight])
        if own != shapes[weight]:
            raise InputError(f"{self._file.path}: {module} was trained on a weight of {list(own)}: is this its base?")
        rank, (rows, columns) = self._adapter.rank_of(module.removeprefix(_PREFIX)), shapes[weight]
        a, b = (self._file.shapes[f"{module}.lora_{side}.weight"] for side in "AB")
        if (a, b) != ((rank, columns), (rows, rank)):
            raise InputError(
                f"{self._file.path}: {module} has lora_A {list(a)} and lora_B {list(b)}, for rank {rank} and a base "
                f"weight of {[rows, columns]} they must be {[rank, columns]} and {[rows, rank]}: is this its base?"
            )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._base.shapes()

    def read_into(self, name: str, out: Tensor) -> None:
        module = self._modules.get(name)
        if module is None:
            self._base.read_into(name, out)
            return
        import torch

        wide = torch.empty(out.shape, dtype=torch.float32)
        if f"{module}.base_layer.weight" in self._file.shapes:  # PEFT saves the head that it was trained with
            wide.copy_(self._file.read(f"{module}.base_layer.weight"))
        else:
            self._base.read_into(name, wide)
        a, b = (self._file.read(f"{module}.lora_{side}.weight").float() for side in "AB")
        # As PEFT rounds: first the product, then its multiple.
        wide += (b @ a) * self._adapter.scale_of(module.removeprefix(_PREFIX))
        out.copy_(wide)

    def close(self) -> None:
        self._file.close()
        self._base.close()
