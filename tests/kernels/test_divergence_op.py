"""The divergence op against direct fp64 sums and against values known by heart."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels.reference import DIVERGENCE_ROWS, Divergence, divergence


def direct(p: torch.Tensor, q: torch.Tensor, targets: torch.Tensor) -> Divergence:
    log_p, log_q = (torch.log_softmax(logits.double(), -1) for logits in (p, q))
    rows = torch.arange(len(targets))
    return Divergence(
        kl_pq=(log_p.exp() * (log_p - log_q)).sum(-1),
        kl_qp=(log_q.exp() * (log_q - log_p)).sum(-1),
        entropy_p=-(log_p.exp() * log_p).sum(-1),
        entropy_q=-(log_q.exp() * log_q).sum(-1),
        logprob_p=log_p[rows, targets],
        logprob_q=log_q[rows, targets],
        argmax_p=p.argmax(-1),
        argmax_q=q.argmax(-1),
    )


def test_two_outcomes() -> None:
    """p = (.9, .1), q = (.5, .5): 0.3681 and 0.5108 nats."""
    p, q = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    found = divergence(p, q, torch.tensor([1]))
    assert float(found.kl_pq) == pytest.approx(0.3681, abs=5e-5)
    assert float(found.kl_qp) == pytest.approx(0.5108, abs=5e-5)
    assert float(found.logprob_p.exp()) == pytest.approx(0.1, rel=1e-6)
    assert float(found.entropy_q.exp()) == pytest.approx(2, rel=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 17])
@pytest.mark.parametrize(("vocab", "scale", "apart"), [(2, 1, 1), (320, 3, 2), (5003, 10, 1e-3), (50_000, 3, 0.1)])
def test_equals_direct_sums(rows: int, vocab: int, scale: float, apart: float) -> None:
    generator = torch.Generator().manual_seed(rows)
    p = torch.randn(rows, vocab, generator=generator) * scale + 5
    q = p + torch.randn(rows, vocab, generator=generator) * apart
    targets = torch.randint(vocab, (rows,), generator=generator)
    for name, found, expected in zip(Divergence._fields, divergence(p, q, targets), direct(p, q, targets), strict=True):
        assert found.shape == (rows,), name
        assert found.dtype == (torch.int64 if name.startswith("argmax") else torch.float64), name
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_equal_logits_diverge_by_exactly_nothing() -> None:
    logits = torch.randn(9, 4001) * 20
    found = divergence(logits, logits.clone(), torch.zeros(9, dtype=torch.int64))
    assert (found.kl_pq == 0).all()
    assert (found.kl_qp == 0).all()


def test_never_negative_and_finite_for_sure_models() -> None:
    p, q = torch.zeros(1, 50), torch.zeros(1, 50)
    p[0, 3], q[0, 4] = 1e4, 1e4
    found = divergence(p, q, torch.tensor([3]))
    assert float(found.kl_pq) == pytest.approx(1e4)
    assert float(found.entropy_p) == pytest.approx(0, abs=1e-6)
    near = torch.randn(200, 300)
    assert (divergence(near, near + 1e-6 * torch.randn(200, 300), torch.zeros(200, dtype=torch.int64)).kl_pq >= 0).all()


def test_rows_have_the_same_bits_in_any_company() -> None:
    p, q = torch.randn(11, 30_000), torch.randn(11, 30_000)
    targets = torch.arange(11)
    together = divergence(p, q, targets)
    for row in range(11):
        alone = divergence(p[row : row + 1], q[row : row + 1], targets[row : row + 1])
        assert all(torch.equal(a, t[row : row + 1]) for a, t in zip(alone, together, strict=True))
    assert DIVERGENCE_ROWS < 11
