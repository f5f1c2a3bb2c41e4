"""The meaning of every op, in plain torch. Faster kernels are tested against these.

Invariance. A row's result must not depend on how many rows are computed with it. What that takes of
torch on a CPU, measured with 2.13 (see tests/kernels/test_reference.py, which checks it again):

* fp32 matrix products give other bits for 1, 2, 3 and a few more odd row counts, so callers pad rows
  to a multiple of `ROW_MULTIPLE`; batched products (`bmm`) are safe from multiples of 4 rows on.
* `silu` and `sigmoid` differ between vector body and scalar tail, `exp` and `log` do not: SiLU is
  spelled out with `exp`.
* `logsumexp` and other sums over a long dimension may be split over threads, `log_softmax` is not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.kernels import fp8_kv
from batchinfer.kernels.fp8_kv import KVScales

#: Rows of a matrix product are padded to a multiple of this.
ROW_MULTIPLE = 16

#: Vocabulary columns of the head that are turned to fp32 at a time.
HEAD_TILE = 8192

#: Start value of the running maximum: finite, so that the first correction factor is 0 and not NaN.
LOWEST = -1e30


def pad_rows(num_rows: int) -> int:
    """`num_rows` rounded up to a multiple of `ROW_MULTIPLE`."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias [out]; rows a multiple of ROW_MULTIPLE."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm (Zhang and Sennrich 2019) of x + residual.

    Args:
        x: [..., dim]; weight: [dim]; residual: like x or None.

    Returns:
        The normed sum, and the sum itself, which is the next residual. Statistics in fp32, the
        normed value rounded to x's dtype before the weight is applied, as transformers does.
    """
    total = x if residual is None else x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension times the second half: [rows, 2 I] -> [rows, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float().contiguous()
    return (wide / (1 + torch.exp(-wide))).to(gate_up.dtype) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) in the rotate-half layout, computed in fp32.

    Args:
        x: [tokens, heads, head_dim]; cos, sin: [tokens, dim / 2] fp32 with dim <= head_dim; channels
            from dim on pass unchanged.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if 2 * half == x.shape[-1] else torch.cat((rotated, x[..., 2 * half :]), dim=-1)


def rope_and_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: KVScales | None = None,
) -> Tensor:
    """Rotate q and k, write k and v into the cache, return the rotated q.

    Args:
        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim].
        slots: [tokens] int64; where each token's KV goes: block_id * block_size + offset.
        k_cache, v_cache: [num_slots, kv_heads, head_dim] of one layer, changed in place.
        scales: of an fp8 cache, of this layer, changed in place. What is quantised is what would be stored without.
    """
    rotated = rope(k, cos, sin)
    if scales is None:
        k_cache.index_copy_(0, slots, rotated)
        v_cache.index_copy_(0, slots, v)
    else:
        fp8_kv.store(rotated, slots, k_cache, scales.k)
        fp8_kv.store(v, slots, v_cache, scales.v)
    return rope(q, cos, sin)


def copy_kv(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor, block_size: int) -> None:
    """Copy whole blocks in every layer; all sources are read before any target is written.

    Args:
        k_cache, v_cache: [layers, num_slots, kv_heads, head_dim]; sources, targets: [n] int64 block ids.
    """
    for cache in map(fp8_kv.as_bytes, (k_cache, v_cache)):
        blocks = cache.view(cache.shape[0], -1, block_size, *cache.shape[2:])
        blocks[:, targets] = blocks[:, sources]


def copy_scales(k_scales: Tensor, v_scales: Tensor, sources: Tensor, targets: Tensor) -> None:
    """The same for the scales of an fp8 cache, [layers, num_blocks, kv_heads, block_size]."""
    for scales in (k_scales, v_scales):
        scales[:, targets] = scales[:, sources]


class Mask(NamedTuple):
    """Which keys of a tile the queries of items [begin, end) see."""

    begin: int
    end: int
    hidden: Tensor  # [end - begin, 1, M, 1, 64] bool: True where the query does not see the key


class Wave(NamedTuple):
    """Equally wide items whose lists of 64-token tiles are walked at the same time, longest first."""

    rows: Tensor  # [items, M] int64: query tokens; the number of tokens stands for padding
    groups: Tensor  # [items, longest, 4] int64: each tile's 16-token groups in the cache
    num_active: list[int]  # [longest]: the first so many items have a k-th tile
    masks: list[Mask | None]  # [longest]


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, waves: list[Wave], scale: float, scales: KVScales | None = None
) -> Tensor:
    """Softmax attention of each query token over the KV on its path from the root of the prefix tree.

    KV is walked in tiles of 64 tokens at fixed absolute positions. The state (running maximum, sum,
    accumulator, fp32) is carried from tile to tile (Milakov and Gimelshein 2018; FlashAttention-2,
    Dao 2023, section 3.1), and a tile that several rows share is read once for all of them. The
    arithmetic of a row is the same whether its tiles are shared or not.

    Args:
        q: [tokens, heads, head_dim].
        k_cache, v_cache: [num_slots, kv_heads, head_dim] of one layer.
        waves: the plan; a token's tiles come in order.
        scale: multiplies the scores.
        scales: of an fp8 cache. Scores are multiplied by their key's scale, weights by their value's.

    Returns:
        [tokens, heads * head_dim] in q's dtype.
    """
    num_tokens, num_heads, dim = q.shape
    num_kv_heads = k_cache.shape[1]
    per_group = num_heads // num_kv_heads
    # One more row, which padding reads and writes.
    wide = torch.zeros((num_tokens + 1, num_kv_heads, per_group, dim), dtype=torch.float32, device=q.device)
    torch.mul(q.view(num_tokens, num_kv_heads, per_group, dim), scale, out=wide[:num_tokens])
    state = _State(
        top=torch.full(wide.shape[:3], LOWEST, dtype=torch.float32, device=q.device),
        total=torch.zeros(wide.shape[:3], dtype=torch.float32, device=q.device),
        acc=torch.zeros_like(wide),
    )
    k_groups = k_cache.view(-1, 16, num_kv_heads, dim)
    v_groups = v_cache.view(-1, 16, num_kv_heads, dim)
    for wave in waves:
        _attend(wide, k_groups, v_groups, scales, wave, state)
    out = state.acc[:num_tokens] / state.total[:num_tokens, ..., None]
    return out.to(q.dtype).view(num_tokens, num_heads * dim)


class _State(NamedTuple):
    """Of the softmax of each query head, over the tiles met so far."""

    top: Tensor  # [..., lanes]
    total: Tensor  # [..., lanes]
    acc: Tensor  # [..., lanes, dim]


def _attend(q: Tensor, k_groups: Tensor, v_groups: Tensor, scales: KVScales | None, wave: Wave, state: _State) -> None:
    """Advance the state of the wave's query tokens over its tiles."""
    num_items, num_rows = wave.rows.shape
    _, num_kv_heads, per_group, dim = q.shape
    lanes = num_rows * per_group
    pad = -lanes % 4  # bmm gives the same bits for every row count that is a multiple of 4

    def lanes_of(x: Tensor) -> Tensor:  # [tokens + 1, kv, G, ...] -> [items * kv, M * G (+ pad), ...]
        picked = x[wave.rows].transpose(1, 2).reshape(num_items * num_kv_heads, lanes, *x.shape[3:])
        return F.pad(picked, (0, 0) * (picked.dim() - 2) + (0, pad)) if pad else picked

    query, local = lanes_of(q), _State(*(lanes_of(x) for x in state))
    for k, active in enumerate(wave.num_active):
        head = active * num_kv_heads
        keys, values = (
            groups[wave.groups[:active, k]].flatten(1, 2).transpose(1, 2).float().reshape(head, -1, dim)
            for groups in (k_groups, v_groups)
        )
        scores = torch.bmm(query[:head], keys.transpose(1, 2))
        if scales is not None:
            k_scales, v_scales = (_tile_scales(each, wave.groups[:active, k]) for each in scales)
            scores.mul_(k_scales)
        mask = wave.masks[k]
        if mask is not None:
            part = scores[mask.begin * num_kv_heads : mask.end * num_kv_heads, :lanes]
            shape = (mask.end - mask.begin, num_kv_heads, num_rows, per_group, part.shape[-1])
            part.unflatten(0, shape[:2]).unflatten(2, shape[2:4]).masked_fill_(mask.hidden, float("-inf"))
        top, total, acc = (x[:head] for x in local)
        new_top = torch.maximum(top, scores.amax(-1))
        weights = scores.sub_(new_top[..., None]).exp_()
        correction = torch.exp(top - new_top)
        top.copy_(new_top)
        total.mul_(correction).add_(weights.sum(-1))
        if scales is not None:
            weights.mul_(v_scales)
        acc.mul_(correction[..., None]).add_(torch.bmm(weights, values))
    for x, new in zip(state, local, strict=True):
        kept = new[:, :lanes] if pad else new
        x[wave.rows] = kept.reshape(num_items, num_kv_heads, num_rows, per_group, *x.shape[3:]).transpose(1, 2)


