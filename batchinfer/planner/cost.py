"""What a job will take: sharing, KV memory, FLOPs and bytes, from its prefix tree and the model's shape.

The model of the job. Row r is sampled n[r] times and every sample is max_tokens[r] tokens long (an
end-of-sequence token makes it shorter: the figures are what the job can take, not a forecast). A
sample of a prompt of L tokens computes positions L to L + max_tokens - 2: its first token comes
from the last prompt position, and its last token is not computed. With sharing each prompt
token of the tree is computed once (the few last prompt tokens that are recomputed to have
logits are left out); without, once per sample. Samples run in depth-first order,
`max_num_seqs` of them together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.models.spec import DecoderSpec, kv_bytes_per_token
from batchinfer.planner.prefix_tree import Int64s, PrefixTree


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A node with several rows below it. Over all nodes, num_tokens_saved adds up to the whole saving."""

    num_tokens: int  # from the root to the node's end
    num_rows: int  # below the node
    num_tokens_saved: int  # the node's own span * (num_rows - 1)
    example_row: int  # index of one of the rows


@dataclass(frozen=True, slots=True)
class KvMemory:
    """KV positions and bytes. bytes = tokens * bytes_per_token, which is
    2 * num_layers * num_kv_heads * head_dim * dtype_bytes unless KV has a format of its own.

    peak: the most that `max_num_seqs` consecutive samples in depth-first order need at full length,
        each shared prompt token once: prompt paths in common + sum of (max_tokens - 1). Whatever a
        later row shares with an earlier one lies on these paths too.
    peak_without_sharing: the same, each sample with a prompt of its own.
    all: every prompt token of the tree and every sample at once.
    Windows of sliding attention are not deducted.
    """

    bytes_per_token: int
    peak_tokens: int
    peak_bytes: int
    peak_without_sharing_tokens: int
    peak_without_sharing_bytes: int
    all_tokens: int
    all_bytes: int


