"""`linear` and the head against products in fp64 and reference.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchinfer.kernels import reference
from batchinfer.kernels.triton import head, linear
from batchinfer.kernels.triton.launch import CHIPS, Chip
from batchinfer.kernels.triton.matmul import FEW_ROWS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def made(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


# (columns, inner, chunks of the inner dimension)
SHAPES = [(130, 100, 1), (70, 2080, 2), (33, 4100, 4)]


@pytest.mark.parametrize(("columns", "inner", "chunks"), SHAPES)
def test_linear(
    device: torch.device, dtype: torch.dtype, tolerance: float, columns: int, inner: int, chunks: int
) -> None:
    assert linear.num_chunks(columns, inner) == chunks
    x, weight = made(device, dtype, FEW_ROWS + 5, inner), made(device, dtype, columns, inner, seed=1) * inner**-0.5
    bias = made(device, dtype, columns, seed=2)
    for rows, added in ((x, bias), (x[:3], bias), (x[:3], None)):  # large tiles, chunks apart, without a bias
        expected = rows.double() @ weight.double().T + (0 if added is None else added.double())
        found = linear.linear(rows, weight, added)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("columns", "inner", "chunks"), SHAPES)
def test_linear_gives_a_row_its_own_bits(
    device: torch.device, dtype: torch.dtype, columns: int, inner: int, chunks: int
) -> None:
    x, weight = made(device, dtype, FEW_ROWS + 5, inner), made(device, dtype, columns, inner, seed=1)
    bias = made(device, dtype, columns, seed=2)
    many = linear.linear(x, weight, bias)
    assert torch.equal(linear.linear(x[:70], weight, bias), many[:70])  # other tiles, chunks by other programs
    assert torch.equal(linear.linear(x[69:70], weight, bias), many[69:70])


def test_linear_takes_rows_that_lie_apart(device: torch.device) -> None:
    x, weight = made(device, torch.float32, 5, 3, 40)[:, 1], made(device, torch.float32, 9, 40, seed=1)
    assert not x.is_contiguous()
    assert torch.equal(linear.linear(x, weight), linear.linear(x.contiguous(), weight))
    assert linear.linear(x[:0], weight).shape == (0, 9)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("is_wide", [False, True])
def test_tiles_of_a_weight_go_through_the_inner_dimension_alike(chip: Chip, is_wide: bool) -> None:
    for columns in (4096, 28672):
        tiles = [linear.choose_tile(chip, rows, columns, 1, is_wide) for rows in (1, FEW_ROWS, FEW_ROWS + 1, 9999)]
        assert len({tile.depth for tile in tiles}) == 1


def test_the_number_of_chunks_fills_a_chip() -> None:
    assert linear.num_chunks(4096, 14336) == 2  # 64 tiles of columns
    assert linear.num_chunks(28672, 4096) == 1
    assert linear.num_chunks(576, 1536) == 1  # too short to cut
    assert linear.num_chunks(64, 1 << 20) == linear.MAX_CHUNKS


VOCAB, DIM = 300, 72


def head_inputs(device: torch.device, dtype: torch.dtype, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(VOCAB, (num_rows,), generator=torch.Generator().manual_seed(3))
    return (
        made(device, dtype, num_rows, DIM),
        made(device, dtype, VOCAB, DIM, seed=1) / 4,
        targets.to(device),
    )


def test_head_logits_are_sums_in_fp32(device: torch.device, dtype: torch.dtype) -> None:
    hidden, lm_head, _ = head_inputs(device, dtype, FEW_ROWS + 5)
    logits = head.head_logits(hidden, lm_head)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), hidden.double() @ lm_head.double().T, rtol=2e-6, atol=2e-6)
    assert torch.equal(head.head_logits(hidden[:70], lm_head), logits[:70])
    assert torch.equal(head.head_logits(hidden[69:70], lm_head), logits[69:70])


def test_linear_logprobs(device: torch.device, dtype: torch.dtype) -> None:
    hidden, lm_head, targets = head_inputs(device, dtype, FEW_ROWS + 5)
    found = head.linear_logprobs(hidden, lm_head, targets)
    exact = torch.log_softmax(hidden.double() @ lm_head.double().T, -1)
    torch.testing.assert_close(found.logprob.double(), exact.gather(1, targets[:, None])[:, 0], rtol=0, atol=5e-6)
    torch.testing.assert_close(found.entropy.double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=5e-6)
    expected = reference.linear_logprobs(hidden, lm_head, targets)
    assert torch.equal(found.argmax, expected.argmax)
    torch.testing.assert_close(found.logprob, expected.logprob, rtol=0, atol=5e-6)


def test_linear_logprobs_gives_a_row_its_own_bits(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, lm_head, targets = head_inputs(device, dtype, FEW_ROWS + 5)
    many = head.linear_logprobs(hidden, lm_head, targets)
    monkeypatch.setattr(head, "ROWS_AT_A_TIME", 40)
    for begin, end in ((0, 70), (69, 70)):
        part = head.linear_logprobs(hidden[begin:end], lm_head, targets[begin:end])
        for of_many, of_part in zip(many, part, strict=True):
            assert torch.equal(of_many[begin:end], of_part)


def test_no_tensor_of_rows_times_vocabulary_is_made(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, lm_head, targets = head_inputs(device, torch.float32, 5)
    sizes = []
    empty, new_empty = torch.empty, Tensor.new_empty

    def count(make: object) -> object:
        def counted(*args: object, **kwargs: object) -> Tensor:
            tensor = make(*args, **kwargs)
            sizes.append(tensor.numel())
            return tensor

        return counted

    monkeypatch.setattr(torch, "empty", count(empty))
    monkeypatch.setattr(Tensor, "new_empty", count(new_empty))
    head.linear_logprobs(hidden, lm_head, targets)
    assert sizes
    assert max(sizes) <= 5 * -(-VOCAB // 64)  # a few numbers for each tile


def test_greedy(device: torch.device, dtype: torch.dtype) -> None:
    hidden, lm_head, _ = head_inputs(device, dtype, 7)
    lm_head[200] = lm_head[140]  # two ids with the same logit, in two tiles
    hidden[0] = lm_head[140] * 8
    lm_head[299] = lm_head[0] = hidden[1]  # the greatest of row 1 twice; one is not drawn
    drawn = head.greedy(hidden, lm_head, 298, wants_logprobs=True)
    logits = hidden.double() @ lm_head.double().T
    assert drawn.token_ids.tolist()[:2] == [140, 0]
    assert torch.equal(drawn.token_ids, logits[:, :298].argmax(-1))
    assert drawn.is_finite.all()
    # Ids that are not drawn count in the sum.
    expected = torch.log_softmax(logits, -1).gather(1, drawn.token_ids[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs.double(), expected, rtol=0, atol=5e-6)
    plain = head.greedy(hidden, lm_head, 298, wants_logprobs=False)
    assert plain.logprobs is None
    assert torch.equal(plain.token_ids, drawn.token_ids)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_told_and_touches_no_other(device: torch.device, broken: float) -> None:
    hidden, lm_head, targets = head_inputs(device, torch.float32, 4)
    expected = head.linear_logprobs(hidden, lm_head, targets)
    hidden[2, 5] = broken
    drawn = head.greedy(hidden, lm_head, VOCAB, wants_logprobs=True)
    assert drawn.is_finite.tolist() == [True, True, False, True]
    assert 0 <= drawn.token_ids[2] < VOCAB
    found = head.linear_logprobs(hidden, lm_head, targets)
    assert found.logprob.isnan().tolist() == found.entropy.isnan().tolist() == [False, False, True, False]
    for row in (0, 1, 3):
        assert found.logprob[row] == expected.logprob[row]
        assert found.entropy[row] == expected.entropy[row]


def test_extreme_logits_keep_entropy_and_logprobs_finite(device: torch.device) -> None:
    hidden = torch.tensor([[1.0, 0.0], [0.0, 0.0]], device=device)
    lm_head = torch.zeros(VOCAB, 2, device=device)
    lm_head[7, 0], lm_head[260, 0] = 3e4, -3e4  # all others are at 0: their exponentials vanish
    found = head.linear_logprobs(hidden, lm_head, torch.tensor([260, 3], device=device))
    assert found.argmax.tolist() == [7, 0]
    assert found.logprob[0] == -6e4
    assert found.entropy[0] == 0
    torch.testing.assert_close(found.entropy[1].item(), torch.tensor(float(VOCAB)).log().item(), rtol=1e-6, atol=0)


def test_head_takes_no_rows(device: torch.device) -> None:
    hidden, lm_head, targets = head_inputs(device, torch.float32, 0)
    assert head.head_logits(hidden, lm_head).shape == (0, VOCAB)
    assert head.linear_logprobs(hidden, lm_head, targets).logprob.shape == (0,)
    assert head.greedy(hidden, lm_head, VOCAB, wants_logprobs=True).token_ids.shape == (0,)
