"""The seam between the decoder and attention kernels."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from batchinfer.attention.tree import RaggedBatch, plan_tiles
from batchinfer.kernels import reference


class AttentionBackend(Protocol):
    """Attention over paged KV. `plan` is called once per step on the host, `forward` once per layer.

    Contract: the result of a query token depends on its query, on the KV of its positions and on
    nothing else of the batch, to the last bit.
    """

    def plan(self, batch: RaggedBatch, windows: frozenset[int | None]) -> None:
        """Prepare a step; `windows` are the sliding windows of the layers to come."""

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None) -> Tensor:
        """[tokens, heads, head_dim] -> [tokens, heads * head_dim]; caches of one layer, see kernels.reference."""


class ReferenceAttention:
    """`kernels.reference.tree_attention`: plain torch, any device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._steps: dict[int | None, list[list[reference.TileItems]]] = {}

    def plan(self, batch: RaggedBatch, windows: frozenset[int | None]) -> None:
        def put(array: object) -> Tensor:
            return torch.as_tensor(array, device=self.device)

        self._steps = {
            window: [
                [
                    reference.TileItems(
                        put(piece.rows), put(piece.groups), None if piece.mask is None else put(piece.mask)
                    )
                    for piece in pieces
                ]
                for pieces in plan_tiles(batch, window)
            ]
            for window in windows
        }

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None) -> Tensor:
        return reference.tree_attention(q, k_cache, v_cache, self._steps[window], scale)
