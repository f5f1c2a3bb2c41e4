"""One decoder for every family of the table in spec.py: embedding, layers, head."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from batchinfer.attention.backend import AttentionBackend
from batchinfer.attention.tree import RaggedBatch
from batchinfer.kernels import reference
from batchinfer.kernels.fp8_kv import FP8, KVScales, as_bytes
from batchinfer.models.rope import rope_tables
from batchinfer.models.spec import KV_SCALE_BYTES, DecoderSpec, kv_bytes_per_token
from batchinfer.models.weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One flat ragged batch; the tokens of a sequence are consecutive."""

    token_ids: Tensor  # [num_tokens] int64, device
    positions: Tensor  # [num_tokens] int64, device
    slots: Tensor  # [num_tokens] int64, device; where each token's KV goes
    ragged: RaggedBatch  # host
    outputs: Tensor | None = None  # [num_outputs] int64, device; tokens whose final hidden states are used, ascending


class KVPool(Protocol):
    """The KV of all layers, in blocks. How it lies within a block is the model's affair.

    Zeroed when made: a masked key still meets its value as 0 * v.
    """

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in every layer; all sources are read before a target is written."""

    def clear_blocks(self, blocks: list[int]) -> None:
        """Zero these blocks in every layer."""


def kv_bytes_per_block(spec: DecoderSpec, dtype: torch.dtype, block_size: int) -> int:
    """dtype: of the KV; that of fp8 includes its scales."""
    return block_size * kv_bytes_per_token(spec, dtype.itemsize, KV_SCALE_BYTES if dtype == FP8 else 0)


@dataclass(frozen=True, slots=True)
class KVCache:
    """The pool of the torch decoder: KV by slots, see kernels.reference."""

    k: Tensor  # [num_layers, num_blocks * block_size, num_kv_heads, head_dim]
    v: Tensor
    block_size: int
    all_scales: KVScales | None = None  # of fp8: each [num_layers, num_blocks, num_kv_heads, block_size] fp32

    @property
    def num_blocks(self) -> int:
        return self.k.shape[1] // self.block_size

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.k, self.v, *(self.all_scales or ()))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @classmethod
    def make(
        cls, spec: DecoderSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        shape = (spec.num_layers, num_blocks * block_size, spec.num_kv_heads, spec.head_dim)
        k, v = (zeroed_pages(shape, dtype, device) for _ in range(2))
        if dtype != FP8:
            return cls(k, v, block_size)
        of_scales = (spec.num_layers, num_blocks, spec.num_kv_heads, block_size)
        return cls(k, v, block_size, KVScales(*(zeroed_pages(of_scales, torch.float32, device) for _ in range(2))))

    def scales(self, layer: int) -> KVScales | None:
        return None if self.all_scales is None else KVScales(self.all_scales.k[layer], self.all_scales.v[layer])

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        sources, targets = torch.tensor(pairs, dtype=torch.int64, device=self.k.device).unbind(1)
        reference.copy_kv(self.k, self.v, sources, targets, self.block_size)
        if self.all_scales is not None:
            reference.copy_scales(*self.all_scales, sources, targets)

    def clear_blocks(self, blocks: list[int]) -> None:
        index = torch.tensor(blocks, dtype=torch.int64, device=self.k.device)
        for cache in (self.k, self.v):
            as_bytes(cache).view(cache.shape[0], -1, self.block_size, *cache.shape[2:])[:, index] = 0
        for scales in self.all_scales or ():
            scales[:, index] = 0


def zeroed_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Zeroed pages of the operating system cost nothing until they are touched, where torch.zeros writes the
    # whole pool. Large pages gained nothing (a block's KV of a layer lies together) and touch more memory.
    pages = mmap.mmap(-1, max(math.prod(shape) * dtype.itemsize, mmap.PAGESIZE))
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)


class LanguageModel(Protocol):
    """What the engine runs. `Decoder` is the real one; tests bring analytic stubs."""

    spec: DecoderSpec
    dtype: torch.dtype
    device: torch.device

    def make_kv(self, num_blocks: int, block_size: int) -> KVPool:
        """An empty pool for `forward`."""

    def forward(self, inputs: StepInputs, kv: Any) -> Tensor:
        """Store the tokens' KV; final hidden states [num_tokens, hidden_size].

        Rows that are not in `inputs.outputs` (None: all are) may hold any finite values, unless the
        token's KV is not finite: then neither is its row.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, vocab_size] of hidden [rows, hidden_size], any number of rows."""

    def target_logprobs(self, hidden: Tensor, targets: Tensor) -> reference.TargetLogprobs:
        """Log-probability of each target [rows] int64, logits never all held at once."""