def _tile_scales(scales: Tensor, groups: Tensor) -> Tensor:
    """[items * kv_heads, 1, 64] of the tiles' groups [items, 4]."""
    found = fp8_kv.scales_of_groups(scales, groups, 16).transpose(1, 2)  # [items, kv_heads, 4, 16]
    return found.reshape(-1, 1, groups.shape[1] * 16)


def head_logits(hidden: Tensor, lm_head: Tensor) -> Tensor:
    """fp32 logits [rows, vocab] of hidden [rows, dim]; rows a multiple of ROW_MULTIPLE.

    16-bit operands are multiplied in fp32 and the sums are left unrounded: for 16-bit weights this is
    the fp32 head.
    """
    if lm_head.dtype == torch.float32:
        return F.linear(hidden, lm_head)
    wide = hidden.float()
    out = torch.empty((hidden.shape[0], lm_head.shape[0]), dtype=torch.float32, device=hidden.device)
    for begin in range(0, lm_head.shape[0], HEAD_TILE):
        tile = lm_head[begin : begin + HEAD_TILE]
        out[:, begin : begin + len(tile)] = F.linear(wide, tile.float())
    return out


class TargetLogprobs(NamedTuple):
    """What `linear_logprobs` says of each row."""

    logprob: Tensor  # [rows] fp32, nats
    entropy: Tensor  # [rows] fp32, nats
    argmax: Tensor  # [rows] int64


