"""The least time of each kernel: figures worked out by hand, and the table in the document."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.kernels.triton import floors
from batchinfer.kernels.triton.floors import H200, LLAMA_3_8B, Chip, Floor, StepShape


def by_kernel(step: StepShape) -> dict[str, Floor]:
    return {floor.kernel: floor for floor in floors.step_floors(LLAMA_3_8B, step)}


def test_shapes_of_steps() -> None:
    decode = StepShape.decode(256, 128, prefixes=8, prefix=4096)
    assert (decode.num_tokens, decode.num_outputs) == (256, 256)
    assert decode.kv_tokens == 256 * 128 + 8 * 4096  # a prefix once, not once for each of its 32 rows
    assert decode.pairs == 256 * (128 + 4096)
    prefill = StepShape.prefill(3, before=10)
    assert (prefill.num_tokens, prefill.num_outputs, prefill.kv_tokens) == (3, 1, 13)
    assert prefill.pairs == 11 + 12 + 13


def test_a_decode_step_reads_every_weight_but_the_embedding_once() -> None:
    found = floors.step_floors(LLAMA_3_8B, StepShape.decode(1, 0))
    products = sum(floor.calls * floor.nbytes for floor in found if floor.kernel.startswith(("linear", "greedy")))
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    weights = 2 * (32 * layer + 128_256 * 4096)
    assert 0 < products - weights < 1e-3 * weights  # the row itself
    assert weights == pytest.approx(15.0e9, rel=0.01)


def test_attention_reads_kv_and_multiplies_what_is_seen() -> None:
    floor = by_kernel(StepShape.decode(256, 1024))["tree_attention"]
    assert floor.calls == 32
    assert floor.nbytes == 256 * 1024 * 2 * 8 * 128 * 2 + 2 * 256 * 4096 * 2
    assert floor.flops == 2 * 2 * 32 * 128 * 256 * 1024
    assert floor.is_memory_bound(H200)
    assert floor.seconds(H200) == pytest.approx(floor.nbytes / 4.8e12)
    assert not by_kernel(StepShape.prefill(8192))["tree_attention"].is_memory_bound(H200)


def test_sharing_divides_the_bytes_and_not_the_products() -> None:
    shared = by_kernel(StepShape.decode(256, 0, prefixes=8, prefix=4096))["tree_attention"]
    alone = by_kernel(StepShape.decode(256, 4096))["tree_attention"]
    assert shared.flops == alone.flops
    assert alone.nbytes / shared.nbytes == pytest.approx(32, rel=0.05)


def test_the_slower_of_memory_and_products_binds() -> None:
    chip = Chip("round", 10.0, 100.0)
    assert Floor("a", 1, 50, 100).seconds(chip) == 5.0
    assert Floor("a", 1, 10, 1000).seconds(chip) == 10.0
    assert floors.step_seconds([Floor("a", 3, 50, 100), Floor("b", 0, 10, 1)], chip) == 15.0


def test_beside_the_steps() -> None:
    assert floors.copy_floor(LLAMA_3_8B, 1).nbytes == 2 * 64 * 131_072  # 128 KiB of KV a token
    scoring = floors.scoring_floor(LLAMA_3_8B, 2048)
    assert scoring.flops == 2 * 2048 * 4096 * 128_256
    assert scoring.nbytes < 2 * 128_256 * 4096 * 1.1, "no logits are written"


def test_the_document_has_these_tables(repo_root: Path) -> None:
    """Made with python -m batchinfer.kernels.triton.floors."""
    assert floors.tables() in (repo_root / "docs" / "performance-gpu.md").read_text()