@dataclass(frozen=True, slots=True)
class GreedyDraw:
    """The most probable id of each row."""

    token_ids: Tensor  # [rows] int; the lowest of equals
    logprobs: Tensor | None  # [rows] fp32 raw log-probability, if asked for
    is_finite: Tensor  # [rows] bool; False: some logit was NaN or infinite


@runtime_checkable
class FusedHead(Protocol):
    """A model that can draw greedy tokens without writing logits."""

    def greedy(self, hidden: Tensor, num_ids: int, *, wants_logprobs: bool) -> GreedyDraw:
        """hidden [rows, hidden_size], any number of rows; ids from num_ids on are not drawn."""


class Decoder:
    """A pre-norm transformer decoder over paged KV.

    Args:
        kv_dtype: FP8, or None: that of the weights.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        make_attention: Callable[[torch.device], AttentionBackend],
        max_model_len: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = weights.embed.dtype
        self.kv_dtype = kv_dtype or self.dtype
        self.device = weights.embed.device
        self.attention = make_attention(self.device)
        cos, sin = rope_tables(spec.rope, max_model_len)
        self._cos, self._sin = cos.to(self.device), sin.to(self.device)  # [max_model_len, rope.dim / 2] fp32
        self._windows = frozenset(spec.sliding_windows)

    def make_kv(self, num_blocks: int, block_size: int) -> KVCache:
        return KVCache.make(self.spec, num_blocks, block_size, self.kv_dtype, self.device)

    def forward(self, inputs: StepInputs, kv: KVCache) -> Tensor:
        num_tokens = len(inputs.token_ids)
        self.attention.plan(inputs.ragged, self._windows)
        cos, sin = self._cos[inputs.positions], self._sin[inputs.positions]
        x = self.weights.embed[inputs.token_ids]
        # Padding rows are computed and dropped: no matrix product sees an odd row count.
        x = torch.nn.functional.pad(x, (0, 0, 0, reference.pad_rows(num_tokens) - num_tokens))
        residual = None
        for index, layer in enumerate(self.weights.layers):
            x, residual = reference.rms_norm(x, layer.attn_norm, self.spec.rms_norm_eps, residual)
            x = self._attend(x, layer, index, cos, sin, inputs.slots, kv)
            x, residual = reference.rms_norm(x, layer.mlp_norm, self.spec.rms_norm_eps, residual)
            x = reference.linear(x, layer.gate_up, layer.gate_up_bias)
            x = reference.linear(reference.silu_and_mul(x), layer.down, layer.down_bias)
        x, _ = reference.rms_norm(x, self.weights.final_norm, self.spec.rms_norm_eps, residual)
        return x[:num_tokens]

    def _attend(
        self, x: Tensor, layer: LayerWeights, index: int, cos: Tensor, sin: Tensor, slots: Tensor, kv: KVCache
    ) -> Tensor:
        spec, num_tokens = self.spec, len(slots)
        qkv = reference.linear(x, layer.qkv, layer.qkv_bias)[:num_tokens]
        qkv = qkv.view(num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        q, k, v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, _ = reference.rms_norm(q, layer.q_norm, spec.rms_norm_eps)
            k, _ = reference.rms_norm(k, layer.k_norm, spec.rms_norm_eps)
        caches, scales = (kv.k[index], kv.v[index]), kv.scales(index)
        q = reference.rope_and_store_kv(q, k, v, cos, sin, slots, *caches, scales)
        out = self.attention.forward(q, *caches, spec.head_dim**-0.5, spec.sliding_windows[index], scales)
        out = torch.nn.functional.pad(out, (0, 0, 0, len(x) - num_tokens))
        return reference.linear(out, layer.o, layer.o_bias)

    def logits(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, reference.pad_rows(rows) - rows))
        return reference.head_logits(padded, self.weights.lm_head)[:rows]

    def target_logprobs(self, hidden: Tensor, targets: Tensor) -> reference.TargetLogprobs:
        return reference.linear_logprobs(hidden, self.weights.lm_head, targets)