def linear_logprobs(hidden: Tensor, lm_head: Tensor, targets: Tensor, max_logits: int = 1 << 24) -> TargetLogprobs:
    """Log-probability of `targets` under softmax(hidden x lm_head), without a [rows, vocab] tensor.

    Args:
        hidden: [rows, dim]; lm_head: [vocab, dim]; targets: [rows] int64.
        max_logits: logits held at a time (numbers, not bytes); rows are cut accordingly.
    """
    num_rows, vocab = hidden.shape[0], lm_head.shape[0]
    logprob = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    entropy = torch.empty_like(logprob)
    argmax = torch.empty(num_rows, dtype=torch.int64, device=hidden.device)
    step = max(ROW_MULTIPLE, max_logits // vocab // ROW_MULTIPLE * ROW_MULTIPLE)
    for begin in range(0, num_rows, step):
        rows = hidden[begin : begin + step]
        count = rows.shape[0]
        logits = head_logits(F.pad(rows, (0, 0, 0, pad_rows(count) - count)), lm_head)
        logprobs = torch.log_softmax(logits, dim=-1)
        # 0 * -inf would be NaN. A lone row's sum may be split over threads, so the padded rows are summed too.
        weighted = torch.exp(logprobs) * logprobs.clamp_min(torch.finfo(torch.float32).min)
        entropy[begin : begin + count] = -weighted.sum(-1)[:count]
        picked = targets[begin : begin + count, None]
        logprob[begin : begin + count] = logprobs[:count].gather(1, picked)[:, 0]
        argmax[begin : begin + count] = logits[:count].argmax(-1)
    return TargetLogprobs(logprob, entropy, argmax)


class Divergence(NamedTuple):
    """How two distributions over the vocabulary differ in each row, p being the first; nats."""

    kl_pq: Tensor  # [rows] fp64, KL(p || q) = sum over p of log p - log q
    kl_qp: Tensor  # [rows] fp64, KL(q || p)
    entropy_p: Tensor  # [rows] fp64
    entropy_q: Tensor  # [rows] fp64
    logprob_p: Tensor  # [rows] fp64, of the target
    logprob_q: Tensor  # [rows] fp64
    argmax_p: Tensor  # [rows] int64
    argmax_q: Tensor  # [rows] int64


#: Rows of `divergence` that are taken together: their temporary tensors stay in the processor's cache.
DIVERGENCE_ROWS = 4


def divergence(logits_p: Tensor, logits_q: Tensor, targets: Tensor) -> Divergence:
    """Kullback-Leibler divergence (1951) in both directions over the whole vocabulary, with entropies.

    With x = logits - their maximum and Z = sum of exp x: KL(p || q) = sum exp(x_p) (x_p - x_q) / Z_p - log Z_p
    + log Z_q. Elements are fp32, sums fp64; equal logits give exactly 0.

    Args:
        logits_p, logits_q: [rows, vocab] fp32, finite.
        targets: [rows] int64.
    """
    out = empty_divergence(len(targets), targets.device)
    for begin in range(0, len(targets), DIVERGENCE_ROWS):
        count = min(DIVERGENCE_ROWS, len(targets) - begin)
        pad = (0, 0, 0, DIVERGENCE_ROWS - count)  # sums over the vocabulary may depend on how many rows there are
        p, q = (F.pad(logits[begin : begin + count], pad) for logits in (logits_p, logits_q))
        picked = F.pad(targets[begin : begin + count], pad[2:])
        for values, found in zip(out, _divergence_block(p, q, picked), strict=True):
            values[begin : begin + count] = found[:count]
    return out


def empty_divergence(num_rows: int, device: torch.device) -> Divergence:
    """To be filled in. Small results kept between large temporary tensors would keep the allocator from using their
    memory again.
    """
    figures = (torch.empty(num_rows, dtype=torch.float64, device=device) for _ in range(6))
    return Divergence(*figures, *(torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2)))


