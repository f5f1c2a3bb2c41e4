"""Calls each C++ kernel through ctypes: torch tensors in, torch tensors out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.tree import RaggedBatch
from batchinfer.kernels.cpu.library import Batch, Model, load_library

BF16 = torch.bfloat16
#: Relative: half a unit in the last of 8 significant bits, which is what rounding once to bf16 may cost.
HALF_ULP = 2.0**-8
#: What lies behind an output or between rows; a kernel that writes there is caught.
GUARD = 12345.0


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def guarded(*shape: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """An output of this shape and, behind it in memory, 64 values that must stay as they are."""
    count = int(np.prod(shape))
    whole = torch.full((count + 64,), GUARD).to(dtype)
    return whole[:count].view(shape), whole[count:]


def untouched(guard: Tensor) -> bool:
    return bool((guard == torch.tensor(GUARD).to(guard.dtype)).all())


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fp32_sum_error(x: Tensor, w: Tensor) -> Tensor:
    """What summing K products in fp32 may cost, [rows, outputs] float64.

    Each of K additions rounds by at most 2^-24 of the sum so far, which is at most the sum of absolute products;
    errors of random sign add up to sqrt(K) of one. Four standard deviations.
    """
    magnitude = x.double().abs() @ w.double().abs().T
    return 4 * x.shape[1] ** 0.5 * 2.0**-24 * magnitude


class Head(NamedTuple):
    top: Tensor  # [rows] fp32
    argmax: Tensor  # [rows] int32
    lse: Tensor
    entropy: Tensor
    target_logit: Tensor
    logits: Tensor | None  # [rows, vocab] fp32


class Kernels:
    """The library of one instruction set."""

    def __init__(self, instruction_set: str) -> None:
        self.c = load_library(instruction_set)

    def pack(self, weight: Tensor) -> Tensor:
        rows, columns = weight.shape
        out, guard = guarded(-(-rows // 16) * 16 * columns)
        self.c.bi_pack(weight.data_ptr(), out.data_ptr(), rows, columns)
        assert untouched(guard)
        return out

    def linear(self, x: Tensor, packed: Tensor, num_outputs: int, bias: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        out, guard = guarded(len(x), num_outputs)
        self.c.bi_linear(
            x.data_ptr(), packed.data_ptr(), address(bias), out.data_ptr(), len(x), num_outputs, x.shape[1]
        )
        assert untouched(guard)
        return out

    def linear_add(self, x: Tensor, packed: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        """The residual with the product added."""
        total, guard = guarded(*residual.shape)
        total.copy_(residual)
        x = x.contiguous()
        self.c.bi_linear_add(x.data_ptr(), packed.data_ptr(), address(bias), total.data_ptr(), *total.shape, x.shape[1])
        assert untouched(guard)
        return total

    def gate_up_silu(self, x: Tensor, packed: Tensor, num_outputs: int, bias: Tensor | None = None) -> Tensor:
        """packed, bias: 16 outputs of the gate, 16 of up, and so on; num_outputs: of both."""
        x = x.contiguous()
        out, guard = guarded(len(x), num_outputs // 2)
        self.c.bi_gate_up_silu(
            x.data_ptr(), packed.data_ptr(), address(bias), out.data_ptr(), len(x), num_outputs, x.shape[1]
        )
        assert untouched(guard)
        return out

    def rms_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The normed sum and the sum."""
        total = residual.clone()
        out, guard = guarded(*residual.shape)
        self.c.bi_rms_norm(
            address(x), total.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), len(residual), residual.shape[1]
        )
        assert untouched(guard)
        return out, total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        out, guard = guarded(len(gate_up), gate_up.shape[1] // 2)
        self.c.bi_silu_and_mul(gate_up.data_ptr(), out.data_ptr(), *out.shape)
        assert untouched(guard)
        return out

    def head(
        self,
        hidden: Tensor,
        packed: Tensor,
        vocab: int,
        *,
        num_ids: int | None = None,
        targets: Tensor | None = None,
        wants_logits: bool = True,
    ) -> Head:
        hidden = hidden.contiguous()
        rows = len(hidden)
        targets = torch.zeros(rows, dtype=torch.int32) if targets is None else targets.to(torch.int32)
        (top, lse, entropy, target_logit), guards = zip(
            *(guarded(rows, dtype=torch.float32) for _ in range(4)), strict=True
        )
        argmax, argmax_guard = guarded(rows, dtype=torch.int32)
        logits, logits_guard = guarded(rows, vocab, dtype=torch.float32)
        self.c.bi_head(
            hidden.data_ptr(),
            packed.data_ptr(),
            rows,
            vocab,
            hidden.shape[1],
            vocab if num_ids is None else num_ids,
            logits.data_ptr() if wants_logits else None,
            *(x.data_ptr() for x in (top, argmax, lse, entropy, targets, target_logit)),
        )
        assert all(map(untouched, (*guards, argmax_guard, logits_guard)))
        return Head(top, argmax, lse, entropy, target_logit, logits if wants_logits else None)

    def rope_and_store_kv(
        self,
        qkv: Tensor,  # [tokens, heads + 2 kv heads, dim]
        cos: Tensor,  # [positions, rope dim / 2] fp32
        sin: Tensor,
        positions: Tensor,  # [tokens] int32
        slots: Tensor,  # [tokens] int64
        cache: Tensor,  # packed, changed in place; see pack_kv
        num_kv_heads: int,
        block_size: int,
        scale: float,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        tokens, width, dim = qkv.shape
        num_heads = width - 2 * num_kv_heads
        model = Model(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=dim,
            rope_dim=2 * cos.shape[1],
            eps=eps,
            scale=scale,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
        )
        batch = Batch(num_tokens=tokens, block_size=block_size, slots=slots.data_ptr(), kv_cache=cache.data_ptr())
        q, guard = guarded(tokens, num_heads, dim)
        is_finite = torch.ones(tokens, dtype=torch.uint8)
        self.c.bi_rope_and_store_kv(
            ctypes.byref(model),
            ctypes.byref(batch),
            *(address(x) for x in (q_norm, k_norm, qkv, positions, q, is_finite)),
        )
        assert untouched(guard)
        self.is_finite = is_finite.bool()  # [tokens], of the last call
        return q

    def tree_attention(
        self, ragged: RaggedBatch, q: Tensor, cache: Tensor, num_kv_heads: int, window: int | None
    ) -> Tensor:
        """q [tokens, heads, dim] scaled by log2(e) and the softmax's scale -> [tokens, heads * dim]."""
        tokens, num_heads, dim = q.shape
        q = q.contiguous()
        tables = np.ascontiguousarray(ragged.block_tables)
        model = Model(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=dim)
        batch = Batch(
            num_tokens=tokens,
            num_seqs=len(ragged.query_lens),
            block_size=ragged.block_size,
            max_blocks=tables.shape[1],
            block_tables=tables.ctypes.data,
            query_starts=ragged.query_starts.ctypes.data,
            query_lens=ragged.query_lens.ctypes.data,
            kv_cache=cache.data_ptr(),
        )
        out, guard = guarded(tokens, num_heads * dim)
        self.c.bi_tree_attention(ctypes.byref(model), ctypes.byref(batch), window or 0, q.data_ptr(), out.data_ptr())
        assert untouched(guard)
        return out


def pack_kv(k: Tensor, v: Tensor, block_size: int) -> Tensor:
    """The kernels' layout of k, v [slots, kv heads, dim]: [blocks, kv heads, K and V, ...], see attention.h."""
    slots, heads, dim = k.shape
    blocks = slots // block_size
    keys = k.view(blocks, block_size // 16, 16, heads, dim // 2, 2).permute(0, 3, 1, 4, 2, 5)
    values = v.view(blocks, block_size // 16, 8, 2, heads, dim).permute(0, 4, 1, 2, 5, 3)
    return torch.stack([keys.reshape(blocks, heads, -1), values.reshape(blocks, heads, -1)], dim=2).contiguous()


def address(tensor: Any) -> int | None:
    return None if tensor is None else tensor.data_ptr()
