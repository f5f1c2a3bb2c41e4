"""The draw kernel against engine/sampler.py: the same random numbers, the same truncation, the same tokens."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer.engine import sampler
from batchinfer.engine.random import _gumbel, gumbel_noise_all
from batchinfer.engine.sampler import DrawColumns, FusedDraw
from batchinfer.kernels.triton import sample
from batchinfer.kernels.triton.random import gumbel, gumbel_of_ids

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

VOCAB = 150


@triton.jit
def noise_kernel(out_ptr, keys_ptr, positions_ptr, BLOCK: tl.constexpr):  # noqa: N803
    row, begin = tl.program_id(0), tl.program_id(1) * BLOCK
    noise = gumbel_of_ids(begin, tl.load(positions_ptr + row), tl.load(keys_ptr + row), BLOCK)
    tl.store(out_ptr + row * tl.num_programs(1) * BLOCK + begin + tl.arange(0, BLOCK), noise)


@triton.jit
def gumbel_kernel(out_ptr, words_ptr, BLOCK: tl.constexpr):  # noqa: N803
    place = tl.arange(0, BLOCK)
    tl.store(out_ptr + place, gumbel(tl.load(words_ptr + place).to(tl.uint32)))


def test_noise_is_that_of_the_engine(device: torch.device) -> None:
    keys = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF], device=device)
    positions = torch.tensor([0, 5, 2**31, 77, 1, 2**32 - 1], device=device)
    out = torch.empty(6, 96, device=device)
    noise_kernel[(6, 3)](out, keys, positions, BLOCK=32)
    torch.testing.assert_close(out, gumbel_noise_all(keys, positions, 96), rtol=2e-6, atol=5e-7)


def test_noise_of_extreme_words(device: torch.device) -> None:
    words = torch.tensor([0, 1, 2, 1000, 2**24 - 1, 2**31, 2**32 - 200, 2**32 - 1], device=device)
    out = torch.empty(8, device=device)
    gumbel_kernel[(1,)](out, words, BLOCK=8)
    expected = _gumbel(words)
    assert expected[-1] == float("-inf")  # v is 1
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=5e-7)


def columns(rng: np.random.Generator, num_rows: int, **fixed: float) -> DrawColumns:
    """Every kind of truncation, alone and with others."""
    values = {
        "temperature": rng.choice([0.3, 0.8, 1, 1.7], num_rows),
        "top_k": rng.choice([0, 0, 1, 4, 30, VOCAB, 9999], num_rows),
        "top_p": rng.choice([1, 1, 0, 0.3, 0.9, 0.999], num_rows),
        "min_p": rng.choice([0, 0, 0.02, 0.4], num_rows),
    }
    values |= {name: np.full(num_rows, value) for name, value in fixed.items()}
    kinds = {"temperature": np.float32, "top_k": np.int64, "top_p": np.float64, "min_p": np.float32}
    return DrawColumns(
        **{name: values[name].astype(kind) for name, kind in kinds.items()},
        keys=rng.integers(-(2**63), 2**63 - 1, num_rows),
        positions=rng.integers(0, 5000, num_rows),
    )


def rows_of(all_columns: DrawColumns, rows: slice) -> DrawColumns:
    return replace(all_columns, **{f.name: getattr(all_columns, f.name)[rows] for f in fields(all_columns)})


@pytest.fixture(params=[64, sample.BLOCK], ids=["several blocks", "one block"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "BLOCK", request.param)


def assert_same_draw(logits: Tensor, parameters: DrawColumns) -> None:
    found, expected = logits.clone(), logits.clone()
    ids = sample.draw(found, parameters, writes=True)
    assert ids.tolist() == sampler.draw(expected, parameters, writes=True).tolist()
    assert torch.equal(found, expected)  # what is left of each row, to the bit


@pytest.mark.usefixtures("block")
def test_draws_the_tokens_of_the_engine(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(12, VOCAB)).astype(np.float32) * 2).to(device)
    assert_same_draw(logits, columns(rng, 12))


@pytest.mark.parametrize(("name", "value"), [("top_k", 20), ("top_p", 0.5), ("min_p", 0.5)])
def test_of_equal_logits_the_lowest_ids_are_kept(device: torch.device, name: str, value: float) -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.integers(0, 3, (4, VOCAB)).astype(np.float32)).to(device)
    logits[0] = 0
    logits[1, :100] = float("-inf")
    off = {"top_k": 0, "top_p": 1, "min_p": 0} | {name: value}
    assert_same_draw(logits, columns(rng, 4, **off))


def test_top_p_among_equals_of_top_k(device: torch.device) -> None:
    """Both end within the same run of equal logits, either one first."""
    rng = np.random.default_rng(2)
    logits = torch.zeros(2, VOCAB, device=device)
    for top_p in (0.5, 0.999):
        assert_same_draw(logits, columns(rng, 2, top_k=30, top_p=top_p, min_p=0))


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 1, "top_p": 1, "min_p": 0},
        {"top_k": 0, "top_p": 0, "min_p": 0},
        {"top_k": 0, "top_p": 1, "min_p": 1},
        {"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1e-5},
    ],
)
def test_the_narrowest_limits_leave_the_most_probable_id(device: torch.device, limits: dict[str, float]) -> None:
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(size=(2, VOCAB)).astype(np.float32)).to(device)
    assert sample.draw(logits, columns(rng, 2, **limits), writes=False).tolist() == logits.argmax(-1).tolist()


def test_top_p_just_below_one_cuts_nothing_that_counts(device: torch.device) -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(size=(2, VOCAB)).astype(np.float32) * 8).to(device)
    parameters = columns(rng, 2, top_k=0, top_p=np.nextafter(1, 0), min_p=0, temperature=1)
    is_probable = torch.softmax(logits, -1) > 1e-6
    expected = sampler.draw(logits.clone(), parameters, writes=False)
    assert torch.equal(sample.draw(logits, parameters, writes=True), expected)
    assert torch.isfinite(logits[is_probable]).all()


def test_a_row_draws_its_token_alone_and_among_others(device: torch.device) -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(5, VOCAB)).astype(np.float32)).to(device)
    before, parameters = logits.clone(), columns(rng, 5)
    together = sample.draw(logits, parameters, writes=False)
    assert torch.equal(logits, before)
    for row in (0, 4):
        part = slice(row, row + 1)
        assert sample.draw(logits[part], rows_of(parameters, part), writes=False) == together[part]


def test_a_broken_row_draws_some_id_and_touches_no_other(device: torch.device) -> None:
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(rng.normal(size=(4, VOCAB)).astype(np.float32)).to(device)
    parameters = columns(rng, 4, top_k=5, top_p=0.9)
    expected = sample.draw(logits, parameters, writes=False)
    logits[1], logits[2] = float("nan"), float("-inf")
    found = sample.draw(logits, parameters, writes=False)
    assert torch.equal(found[[0, 3]], expected[[0, 3]])
    assert ((found >= 0) & (found < VOCAB)).all()


def test_draws_nothing_from_no_rows(device: torch.device) -> None:
    parameters = columns(np.random.default_rng(0), 0)
    assert sample.draw(torch.empty(0, VOCAB, device=device), parameters, writes=True).shape == (0,)


def test_a_vocabulary_too_large_to_count_is_refused(device: torch.device) -> None:
    logits = torch.empty(1, sample.MAX_VOCAB + 1, device=device)
    with pytest.raises(ValueError, match="vocabulary of 1048577 ids"):
        sample.draw(logits, columns(np.random.default_rng(0), 1), writes=False)


def test_draw_has_the_shape_of_the_seam() -> None:
    class Model:
        draw = staticmethod(sample.draw)

    assert isinstance(Model(), FusedDraw)
