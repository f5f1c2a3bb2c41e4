"""Weights of a made-up model, for checks and measurements that need none of a real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchinfer.models.spec import DecoderSpec
from batchinfer.models.weights import DecoderWeights, LayerWeights


def random_weights(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device, normal: Callable[[tuple[int, ...]], Tensor]
) -> DecoderWeights:
    """Of a scale that keeps hidden states near 1; no biases, norms of one, a head of its own.

    Args:
        normal: shape -> standard normal numbers, of any dtype on any device.
    """
    hidden, inner, attended = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim

    def draw(*shape: int) -> Tensor:
        return (normal(shape) * shape[-1] ** -0.5).to(device, dtype)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    layers = [
        LayerWeights(
            attn_norm=ones(hidden),
            qkv=draw(attended + 2 * spec.num_kv_heads * spec.head_dim, hidden),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            o=draw(hidden, attended),
            o_bias=None,
            mlp_norm=ones(hidden),
            gate_up=draw(2 * inner, hidden),
            gate_up_bias=None,
            down=draw(hidden, inner),
            down_bias=None,
        )
        for _ in range(spec.num_layers)
    ]
    embed, head = draw(spec.vocab_size, hidden) * hidden**0.5, draw(spec.vocab_size, hidden)
    return DecoderWeights(embed=embed, layers=layers, final_norm=ones(hidden), lm_head=head)


class NoText:
    """A tokenizer of tokens that are no text."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""
