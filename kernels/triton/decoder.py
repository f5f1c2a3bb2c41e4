"""A decoder over the Triton kernels: the same model as models/decoder.py, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.engine import sampler
from batchinfer.engine.sampler import DrawColumns
from batchinfer.engine.staging import Staging, upload
from batchinfer.kernels import reference
from batchinfer.kernels.choice import TRITON, TRITON_DETERMINISTIC
from batchinfer.kernels.reference import TargetLogprobs
from batchinfer.kernels.triton import head, sample
from batchinfer.kernels.triton.activation import silu_and_mul
from batchinfer.kernels.triton.attention import StaticTritonAttention, TritonAttention
from batchinfer.kernels.triton.copy import copy_kv
from batchinfer.kernels.triton.graphs import CudaRecorder, DecodeGraphs, Record, StaticStep
from batchinfer.kernels.triton.linear import linear
from batchinfer.kernels.triton.norm import rms_norm
from batchinfer.kernels.triton.rope import rope_and_store_kv
from batchinfer.models.decoder import GreedyDraw, KVCache, StepInputs
from batchinfer.models.rope import rope_tables
from batchinfer.models.spec import DecoderSpec
from batchinfer.models.weights import DecoderWeights, LayerWeights

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class SlotKV(KVCache):
    """The pool: KV by slots, see kernels.reference."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        sources, targets = zip(*pairs, strict=True)
        is_disjoint = not set(sources) & set(targets)
        copy_kv(
            self.k,
            self.v,
            upload(sources, self.k.device),
            upload(targets, self.k.device),
            self.block_size,
            is_disjoint=is_disjoint,
            scales=self.all_scales,
        )


class TritonDecoder:
    """LanguageModel, FusedHead and FusedDraw. `forward` does not wait for the device.

    Args:
        deterministic: products by Triton too, so that a row's bits depend on that row alone. Without it they are
            torch's, which on a GPU sum in another order for another number of rows.
        kv_dtype: FP8, or None: that of the weights.
        record: decode steps; None: only run them. Default: on a GPU.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        max_model_len: int,
        *,
        deterministic: bool = False,
        kv_dtype: torch.dtype | None = None,
        record: Record | None = None,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = weights.embed.dtype
        self.kv_dtype = kv_dtype or self.dtype
        self.device = weights.embed.device
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # Triton launches, and graphs are recorded, on the current one
        self.kernels = TRITON_DETERMINISTIC if deterministic else TRITON
        self._max_model_len = max_model_len
        cos, sin = rope_tables(spec.rope, max_model_len)
        self._cos, self._sin = cos.to(self.device), sin.to(self.device)  # [max_model_len, rope.dim / 2] fp32
        self._windows = frozenset(spec.sliding_windows)
        self._linear: Linear = linear if deterministic else plain_linear
        self._attention = TritonAttention(
            self.device, spec.num_heads, spec.num_kv_heads, spec.head_dim, self.dtype, is_invariant=deterministic
        )
        self._staging = Staging(self.device)
        if record is None and self.device.type == "cuda":
            record = CudaRecorder()
        self._graphs = (
            None if record is None else DecodeGraphs(self._run, self._static_attention, self._windows, record)
        )

    def _static_attention(self, num_rows: int, kv: KVCache) -> StaticTritonAttention:
        return self._attention.static(num_rows, -(-self._max_model_len // kv.block_size), kv.block_size)

    def make_kv(self, num_blocks: int, block_size: int) -> SlotKV:
        if self._graphs is not None:
            self._graphs.clear()
        return SlotKV.make(self.spec, num_blocks, block_size, self.kv_dtype, self.device)

    def forward(self, inputs: StepInputs, kv: KVCache) -> Tensor:
        hidden = None if self._graphs is None else self._graphs.forward(inputs, kv)
        if hidden is not None:
            return hidden
        self._attention.plan(inputs.ragged, self._windows)
        step = StaticStep(inputs.token_ids, inputs.positions, inputs.slots, self._attention)
        return self._run(step, kv, inputs.outputs)

    def _run(self, step: StaticStep, kv: KVCache, outputs: Tensor | None = None) -> Tensor:
        spec, last = self.spec, self.spec.num_layers - 1
        cos, sin = self._cos[step.positions], self._sin[step.positions]
        x, residual = self.weights.embed[step.token_ids], None
        for index, layer in enumerate(self.weights.layers):
            x, residual = rms_norm(x, layer.attn_norm, spec.rms_norm_eps, residual)
            x = attended = self._attend(x, layer, index, cos, sin, step, kv)
            if outputs is not None and index == last:  # behind its KV, a token that nobody looks at is done
                x, residual = attended[outputs], residual[outputs]
            x = self._linear(x, layer.o, layer.o_bias)
            x, residual = rms_norm(x, layer.mlp_norm, spec.rms_norm_eps, residual)
            x = silu_and_mul(self._linear(x, layer.gate_up, layer.gate_up_bias))
            x = self._linear(x, layer.down, layer.down_bias)
        x, _ = rms_norm(x, self.weights.final_norm, spec.rms_norm_eps, residual)
        return x if outputs is None else _spread(x, outputs, attended)

    def _attend(
        self, x: Tensor, layer: LayerWeights, index: int, cos: Tensor, sin: Tensor, step: StaticStep, kv: KVCache
    ) -> Tensor:
        spec = self.spec
        qkv = self._linear(x, layer.qkv, layer.qkv_bias)
        qkv = qkv.view(len(x), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        q, k, v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, _ = rms_norm(q, layer.q_norm, spec.rms_norm_eps)
            k, _ = rms_norm(k, layer.k_norm, spec.rms_norm_eps)
        caches, scales = (kv.k[index], kv.v[index]), kv.scales(index)
        q = rope_and_store_kv(q, k, v, cos, sin, step.slots, *caches, scales)
        return step.attention.forward(q, *caches, spec.head_dim**-0.5, spec.sliding_windows[index], scales)

    def logits(self, hidden: Tensor) -> Tensor:
        return head.head_logits(hidden, self.weights.lm_head)

    def greedy(self, hidden: Tensor, num_ids: int, *, wants_logprobs: bool) -> GreedyDraw:
        return head.greedy(hidden, self.weights.lm_head, num_ids, wants_logprobs=wants_logprobs)

    def draw(self, logits: Tensor, columns: DrawColumns, *, writes: bool) -> Tensor:
        if logits.shape[1] > sample.MAX_VOCAB:
            return sampler.draw(logits, columns, writes=writes)
        return sample.draw(logits, columns, writes=writes, staging=self._staging)

    def target_logprobs(self, hidden: Tensor, targets: Tensor) -> TargetLogprobs:
        return head.linear_logprobs(hidden, self.weights.lm_head, targets)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's product. On a CPU rows are padded: there that is enough for a row to have its own bits."""
    if x.device.type != "cpu":
        return torch.nn.functional.linear(x, weight, bias)
    rows = len(x)
    padded = torch.nn.functional.pad(x, (0, 0, 0, reference.pad_rows(rows) - rows))
    return reference.linear(padded, weight, bias)[:rows]


def _spread(x: Tensor, outputs: Tensor, attended: Tensor) -> Tensor:
    """The final hidden states x of `outputs` among all tokens. Others are 0, or NaN if the token's KV is not finite.

    That shows in what the token attends to, as it sees its own KV.
    """
    is_finite = attended.sum(-1, keepdim=True, dtype=torch.float32) * 0
    hidden = is_finite.to(x.dtype).expand(-1, x.shape[1]).contiguous()
    return hidden.index_copy_(0, outputs, x)
