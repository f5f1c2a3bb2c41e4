"""The seam between the decoder and attention kernels."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.tree import RaggedBatch, WavePlan, plan_waves
from batchinfer.kernels import reference
from batchinfer.kernels.fp8_kv import KVScales


class AttentionBackend(Protocol):
    """Attention over paged KV. `plan` is called once per step on the host, `forward` once per layer.

    Contract: the result of a query token depends on its query, on the KV of its positions and on
    nothing else of the batch, to the last bit.
    """

    def plan(self, batch: RaggedBatch, windows: frozenset[int | None]) -> None:
        """Prepare a step; `windows` are the sliding windows of the layers to come."""

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int | None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """[tokens, heads, head_dim] -> [tokens, heads * head_dim]; caches of one layer, see kernels.reference."""


class ReferenceAttention:
    """`kernels.reference.tree_attention`: plain torch, any device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._waves: dict[int | None, list[reference.Wave]] = {}

    def plan(self, batch: RaggedBatch, windows: frozenset[int | None]) -> None:
        self._waves = {window: [self._to_device(wave) for wave in plan_waves(batch, window)] for window in windows}

    def _to_device(self, wave: WavePlan) -> reference.Wave:
        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self.device)

        masks = [
            None if mask is None else reference.Mask(mask.begin, mask.end, put(~mask.visible[:, None, :, None]))
            for mask in wave.masks
        ]
        return reference.Wave(put(wave.rows), put(wave.groups), wave.num_active, masks)

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int | None,
        scales: KVScales | None = None,
    ) -> Tensor:
        return reference.tree_attention(q, k_cache, v_cache, self._waves[window], scale, scales)