def _divergence_block(p: Tensor, q: Tensor, targets: Tensor) -> Divergence:
    wide = torch.float64
    top_p, top_q = p.amax(-1, keepdim=True), q.amax(-1, keepdim=True)
    x_p, x_q = p - top_p, q - top_q
    e_p, e_q = x_p.exp(), x_q.exp()
    z_p, z_q = e_p.sum(-1, dtype=wide), e_q.sum(-1, dtype=wide)
    log_p, log_q = z_p.log(), z_q.log()
    difference = x_p - x_q
    kl_pq = (e_p * difference).sum(-1, dtype=wide) / z_p - log_p + log_q
    kl_qp = -(e_q * difference).sum(-1, dtype=wide) / z_q - log_q + log_p
    picked = targets[:, None]
    return Divergence(
        kl_pq=kl_pq.clamp_min(0),  # what rounding leaves below
        kl_qp=kl_qp.clamp_min(0),
        entropy_p=log_p - (e_p * x_p).sum(-1, dtype=wide) / z_p,
        entropy_q=log_q - (e_q * x_q).sum(-1, dtype=wide) / z_q,
        logprob_p=(p.gather(1, picked).double() - top_p.double())[:, 0] - log_p,
        logprob_q=(q.gather(1, picked).double() - top_q.double())[:, 0] - log_q,
        argmax_p=p.argmax(-1),
        argmax_q=q.argmax(-1),
    )
