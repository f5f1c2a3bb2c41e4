"""Decoder weights in the layout that the forward pass wants: q, k, v fused, gate and up fused.

A `Checkpoint` gives tensors under their Hugging Face names, whatever the file format; `build_weights` checks names
and shapes before it reads a byte of them, allocates the fused tensors once and has every part read into its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from batchinfer.errors import InputError
from batchinfer.models.spec import DecoderSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer; contiguous tensors of one dtype on one device."""

    attn_norm: Tensor  # [hidden]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]; rows: q heads, k heads, v heads
    qkv_bias: Tensor | None  # [(num_heads + 2 * num_kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Tensor  # [hidden, num_heads * head_dim]
    o_bias: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]; gate rows first
    gate_up_bias: Tensor | None  # [2 * intermediate]
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None  # [hidden]


@dataclass(slots=True)
class DecoderWeights:
    embed: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    # [vocab, hidden]; the same object as `embed` when tied. A head of its own in the file wins over a config that
    # says tied, as in transformers.
    lm_head: Tensor


class Checkpoint(Protocol):
    """Tensors on disk under their Hugging Face names."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor there; reads no weights."""

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor into `out` (its shape), converting to `out`'s dtype and device. Raises InputError."""

    def close(self) -> None:
        """Release the files."""


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    shape: tuple[int, ...]


_LayerLayout = dict[str, tuple[_Part, ...]]  # field of LayerWeights -> what it is fused from, in row order

_EMBED, _FINAL_NORM, _LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
#: Buffers that old checkpoints carry along and nobody reads.
_IGNORED = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias)$")


def build_weights(
    spec: DecoderSpec, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, where: str
) -> DecoderWeights:
    """Read all weights of `spec` from `checkpoint`; `where` names it in errors.

    Raises InputError naming tensors that are missing, left over, or of another shape than the config says.
    """
    import torch

    layouts = [_layer_layout(spec, index) for index in range(spec.num_layers)]
    _check_tensors(spec, layouts, checkpoint.shapes(), where)

    def read(*parts: _Part) -> Tensor:
        rest = parts[0].shape[1:]
        out = torch.empty((sum(part.shape[0] for part in parts), *rest), dtype=dtype, device=device)
        start = 0
        for part in parts:
            checkpoint.read_into(part.name, out[start : start + part.shape[0]])
            start += part.shape[0]
        return out

    embed = read(_Part(_EMBED, (spec.vocab_size, spec.hidden_size)))
    layers = [
        LayerWeights(**{name: read(*parts) if parts else None for name, parts in layout.items()})  # type: ignore[arg-type]
        for layout in layouts
    ]
    final_norm = read(_Part(_FINAL_NORM, (spec.hidden_size,)))
    head = embed
    if _LM_HEAD in checkpoint.shapes():
        head = read(_Part(_LM_HEAD, (spec.vocab_size, spec.hidden_size)))
        if spec.tie_word_embeddings and torch.equal(head, embed):
            head = embed
    return DecoderWeights(embed=embed, layers=layers, final_norm=final_norm, lm_head=head)


def _layer_layout(spec: DecoderSpec, index: int) -> _LayerLayout:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def part(name: str, *shape: int) -> _Part:
        return _Part(f"model.layers.{index}.{name}", shape)

    def when(condition: bool, *parts: _Part) -> tuple[_Part, ...]:
        return parts if condition else ()

    rows = (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
    return {
        "attn_norm": (part("input_layernorm.weight", hidden),),
        "qkv": tuple(part(f"self_attn.{x}_proj.weight", n, hidden) for x, n in rows),
        "qkv_bias": when(spec.qkv_bias, *(part(f"self_attn.{x}_proj.bias", n) for x, n in rows)),
        "q_norm": when(spec.qk_norm, part("self_attn.q_norm.weight", spec.head_dim)),
        "k_norm": when(spec.qk_norm, part("self_attn.k_norm.weight", spec.head_dim)),
        "o": (part("self_attn.o_proj.weight", hidden, q_rows),),
        "o_bias": when(spec.o_bias, part("self_attn.o_proj.bias", hidden)),
        "mlp_norm": (part("post_attention_layernorm.weight", hidden),),
        "gate_up": (part("mlp.gate_proj.weight", inner, hidden), part("mlp.up_proj.weight", inner, hidden)),
        "gate_up_bias": when(spec.mlp_bias, part("mlp.gate_proj.bias", inner), part("mlp.up_proj.bias", inner)),
        "down": (part("mlp.down_proj.weight", hidden, inner),),
        "down_bias": when(spec.mlp_bias, part("mlp.down_proj.bias", hidden)),
    }


def _all_parts(spec: DecoderSpec, layouts: Iterable[_LayerLayout], has_head: bool) -> Iterator[_Part]:
    yield _Part(_EMBED, (spec.vocab_size, spec.hidden_size))
    for layout in layouts:
        for parts in layout.values():
            yield from parts
    yield _Part(_FINAL_NORM, (spec.hidden_size,))
    if has_head:
        yield _Part(_LM_HEAD, (spec.vocab_size, spec.hidden_size))


def _check_tensors(
    spec: DecoderSpec, layouts: list[_LayerLayout], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    has_head = not spec.tie_word_embeddings or _LM_HEAD in shapes
    expected = {part.name: part.shape for part in _all_parts(spec, layouts, has_head)}
    missing = [name for name in expected if name not in shapes]
    if missing:
        hint = "; the config says the head is not tied to the embedding" if _LM_HEAD in missing else ""
        raise InputError(f"{where}: missing tensors: {_some(missing)}{hint}")
    extra = [name for name in shapes if name not in expected and not _IGNORED.search(name)]
    if extra:
        raise InputError(
            f"{where}: tensors that {spec.architecture} with this config does not have: {_some(extra)}; "
            "loading without them would compute another model"
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise InputError(
                f"{where}: tensor {name} has shape {list(shapes[name])}, but the config asks for {list(shape)}"
            )


def _some(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
