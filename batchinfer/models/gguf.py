"""A llama, qwen2 or qwen3 model in GGUF: metadata -> DecoderSpec, tensors under their Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchinfer.errors import InputError
from batchinfer.models.gguf_file import GGUFFile, GGUFTensor, dequantize_into
from batchinfer.models.spec import FAMILIES, DecoderSpec, Family, RopeSpec

if TYPE_CHECKING:
    from torch import Tensor

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)$")
#: Holds rope frequency divisors; goes into the spec, not into the weights.
_ROPE_FREQS = "rope_freqs.weight"
#: Keys that change what the model computes and that this decoder has no place for.
_REFUSED_KEYS = (
    "expert_count",
    "attention.scale",
    "attention.clamp_kqv",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
)


def read_gguf_spec(file: GGUFFile) -> DecoderSpec:
    """The model's shape. Raises InputError naming a missing key or what is not supported."""
    return _SpecReader(file).read()


@dataclass(slots=True)
class _SpecReader:
    file: GGUFFile
    arch: str = ""

    def read(self) -> DecoderSpec:
        family = self._family()
        for name in _REFUSED_KEYS:
            if self._optional(name):
                raise InputError(f"{self.file.path}: {self.arch}.{name} = {self._optional(name)} is not supported")
        if (parts := self.file.metadata.get("split.count", 1)) > 1:
            raise InputError(f"{self.file.path}: is one of {parts} parts; merge them (llama-gguf-split --merge)")
        if "token_embd.weight" not in self.file.tensors:
            raise InputError(f"{self.file.path}: missing tensor token_embd.weight")
        hidden, num_heads = self._count("embedding_length"), self._count("attention.head_count")
        head_dim = self._head_dim(hidden, num_heads)
        num_layers = self._count("block_count")
        max_position = self._count("context_length")
        has = self.file.tensors.__contains__
        return DecoderSpec(
            architecture=family.architecture,
            vocab_size=self.file.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=self._count("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=self._count("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=self._eps(),
            rope=self._rope(head_dim, max_position),
            max_position=max_position,
            tie_word_embeddings=not has("output.weight"),
            qkv_bias=family.qkv_bias is True or has("blk.0.attn_q.bias"),
            o_bias=has("blk.0.attn_output.bias"),
            mlp_bias=has("blk.0.ffn_down.bias"),
            qk_norm=family.qk_norm,
            hidden_act="silu",
            sliding_windows=(self._sliding_window(),) * num_layers,
            dtype=self._dtype(),
        )

    def _family(self) -> Family:
        if "general.architecture" not in self.file.metadata:
            raise InputError(f"{self.file.path}: missing key general.architecture")
        self.arch = str(self.file.metadata["general.architecture"])
        families = {family.gguf_arch: family for family in FAMILIES.values() if family.gguf_arch}
        if self.arch not in families:
            raise InputError(
                f"{self.file.path}: architecture {self.arch!r} is not supported; supported: {', '.join(families)}"
            )
        return families[self.arch]

    def _optional(self, name: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.arch}.{name}", default)

    def _count(self, name: str, default: int | None = None) -> int:
        value = self._optional(name, default)
        if value is None:
            raise InputError(f"{self.file.path}: missing key {self.arch}.{name}")
        if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:
            value = value.tolist()[0]  # one entry per layer, all the same
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{self.file.path}: {self.arch}.{name} must be one whole number from 1, got {value!r}")
        return value

    def _eps(self) -> float:
        eps = self._optional("attention.layer_norm_rms_epsilon")
        if eps is None:
            raise InputError(f"{self.file.path}: missing key {self.arch}.attention.layer_norm_rms_epsilon")
        # float32 in the file: the shortest decimal that is this float32 is what the config said (1e-05).
        return float(str(np.float32(eps)))

    def _head_dim(self, hidden: int, num_heads: int) -> int:
        if "attention.key_length" not in self._keys() and hidden % num_heads:
            raise InputError(f"{self.file.path}: {hidden} channels do not divide into {num_heads} heads")
        head_dim = self._count("attention.key_length", hidden // num_heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._count(name, head_dim) != head_dim:
                raise InputError(
                    f"{self.file.path}: {self.arch}.{name} = {self._count(name)} with heads of {head_dim} channels "
                    "is not supported"
                )
        return head_dim

    def _keys(self) -> set[str]:
        prefix = self.arch + "."
        return {key.removeprefix(prefix) for key in self.file.metadata if key.startswith(prefix)}

    def _rope(self, head_dim: int, max_position: int) -> RopeSpec:
        theta = float(self._optional("rope.freq_base", 10000.0))
        kind = self._optional("rope.scaling.type", "linear" if self._optional("rope.scale_linear") else "none")
        factor = float(self._optional("rope.scaling.factor", self._optional("rope.scale_linear", 1.0)))
        freq_factors = None
        if _ROPE_FREQS in self.file.tensors:
            freq_factors = tuple(self.file.read(_ROPE_FREQS).reshape(-1).tolist())
            if len(freq_factors) != head_dim // 2:
                raise InputError(
                    f"{self.file.path}: {_ROPE_FREQS} has {len(freq_factors)} values, expected {head_dim // 2}"
                )
        if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
            return RopeSpec("default", theta, head_dim, freq_factors=freq_factors)
        if kind == "linear":
            return RopeSpec("linear", theta, head_dim, factor=factor, freq_factors=freq_factors)
        if kind == "yarn":
            original = self._count("rope.scaling.original_context_length", max_position)
            return RopeSpec(
                "yarn", theta, head_dim, factor=factor, original_max_position=original, freq_factors=freq_factors
            )
        raise InputError(f"{self.file.path}: unknown rope type {kind!r} in {self.arch}.rope.scaling.type")

    def _sliding_window(self) -> int | None:
        window = self._optional("attention.sliding_window")
        if not window:
            return None
        if self.arch != "llama":
            raise InputError(
                f"{self.file.path}: {self.arch}.attention.sliding_window = {window} does not say which layers slide; "
                "use the model in Hugging Face layout"
            )
        return self._count("attention.sliding_window")  # Mistral: every layer

    def _dtype(self) -> str:
        """ "float32" for F32 weights, "float16" for F16, else "bfloat16" (what quantised weights are run in)."""
        kind = self.file.tensors["token_embd.weight"].type_name
        matrices = {tensor.type_name for tensor in self.file.tensors.values() if len(tensor.shape) == 2} or {kind}
        if matrices == {"F32"}:
            return "float32"
        return "float16" if matrices <= {"F16", "F32"} else "bfloat16"


class GGUFCheckpoint:
    """A `Checkpoint` over a GGUF file: Hugging Face names, rows of q and k in Hugging Face order."""

    def __init__(self, path: Path, spec: DecoderSpec) -> None:
        self.file = GGUFFile(path)
        arch = self.file.metadata.get("general.architecture")
        # llama.cpp's converter interleaves the two halves of each rotated head for this architecture only.
        self._permuted_heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads} if arch == "llama" else {}
        self._tensors: dict[str, tuple[GGUFTensor, int | None]] = {}
        for name, tensor in self.file.tensors.items():
            if name == _ROPE_FREQS:
                continue
            match = _LAYER_TENSOR.match(name)
            heads = self._permuted_heads.get(match[2]) if match else None
            self._tensors[hugging_face_name(name)] = (tensor, heads)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, (tensor, _) in self._tensors.items()}

    def read_into(self, name: str, out: Tensor) -> None:
        tensor, num_heads = self._tensors[name]
        raw = self.file.raw(tensor)
        if num_heads is None:
            dequantize_into(raw, tensor, out)
        elif len(tensor.shape) == 1:  # a bias: one value per head channel, not quantised by rows
            import torch

            flat = torch.empty(tensor.shape, dtype=torch.float32)
            dequantize_into(raw, tensor, flat)
            out.copy_(torch.from_numpy(unpermute(flat.numpy(), num_heads)))
        else:
            dequantize_into(unpermute(raw, num_heads), tensor, out)

    def close(self) -> None:
        self.file.close()


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; names without one are returned as they are."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_TENSOR.match(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return name


def unpermute(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows (q, k of llama.cpp) -> rows of Hugging Face: within a head, (0, d/2, 1, d/2+1, ...) -> (0, 1, ...)."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
