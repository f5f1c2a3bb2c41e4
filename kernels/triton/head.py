"""The language-model head: tiles of hidden states x lm_head, reduced where they are worked out.

16-bit operands, fp32 sums left unrounded: the fp32 head of 16-bit weights. Each program reduces its columns of
the vocabulary to a few numbers a row; a second kernel puts them together in the order of the columns. Within a
tile maxima are exact and sums of exponentials are integers, so no result depends on how a tile lies in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer.kernels.reference import TargetLogprobs
from batchinfer.kernels.triton.launch import Chip, cdiv, chip_of, options
from batchinfer.kernels.triton.matmul import FEW_ROWS, Tile, large_tile, precision, product_tile, small_tile
from batchinfer.kernels.triton.variants import DTYPES, SHAPES, ModelShape, Variant
from batchinfer.models.decoder import GreedyDraw

#: Rows whose partial results are held at a time: 20 bytes for each row and tile.
ROWS_AT_A_TIME = 4096
#: Columns of a tile; the same for few and many rows, as partial results are taken of them.
COLUMNS = 128
MERGE_BLOCK = 1024
MERGE_WARPS = 4
NO_ID = tl.constexpr(2**31 - 1)
#: Exponentials of at most 1 are counted in parts of 2**-40: 128 of them stay far below 2**63.
PARTS = tl.constexpr(2.0**40)


@triton.jit(do_not_specialize=["num_rows"])
def head_kernel(
    hidden_ptr: tl.tensor,
    lm_head_ptr: tl.tensor,
    targets_ptr: tl.tensor,  # [rows]
    logits_ptr: tl.tensor,  # fp32 [rows, vocab]
    top_ptr: tl.tensor,  # fp32 [rows, tiles]: the largest logit of ids below num_ids; NaN if some is not finite
    id_ptr: tl.tensor,  # int32 [rows, tiles]: its lowest id
    high_ptr: tl.tensor,  # fp32 [rows, tiles]: the largest logit
    sum_ptr: tl.tensor,  # fp32 [rows, tiles]: sum of exp(logit - high)
    moment_ptr: tl.tensor,  # fp32 [rows, tiles]: sum of exp(logit - high) (logit - high)
    target_logit_ptr: tl.tensor,  # fp32 [rows]
    num_rows: tl.tensor,
    vocab: tl.tensor,
    num_ids: tl.tensor,
    hidden_stride: tl.tensor,
    K: tl.constexpr,
    WRITES_LOGITS: tl.constexpr,
    REDUCES: tl.constexpr,
    WANTS_SUM: tl.constexpr,
    WANTS_MOMENT: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    # Row tiles follow each other, so that the weights of a tile are read from memory once.
    num_row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    tile = tl.program_id(0) // num_row_tiles
    row = (tl.program_id(0) % num_row_tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    logits = product_tile(
        hidden_ptr,
        lm_head_ptr,
        row,
        column,
        num_rows,
        vocab,
        hidden_stride,
        0,
        K,
        K,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        BLOCK_K,
        PRECISION,
    )
    is_row, is_column = row < num_rows, column < vocab
    if WRITES_LOGITS:
        place = row.to(tl.int64)[:, None] * vocab + column[None, :]
        tl.store(logits_ptr + place, logits, mask=is_row[:, None] & is_column[None, :])
    if REDUCES:
        place = row.to(tl.int64) * tl.cdiv(vocab, BLOCK_COLUMNS) + tile
        is_broken = tl.max(((tl.abs(logits) < float("inf")) == 0).to(tl.int32), axis=1) > 0
        drawable = tl.where((column < num_ids)[None, :] & is_column[None, :], logits, float("-inf"))
        top = tl.max(drawable, axis=1)
        lowest = tl.min(tl.where(drawable == top[:, None], column[None, :], NO_ID), axis=1)
        tl.store(top_ptr + place, tl.where(is_broken, float("nan"), top), mask=is_row)
        tl.store(id_ptr + place, lowest, mask=is_row)
        if HAS_TARGETS:
            target = tl.load(targets_ptr + row, mask=is_row, other=-1).to(tl.int32)
            picked = tl.sum(tl.where(column[None, :] == target[:, None], logits, 0.0), axis=1)
            is_here = (target >= tile * BLOCK_COLUMNS) & (target < (tile + 1) * BLOCK_COLUMNS)
            tl.store(target_logit_ptr + row, picked, mask=is_row & is_here)
        if WANTS_SUM:
            all_ids = tl.where(is_column[None, :], logits, float("-inf"))
            high = tl.max(all_ids, axis=1)
            below = all_ids - high[:, None]
            weight = tl.exp(below)
            # What is broken must not be turned to an integer; its row is told by `top`.
            weight = tl.where(weight <= 1.0, weight, 0.0)
            total = tl.sum((weight * PARTS).to(tl.int64), axis=1)
            tl.store(high_ptr + place, high, mask=is_row)
            tl.store(sum_ptr + place, total.to(tl.float32) / PARTS, mask=is_row)
            if WANTS_MOMENT:
                moment = tl.where(weight > 0.0, weight * below, 0.0)
                total = tl.sum((moment * PARTS).to(tl.int64), axis=1)
                tl.store(moment_ptr + place, total.to(tl.float32) / PARTS, mask=is_row)


@triton.jit
def merge_tiles_kernel(
    top_ptr: tl.tensor,
    id_ptr: tl.tensor,
    high_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    moment_ptr: tl.tensor,
    best_ptr: tl.tensor,  # fp32 [rows]; NaN if a logit is not finite
    argmax_ptr: tl.tensor,  # int64 [rows]
    lse_ptr: tl.tensor,  # fp32 [rows]
    entropy_ptr: tl.tensor,  # fp32 [rows]
    num_tiles: tl.tensor,
    WANTS_SUM: tl.constexpr,
    WANTS_MOMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((), float("-inf"), tl.float32)
    argmax = tl.full((), NO_ID, tl.int32)
    is_broken = tl.full((), 0, tl.int32)
    high = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    moment = tl.full((), 0.0, tl.float32)
    for begin in range(0, num_tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        mask = tile < num_tiles
        place = row * num_tiles + tile
        tops = tl.load(top_ptr + place, mask=mask, other=float("-inf"))
        is_broken = tl.maximum(is_broken, tl.max((tops != tops).to(tl.int32), axis=0))
        top = tl.max(tl.where(tops == tops, tops, float("-inf")), axis=0)
        ids = tl.load(id_ptr + place, mask=mask, other=NO_ID)
        lowest = tl.min(tl.where(tops == top, ids, NO_ID), axis=0)
        argmax = tl.where(top > best, lowest, argmax)  # of equals the earlier block's
        best = tl.maximum(best, top)
        if WANTS_SUM:
            highs = tl.load(high_ptr + place, mask=mask, other=float("-inf"))
            sums = tl.load(sum_ptr + place, mask=mask, other=0.0)
            new_high = tl.maximum(high, tl.max(highs, axis=0))
            # exp(-inf - -inf) would be NaN; -1e30 stands for "nothing yet".
            old = tl.maximum(high, -1e30) - new_high
            differences = tl.maximum(highs, -1e30) - new_high
            factors = tl.exp(differences)
            if WANTS_MOMENT:
                moments = tl.load(moment_ptr + place, mask=mask, other=0.0)
                moments = tl.where(factors > 0.0, factors * (moments + differences * sums), 0.0)
                kept = tl.where(total > 0.0, tl.exp(old) * (moment + old * total), 0.0)
                moment = kept + tl.sum(moments, axis=0)
            total = tl.exp(old) * total + tl.sum(factors * sums, axis=0)
            high = new_high
    nan = float("nan")
    tl.store(best_ptr + row, tl.where(is_broken > 0, nan, best))
    tl.store(argmax_ptr + row, tl.where(argmax == NO_ID, 0, argmax).to(tl.int64))
    if WANTS_SUM:
        tl.store(lse_ptr + row, tl.where(is_broken > 0, nan, high + tl.log(total)))
    if WANTS_MOMENT:
        # -sum p log p = lse - sum p x = log(total) - sum p (x - high)
        tl.store(entropy_ptr + row, tl.where(is_broken > 0, nan, tl.log(total) - moment / total))


class HeadResult(NamedTuple):
    """What the head says of each row without its logits."""

    top: Tensor  # [rows] fp32, the largest logit of ids below num_ids; NaN if some logit is not finite
    argmax: Tensor  # [rows] int64, its lowest id
    lse: Tensor | None  # [rows] fp32, over all ids
    entropy: Tensor | None  # [rows] fp32, nats
    target_logit: Tensor | None  # [rows] fp32


def _tile(chip: Chip, num_rows: int, is_wide: bool) -> Tile:
    return (small_tile if num_rows <= FEW_ROWS else large_tile)(chip, is_wide, COLUMNS)


def _constants(inner: int, tile: Tile, precision: str, *wanted: bool) -> dict[str, Any]:
    names = ("WRITES_LOGITS", "REDUCES", "WANTS_SUM", "WANTS_MOMENT", "HAS_TARGETS")
    blocks = {"BLOCK_ROWS": tile.rows, "BLOCK_COLUMNS": tile.columns, "BLOCK_K": tile.depth}
    return {"K": inner, "PRECISION": precision, **dict(zip(names, wanted, strict=True)), **blocks}


def _check(hidden: Tensor, lm_head: Tensor) -> None:
    assert hidden.stride(1) == 1
    assert lm_head.is_contiguous()
    assert hidden.dtype == lm_head.dtype, (hidden.dtype, lm_head.dtype)


def head_logits(hidden: Tensor, lm_head: Tensor) -> Tensor:
    """fp32 logits [rows, vocab] of hidden [rows, dim], any number of rows; see reference.head_logits."""
    _check(hidden, lm_head)
    (num_rows, inner), vocab = hidden.shape, lm_head.shape[0]
    logits = torch.empty((num_rows, vocab), dtype=torch.float32, device=hidden.device)
    if not num_rows:
        return logits
    chip = chip_of(hidden.device)
    tile = _tile(chip, num_rows, hidden.dtype == torch.float32)
    head_kernel[(cdiv(num_rows, tile.rows) * cdiv(vocab, tile.columns),)](
        hidden,
        lm_head,
        *(logits,) * 8,  # only the first of them is used
        num_rows,
        vocab,
        vocab,
        hidden.stride(0),
        **_constants(inner, tile, precision(hidden.dtype), True, False, False, False, False),
        **options(chip, tile.num_warps, tile.num_stages),
    )
    return logits


def reduce_head(
    hidden: Tensor,
    lm_head: Tensor,
    *,
    num_ids: int | None = None,
    targets: Tensor | None = None,
    wants_lse: bool = False,
    wants_entropy: bool = False,
) -> HeadResult:
    """The head of hidden [rows, dim], at most ROWS_AT_A_TIME rows; targets [rows] of an integer type."""
    _check(hidden, lm_head)
    (num_rows, inner), vocab = hidden.shape, lm_head.shape[0]
    chip = chip_of(hidden.device)
    tile = _tile(chip, num_rows, hidden.dtype == torch.float32)
    num_tiles = cdiv(vocab, tile.columns)
    wants_lse = wants_lse or wants_entropy

    def floats(is_wanted: bool, *shape: int) -> Tensor | None:
        return torch.empty(shape, dtype=torch.float32, device=hidden.device) if is_wanted else None

    top = hidden.new_empty((num_rows, num_tiles), dtype=torch.float32)
    ids = hidden.new_empty((num_rows, num_tiles), dtype=torch.int32)
    high, total = (floats(wants_lse, num_rows, num_tiles) for _ in range(2))
    moment = floats(wants_entropy, num_rows, num_tiles)
    target_logit = floats(targets is not None, num_rows)
    unused = top
    wanted = (False, True, wants_lse, wants_entropy, targets is not None)
    arguments = [unused if tensor is None else tensor for tensor in (high, total, moment)]
    best = hidden.new_empty(num_rows, dtype=torch.float32)
    argmax = hidden.new_empty(num_rows, dtype=torch.int64)
    lse, entropy = floats(wants_lse, num_rows), floats(wants_entropy, num_rows)
    if num_rows:
        head_kernel[(cdiv(num_rows, tile.rows) * num_tiles,)](
            hidden,
            lm_head,
            ids if targets is None else targets,
            unused,
            top,
            ids,
            *arguments,
            unused if target_logit is None else target_logit,
            num_rows,
            vocab,
            vocab if num_ids is None else min(num_ids, vocab),
            hidden.stride(0),
            **_constants(inner, tile, precision(hidden.dtype), *wanted),
            **options(chip, tile.num_warps, tile.num_stages),
        )
        merge_tiles_kernel[(num_rows,)](
            top,
            ids,
            *arguments,
            best,
            argmax,
            best if lse is None else lse,
            best if entropy is None else entropy,
            num_tiles,
            WANTS_SUM=wants_lse,
            WANTS_MOMENT=wants_entropy,
            BLOCK=MERGE_BLOCK,
            **options(chip, MERGE_WARPS),
        )
    return HeadResult(best, argmax, lse, entropy, target_logit)


def linear_logprobs(hidden: Tensor, lm_head: Tensor, targets: Tensor) -> TargetLogprobs:
    """See reference.linear_logprobs. NaN where a row has a logit that is not finite."""
    parts = []
    for begin in range(0, max(1, len(hidden)), ROWS_AT_A_TIME):
        rows, picked = hidden[begin : begin + ROWS_AT_A_TIME], targets[begin : begin + ROWS_AT_A_TIME]
        found = reduce_head(rows, lm_head, targets=picked, wants_entropy=True)
        assert found.lse is not None
        assert found.entropy is not None
        assert found.target_logit is not None
        parts.append(TargetLogprobs(found.target_logit - found.lse, found.entropy, found.argmax))
    return parts[0] if len(parts) == 1 else TargetLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def greedy(hidden: Tensor, lm_head: Tensor, num_ids: int, *, wants_logprobs: bool) -> GreedyDraw:
    """The most probable id below num_ids of each row of hidden [rows, dim]; see models.decoder.FusedHead."""
    parts = []
    for begin in range(0, max(1, len(hidden)), ROWS_AT_A_TIME):
        found = reduce_head(hidden[begin : begin + ROWS_AT_A_TIME], lm_head, num_ids=num_ids, wants_lse=wants_logprobs)
        logprobs = None if found.lse is None else found.top - found.lse
        parts.append(GreedyDraw(found.argmax, logprobs, ~found.top.isnan()))
    if len(parts) == 1:
        return parts[0]
    return GreedyDraw(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts if part.logprobs is not None]) if wants_logprobs else None,
        torch.cat([part.is_finite for part in parts]),
    )


#: What the head is asked for: logits, greedy draws, greedy draws with log-probabilities, scores of targets.
USES = {
    "logits": (True, False, False, False, False),
    "greedy": (False, True, False, False, False),
    "greedy with logprobs": (False, True, True, False, False),
    "targets": (False, True, True, True, True),
}


def aot_variants(chip: Chip) -> list[Variant]:
    found = [
        _variant(chip, dtype, shape, use, num_rows)
        for dtype in (*DTYPES, "fp32")
        for shape in SHAPES
        for num_rows in (1, FEW_ROWS + 1)
        for use in USES
    ]
    floats = ("top_ptr", "high_ptr", "sum_ptr", "moment_ptr", "best_ptr", "lse_ptr", "entropy_ptr")
    signature = dict.fromkeys(floats, "*fp32")
    signature |= {"id_ptr": "*i32", "argmax_ptr": "*i64", "num_tiles": "i32"}
    for use in list(USES)[1:]:
        constants = {"WANTS_SUM": USES[use][2], "WANTS_MOMENT": USES[use][3], "BLOCK": MERGE_BLOCK}
        found.append(Variant(use, merge_tiles_kernel, signature, constants, options(chip, MERGE_WARPS)))
    return found


def _variant(chip: Chip, dtype: str, shape: ModelShape, use: str, num_rows: int) -> Variant:
    tile = _tile(chip, num_rows, dtype == "fp32")
    floats = ("logits_ptr", "top_ptr", "high_ptr", "sum_ptr", "moment_ptr", "target_logit_ptr")
    signature = {"hidden_ptr": f"*{dtype}", "lm_head_ptr": f"*{dtype}", "targets_ptr": "*i64", "id_ptr": "*i32"}
    signature |= dict.fromkeys(floats, "*fp32")
    signature |= {"num_rows": "i32", "vocab": "i32:16", "num_ids": "i32:16", "hidden_stride": "i32:16"}
    constants = _constants(shape.hidden, tile, "ieee" if dtype == "fp32" else "tf32", *USES[use])
    label = f"{shape.name} {use}, {'few' if num_rows <= FEW_ROWS else 'many'} rows, {dtype}"
    launch = options(chip, tile.num_warps, tile.num_stages)
    return Variant(label, head_kernel, signature, constants, launch, product=f"head, {dtype}")
