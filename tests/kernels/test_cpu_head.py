"""The C++ head for each instruction set: logits, argmax, logsumexp, entropy and targets in one pass."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from kernel_calls import BF16, Head, Kernels, fp32_sum_error, num_threads, randn
from tiny_models import INSTRUCTION_SETS
from torch import Tensor

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ kernels were built")
ROWS = [*range(1, 41), 300]
#: Beside the logits' own error: exp2 to 3e-7, and fp32 sums of some hundred terms a lane.
REDUCTION = 2e-6


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    packed: Tensor
    targets: Tensor


def make(kernels: Kernels, vocab: int, size: int = 48, rows: int = 300, scale: float = 0.3) -> Case:
    weight = randn(vocab, size, seed=1, scale=scale)
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(2))
    return Case(randn(rows, size), weight, kernels.pack(weight), targets)


def same(found: Head, expected: Head, begin: int, end: int) -> bool:
    """Bitwise; NaN equals NaN."""
    return all(
        torch.equal(a.view(torch.int32), b[begin:end].contiguous().view(torch.int32))
        for a, b in zip(found, expected, strict=True)
        if a is not None and b is not None
    )


@pytest.mark.parametrize(("vocab", "size"), [(1, 16), (15, 48), (16, 48), (17, 48), (272, 32), (1003, 48), (5000, 576)])
def test_head(kernels: Kernels, vocab: int, size: int) -> None:
    case = make(kernels, vocab, size)
    found = kernels.head(case.hidden, case.packed, vocab, targets=case.targets)
    logits = case.hidden.double() @ case.weight.double().T
    error = fp32_sum_error(case.hidden, case.weight) + 1e-7
    assert found.logits is not None
    assert bool(((found.logits.double() - logits).abs() <= error).all())
    # What is said of a row is said of exactly these logits ...
    assert torch.equal(found.top, found.logits.amax(-1))
    assert torch.equal(found.argmax.long(), found.logits.argmax(-1))
    assert torch.equal(found.target_logit, found.logits.gather(1, case.targets[:, None])[:, 0])
    # ... so the twins of the sums take the kernel's logits: no error of the products hides theirs.
    logprobs = torch.log_softmax(found.logits.double(), -1)
    lse = torch.logsumexp(found.logits.double(), -1)
    assert float((found.lse.double() - lse).abs().max()) <= REDUCTION * max(1.0, float(lse.abs().max()))
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert float((found.entropy.double() - entropy).abs().max()) <= 4 * REDUCTION * max(1.0, float(entropy.max()))


@pytest.mark.parametrize("vocab", [17, 1003, 5000])
def test_rows_of_the_head_are_the_same_bits_in_any_company(kernels: Kernels, vocab: int) -> None:
    case = make(kernels, vocab)
    whole = kernels.head(case.hidden, case.packed, vocab, targets=case.targets)
    for threads in (1, 2, 3):
        with num_threads(threads):
            for rows in ROWS:
                found = kernels.head(case.hidden[:rows], case.packed, vocab, targets=case.targets[:rows])
                assert same(found, whole, 0, rows), f"{rows} rows on {threads} threads"
            for begin, end in ((299, 300), (7, 8), (250, 262)):
                found = kernels.head(case.hidden[begin:end], case.packed, vocab, targets=case.targets[begin:end])
                assert same(found, whole, begin, end)
    without = kernels.head(case.hidden, case.packed, vocab, targets=case.targets, wants_logits=False)
    assert same(without, whole, 0, 300), "asking for logits changes nothing"


@pytest.mark.parametrize("num_ids", [1, 15, 16, 17, 500, 1002])
def test_ids_without_text_are_not_drawn_but_are_summed(kernels: Kernels, num_ids: int) -> None:
    case = make(kernels, 1003, rows=40)
    whole = kernels.head(case.hidden, case.packed, 1003, targets=case.targets)
    found = kernels.head(case.hidden, case.packed, 1003, num_ids=num_ids, targets=case.targets)
    assert found.logits is not None
    assert torch.equal(found.argmax.long(), found.logits[:, :num_ids].argmax(-1))
    assert torch.equal(found.top, found.logits[:, :num_ids].amax(-1))
    for name in ("lse", "entropy", "target_logit", "logits"):
        assert torch.equal(getattr(found, name), getattr(whole, name)), name


@pytest.mark.parametrize("ids", [(0, 5), (3, 19), (16, 17), (40, 700), (999, 1002), (47, 48), (767, 768), (1001, 1002)])
def test_lowest_of_equal_logits_wins(kernels: Kernels, ids: tuple[int, int]) -> None:
    """Ties within a vector, between vectors, between panels and between groups of panels."""
    case = make(kernels, 1003, rows=9)
    case.weight[list(ids)] = case.hidden[4] * 4
    found = kernels.head(case.hidden, kernels.pack(case.weight), 1003)
    assert found.logits is not None
    assert float(found.logits[4, ids[0]]) == float(found.logits[4, ids[1]]) == float(found.top[4])
    assert int(found.argmax[4]) == ids[0]


def test_all_logits_equal(kernels: Kernels) -> None:
    vocab = 1003
    found = kernels.head(torch.ones(3, 16, dtype=BF16), kernels.pack(torch.ones(vocab, 16, dtype=BF16)), vocab)
    assert found.argmax.tolist() == [0, 0, 0]
    assert found.top.tolist() == [16.0] * 3
    expected = torch.tensor(float(vocab)).log()
    assert torch.allclose(found.lse, 16 + expected, atol=0, rtol=REDUCTION)
    assert torch.allclose(found.entropy, expected.expand(3), atol=0, rtol=REDUCTION)


@pytest.mark.parametrize("scale", [1e3, 1e8])
def test_certain_rows(kernels: Kernels, scale: float) -> None:
    """Logits far apart: one of probability 1, entropy 0, no NaN; all negative ones too."""
    weight = torch.arange(100)[:, None].expand(100, 16).to(BF16) - 200
    hidden = torch.full((2, 16), scale).to(BF16)
    hidden[1] *= -1
    found = kernels.head(hidden, kernels.pack(weight), 100, targets=torch.tensor([99, 0]))
    assert found.argmax.tolist() == [99, 0]
    assert torch.equal(found.lse, found.top)
    assert torch.equal(found.target_logit, found.top)
    assert found.entropy.abs().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", [0, 15, 47, 300, 1002])
def test_a_row_with_one_infinite_logit_is_marked_and_no_other(kernels: Kernels, place: int, sign: int) -> None:
    """Wherever it is, an id that is never drawn included."""
    case = make(kernels, 1003, rows=20)
    case.hidden[:, 0] = 0.0
    case.weight[:, 0] = 0.0
    good = kernels.head(case.hidden, kernels.pack(case.weight), 1003, num_ids=290)
    case.weight[place, 0] = 3e38
    case.hidden[6, 0] = sign * 1e3  # the product overflows
    found = kernels.head(case.hidden, kernels.pack(case.weight), 1003, num_ids=290)
    assert found.logits is not None
    assert (~found.logits[6].isfinite()).nonzero().flatten().tolist() == [place]
    assert float(found.logits[6, place]) == sign * float("inf")
    check_marked(found, good, bad_row=6)


def test_a_row_with_nan_is_marked_and_no_other(kernels: Kernels) -> None:
    case = make(kernels, 1003, rows=20)
    good = kernels.head(case.hidden, case.packed, 1003)
    case.hidden[6, 40] = float("nan")
    check_marked(kernels.head(case.hidden, case.packed, 1003), good, bad_row=6)


def check_marked(found: Head, good: Head, bad_row: int) -> None:
    for name in ("top", "lse", "entropy"):
        assert getattr(found, name)[bad_row].isnan(), name
    others = [row for row in range(len(good.top)) if row != bad_row]
    for name in ("top", "argmax", "lse", "entropy", "logits"):
        assert torch.equal(getattr(found, name)[others], getattr(good, name)[others]), name