@dataclass(frozen=True, slots=True)
class JobCost:
    """Work of a whole job. A position at p (from 0) attends to c = p + 1 positions, min(c, W) under a window W.

    matmul_flops: 2 * weights of the linear layers of the blocks * computed tokens.
    attention_flops: sum over computed tokens and layers of 4 * num_heads * head_dim * c.
        In the last layer a token that nothing is drawn from needs its key and value and no more: neither
        the layer's other weights nor its attention count for it.
    lm_head_flops: 2 * hidden_size * vocab_size * sampled tokens.
    num_steps: the least there can be: the greatest of computed tokens / max_batch_tokens, sampled
        tokens / max_num_seqs (both rounded up) and the longest max_tokens.
    weight_bytes_read: (weights of blocks and final norm) * dtype_bytes * num_steps
        + hidden_size * dtype_bytes * computed tokens, for the embedding, + lm_head_bytes_read.
    lm_head_bytes_read: hidden_size * vocab_size * dtype_bytes * the least number of steps that sample: the
        greater of sampled tokens / max_num_seqs (rounded up) and the longest max_tokens.
    kv_bytes_written: KV of the computed tokens.
    kv_bytes_read: prompts in chunks of max_batch_tokens, each chunk reading all positions up to its
        end; and for decoding, samples in groups of `max_num_seqs` that start together: a step reads
        each sample's output positions (its own included), and of the prompts each tree node above
        a running sample once (without sharing: each running sample's whole prompt). Windows are
        not deducted.
    """

    num_prompt_tokens_computed: int
    num_decode_tokens_computed: int
    num_steps: int
    matmul_flops: int
    attention_flops: int
    lm_head_flops: int
    flops: int
    weight_bytes_read: int
    lm_head_bytes_read: int  # part of weight_bytes_read
    kv_bytes_read: int
    kv_bytes_written: int
    bytes: int


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The figures of `batchinfer plan`."""

    num_rows: int
    num_duplicate_rows: int  # rows whose tokens equal an earlier row's
    num_samples: int
    num_prompt_tokens: int  # of all rows, each once
    num_unique_prompt_tokens: int
    num_shareable_prompt_tokens: int
    shareable_share: float  # of num_prompt_tokens; 0 without tokens
    max_output_tokens: int
    tree_depth: int  # nodes on the longest path, without the root
    num_tree_nodes: int
    shared_prefixes: tuple[SharedPrefix, ...]  # those that save most
    num_parameters: int
    weight_bytes: int
    kv: KvMemory
    with_sharing: JobCost
    without_sharing: JobCost

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"shared_prefixes": [asdict(prefix) for prefix in self.shared_prefixes]}


def plan_job(
    tree: PrefixTree,
    spec: DecoderSpec,
    *,
    dtype_bytes: int,
    kv_bytes: int | None = None,
    max_tokens: npt.ArrayLike,
    n: npt.ArrayLike = 1,
    max_num_seqs: int = 256,
    max_batch_tokens: int = 2048,
    num_shared_prefixes: int = 10,
) -> JobPlan:
    """The plan of the rows of `tree`.

    Args:
        dtype_bytes: of a weight.
        kv_bytes: KV of a token in all layers; None: its numbers are as wide as weights.
        max_tokens, n: of each row, [num_rows], or one value for all; at least 1.

    Raises ValueError for values below 1 or of another shape.
    """
    samples = _Samples.of(tree, _per_row("max_tokens", max_tokens, tree), _per_row("n", n, tree), max_num_seqs)
    if kv_bytes is None:
        kv_bytes = kv_bytes_per_token(spec, dtype_bytes)
    sizes = dtype_bytes, kv_bytes, max_batch_tokens
    parameters = num_parameters(spec)
    shareable = tree.num_shareable_tokens
    return JobPlan(
        num_rows=tree.num_rows,
        num_duplicate_rows=tree.num_rows - len(np.unique(tree.node_of_row)),
        num_samples=len(samples.num_outputs),
        num_prompt_tokens=tree.num_tokens,
        num_unique_prompt_tokens=tree.num_unique_tokens,
        num_shareable_prompt_tokens=shareable,
        shareable_share=shareable / tree.num_tokens if tree.num_tokens else 0.0,
        max_output_tokens=int(samples.num_outputs.sum()),
        tree_depth=_depth(tree),
        num_tree_nodes=tree.num_nodes,
        shared_prefixes=_shared_prefixes(tree, num_shared_prefixes),
        num_parameters=parameters,
        weight_bytes=parameters * dtype_bytes,
        kv=_kv_memory(tree, samples, kv_bytes),
        with_sharing=_cost(_Work.shared(tree, samples, max_batch_tokens), samples, spec, *sizes),
        without_sharing=_cost(_Work.unshared(samples, max_batch_tokens), samples, spec, *sizes),
    )


def num_parameters(spec: DecoderSpec) -> int:
    """Weights of the model; a tied lm_head is the embedding and counts once."""
    head = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    return spec.vocab_size * spec.hidden_size + _num_block_parameters(spec) + spec.hidden_size + head


def _num_linear_weights(spec: DecoderSpec) -> int:
    """Weights of the matrices in all blocks."""
    return spec.num_layers * _num_layer_weights(spec)


def _num_layer_weights(spec: DecoderSpec) -> int:
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * spec.hidden_size
    o = spec.num_heads * spec.head_dim * spec.hidden_size
    return qkv + o + 3 * spec.intermediate_size * spec.hidden_size


def _num_block_parameters(spec: DecoderSpec) -> int:
    rest = 2 * spec.hidden_size  # the two norms
    if spec.qkv_bias:
        rest += (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    if spec.o_bias:
        rest += spec.hidden_size
    if spec.mlp_bias:
        rest += 2 * spec.intermediate_size + spec.hidden_size
    if spec.qk_norm:
        rest += 2 * spec.head_dim
    return _num_linear_weights(spec) + spec.num_layers * rest


def _per_row(name: str, values: npt.ArrayLike, tree: PrefixTree) -> Int64s:
    array = np.asarray(values, np.int64)
    if array.shape not in ((), (tree.num_rows,)):
        raise ValueError(f"{name} must be one value or {tree.num_rows}, one per row, got shape {array.shape}")
    if array.size and array.min() < 1:
        raise ValueError(f"{name} must be at least 1, got {int(array.min())}")
    return np.broadcast_to(array, (tree.num_rows,))


@dataclass(frozen=True, slots=True)
class _Samples:
    """The S samples in depth-first order; those of a row stand together."""

    num_prompt: Int64s  # [S]
    num_new: Int64s  # [S]; prompt tokens that the sample before does not have
    num_outputs: Int64s  # [S]
    begin_of_row: Int64s  # [R + 1]; the samples of order[i] are [begin_of_row[i], begin_of_row[i + 1])
    group_size: int  # samples that run together

    @classmethod
    def of(cls, tree: PrefixTree, max_tokens: Int64s, n: Int64s, group_size: int) -> _Samples:
        copies = n[tree.order]
        begin_of_row = np.concatenate(([0], np.cumsum(copies)))
        spans = tree.end - tree.start
        # The nodes that begin at a row hold the tokens that it does not share with the row before it.
        is_new = spans > 0
        num_new = np.zeros(int(begin_of_row[-1]), np.int64)
        np.add.at(num_new, begin_of_row[tree.row_begin[is_new]], spans[is_new])
        return cls(
            num_prompt=np.repeat(tree.end[tree.node_of_row[tree.order]], copies),
            num_new=num_new,
            num_outputs=np.repeat(max_tokens[tree.order], copies),
            begin_of_row=begin_of_row,
            group_size=group_size,
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """What sharing changes."""

    begin: Int64s  # [M]; prompt positions [begin, end) are computed, for each of M pieces of prompts
    end: Int64s  # [M]
    kv_reads: int  # KV positions read by prompt chunks and, of the prompts, by decoding
    lengths: Int64s  # [E]; of the prompts, from whose last token a first one is drawn

    @classmethod
    def shared(cls, tree: PrefixTree, samples: _Samples, max_batch_tokens: int) -> _Work:
        kv_reads = _chunk_reads(tree.start, tree.end, max_batch_tokens) + _shared_decode_reads(tree, samples)
        lengths = tree.end[np.unique(tree.node_of_row)]
        return cls(tree.start, tree.end, kv_reads, lengths[lengths > 0])

    @classmethod
    def unshared(cls, samples: _Samples, max_batch_tokens: int) -> _Work:
        begin = np.zeros_like(samples.num_prompt)
        decode_reads = int((samples.num_prompt * (samples.num_outputs - 1)).sum())
        kv_reads = _chunk_reads(begin, samples.num_prompt, max_batch_tokens) + decode_reads
        return cls(begin, samples.num_prompt, kv_reads, samples.num_prompt[samples.num_prompt > 0])


def _chunk_reads(begin: Int64s, end: Int64s, chunk: int) -> int:
    """Sum of the ends of the chunks begin + chunk, begin + 2 * chunk, ..., end."""
    num_whole = np.maximum(-(-(end - begin) // chunk) - 1, 0)  # before the last
    whole = begin * num_whole + chunk * num_whole * (num_whole + 1) // 2
    return int((whole + np.where(end > begin, end, 0)).sum())


def _shared_decode_reads(tree: PrefixTree, samples: _Samples) -> int:
    """Prompt positions read by decoding: for each node and group, span * the longest sample's steps."""
    has_span = tree.end > tree.start
    size = samples.group_size
    begin = samples.begin_of_row[tree.row_begin[has_span]]
    end = samples.begin_of_row[tree.row_end[has_span]]
    if not len(begin):
        return 0
    # Node pieces: a node's samples [begin, end) cut at the borders of groups.
    first_group = begin // size
    num_pieces = (end - 1) // size - first_group + 1
    node = np.repeat(np.arange(len(begin)), num_pieces)
    group = first_group[node] + np.arange(len(node)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    ranges = np.stack((np.maximum(begin[node], group * size), np.minimum(end[node], (group + 1) * size)), axis=1)
    num_steps = np.append(samples.num_outputs - 1, 0)  # the last, so that a range may end at S
    longest = np.maximum.reduceat(num_steps, ranges.ravel())[::2]
    return int(((tree.end - tree.start)[has_span][node] * longest).sum())


def _cost(
    work: _Work, samples: _Samples, spec: DecoderSpec, dtype_bytes: int, kv_bytes: int, max_batch_tokens: int
) -> JobCost:
    num_prompt = int((work.end - work.begin).sum())
    num_decode = int((samples.num_outputs - 1).sum())
    num_computed = num_prompt + num_decode
    num_sampled = num_decode + len(samples.num_outputs)
    num_sampling_steps = max(-(-num_sampled // samples.group_size), int(samples.num_outputs.max(initial=0)))
    num_steps = max(-(-num_computed // max_batch_tokens), num_sampling_steps)
    decode_end = samples.num_prompt + samples.num_outputs - 1
    *windows, last_window = spec.sliding_windows
    contexts = sum(
        num_layers * (_context_sum(work.begin, work.end, window) + _context_sum(samples.num_prompt, decode_end, window))
        for window, num_layers in Counter(windows).items()
    )
    contexts += _context_sum(work.lengths - 1, work.lengths, last_window)
    contexts += _context_sum(samples.num_prompt, decode_end, last_window)
    num_drawn_from = len(work.lengths) + num_decode
    head_weights = spec.hidden_size * spec.vocab_size
    skipped = _num_layer_weights(spec) - 2 * spec.num_kv_heads * spec.head_dim * spec.hidden_size  # of the last layer
    matmul = 2 * (_num_linear_weights(spec) * num_computed - skipped * (num_computed - num_drawn_from))
    attention = 4 * spec.num_heads * spec.head_dim * contexts
    lm_head = 2 * head_weights * num_sampled
    own_reads = int((samples.num_outputs * (samples.num_outputs - 1) // 2).sum())
    lm_head_bytes = dtype_bytes * head_weights * num_sampling_steps
    weights_of_step = _num_block_parameters(spec) + spec.hidden_size
    weight_bytes = dtype_bytes * (weights_of_step * num_steps + spec.hidden_size * num_computed) + lm_head_bytes
    kv_read, kv_written = kv_bytes * (work.kv_reads + own_reads), kv_bytes * num_computed
    return JobCost(
        num_prompt_tokens_computed=num_prompt,
        num_decode_tokens_computed=num_decode,
        num_steps=num_steps,
        matmul_flops=matmul,
        attention_flops=attention,
        lm_head_flops=lm_head,
        flops=matmul + attention + lm_head,
        weight_bytes_read=weight_bytes,
        lm_head_bytes_read=lm_head_bytes,
        kv_bytes_read=kv_read,
        kv_bytes_written=kv_written,
        bytes=weight_bytes + kv_read + kv_written,
    )


def _context_sum(begin: Int64s, end: Int64s, window: int | None) -> int:
    """Sum of min(p + 1, window) over the positions p of all [begin, end)."""

    def up_to(position: Int64s) -> Int64s:
        if window is None:
            return position * (position + 1) // 2
        inside = np.minimum(position, window)
        return inside * (inside + 1) // 2 + window * (position - inside)

    return int((up_to(end) - up_to(begin)).sum())


def _kv_memory(tree: PrefixTree, samples: _Samples, kv_bytes: int) -> KvMemory:
    num_own = samples.num_outputs - 1
    # A group [i, j) needs the whole prompt of i, and of the others what the one before does not have.
    shared = _max_group_sum(samples.num_new + num_own, samples.num_prompt - samples.num_new, samples.group_size)
    unshared = _max_group_sum(samples.num_prompt + num_own, np.zeros_like(num_own), samples.group_size)
    everything = tree.num_unique_tokens + int(num_own.sum())
    return KvMemory(
        bytes_per_token=kv_bytes,
        peak_tokens=shared,
        peak_bytes=shared * kv_bytes,
        peak_without_sharing_tokens=unshared,
        peak_without_sharing_bytes=unshared * kv_bytes,
        all_tokens=everything,
        all_bytes=everything * kv_bytes,
    )


def _max_group_sum(values: Int64s, first: Int64s, size: int) -> int:
    """The most that `size` (or all) values in a row add up to, with `first` of their first one added."""
    if not len(values):
        return 0
    sums = np.concatenate(([0], np.cumsum(values)))
    size = min(size, len(values))
    return int((sums[size:] - sums[:-size] + first[: len(values) - size + 1]).max())


def _depth(tree: PrefixTree) -> int:
    depths = [0]
    for parent in tree.parent[1:].tolist():
        depths.append(depths[parent] + 1)
    return max(depths)


def _shared_prefixes(tree: PrefixTree, count: int) -> tuple[SharedPrefix, ...]:
    num_rows = tree.row_end.astype(np.int64) - tree.row_begin
    saved = (tree.end - tree.start) * (num_rows - 1)
    best = np.argsort(-saved, kind="stable")[:count]
    return tuple(
        SharedPrefix(
            num_tokens=int(tree.end[node]),
            num_rows=int(num_rows[node]),
            num_tokens_saved=int(saved[node]),
            example_row=int(tree.order[tree.row_begin[node]]),
        )
        for node in best
        if saved[node] > 0
    )
