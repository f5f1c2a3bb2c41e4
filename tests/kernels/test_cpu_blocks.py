"""Copying blocks of the C++ kernels' KV pool."""

from __future__ import annotations

import pytest
import torch
from tiny_models import INSTRUCTION_SETS

from batchinfer.kernels.cpu.decoder import PackedKV
from batchinfer.kernels.cpu.library import load_library

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ kernels were built")


@pytest.mark.parametrize(
    "pairs",
    [[(0, 5)], [(1, 4), (1, 6), (3, 0)], [(0, 1), (1, 2)], [(2, 3), (3, 2)]],
    ids=["one", "one source twice", "a chain", "in a circle"],
)
def test_every_layer_of_a_block_is_copied_as_it_was_before(pairs: list[tuple[int, int]]) -> None:
    data = torch.randn(3, 7, 2 * 16 * 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    before = data.clone()
    PackedKV(data, 16, load_library(INSTRUCTION_SETS[0])).copy_blocks(pairs)
    expected = before.clone()
    for source, target in pairs:
        expected[:, target] = before[:, source]
    assert torch.equal(data, expected)
