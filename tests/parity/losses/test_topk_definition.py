"""Top-k losses against their definitions: loss and gradient, both layers, every tail.

Invariant: for every loss, tail, temperature and number of teachers the production layers give the loss and gradient
that autograd finds in float64 from probability vectors over explicit outcomes. Not exercised: tensor parallelism (its
own test), tails below the floor of the bucket form, clamps and caps (unit tests).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.losses.definitions import rows_and_gradient, teacher_topk
from tests.parity.losses.on_device import parallel_topk_distill

LOSSES = ("forward_kl", "reverse_kl", "jsd")
TAILS = ("bucket", "generalized", "renormalize", "none")
LAYERS = [("chunked", torch.float32, 2e-6), ("chunked", torch.float64, 1e-12), ("reference", torch.float64, 1e-12)]
VOCAB = 101


def run(z: Tensor, ids: Tensor, logq: Tensor, upstream: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = z.clone().requires_grad_()
    loss, _ = parallel_topk_distill(leaf, ids, logq, **{"check_values": True, **options})
    (gradient,) = torch.autograd.grad(loss, leaf, upstream.to(loss.dtype))
    return loss.detach(), gradient


def assert_close(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float) -> None:
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def students_and_teachers(rows: int, teachers: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits on a common base, so that teacher and student agree in part and teachers share ids."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, 1, VOCAB, generator=generator) * 2
    noise = torch.randn(rows, teachers + 1, VOCAB, generator=generator)
    logits = base + noise
    return logits[:, 0].clone(), logits[:, 1:].clone()


@pytest.mark.parametrize(("backend", "dtype", "tolerance"), LAYERS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("loss", LOSSES)
def test_one_teacher(loss: str, tail: str, backend: str, dtype: torch.dtype, tolerance: float) -> None:
    z, teacher = students_and_teachers(5, 1)
    ids, logq = teacher_topk(teacher[:, 0], 7)
    upstream = torch.linspace(0.5, 2, 5)
    options = {"loss": loss, "tail": tail, "beta": 0.3, "temperature": 1.7}
    expected = rows_and_gradient(z, ids, logq, upstream, **options)
    assert_close(run(z.to(dtype), ids, logq, upstream, backend=backend, **options), expected, tolerance)


@pytest.mark.parametrize(("backend", "dtype", "tolerance"), LAYERS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("loss", LOSSES)
def test_several_teachers_share_ids(loss: str, tail: str, backend: str, dtype: torch.dtype, tolerance: float) -> None:
    z, teachers = students_and_teachers(5, 3)
    ids, logq = teacher_topk(teachers, 7)
    shared = sum(len(set(row.flatten().tolist())) < row.numel() for row in ids)
    assert shared == 5  # otherwise this test shows nothing
    weights = torch.rand(5, 3, generator=torch.Generator().manual_seed(1))
    weights[2, 1] = 0
    upstream = torch.linspace(0.5, 2, 5)
    options = {"loss": loss, "tail": tail, "beta": 0.6}
    expected = rows_and_gradient(z, ids, logq, upstream, weights, **options)
    actual = run(z.to(dtype), ids, logq, upstream, teacher_weights=weights, backend=backend, **options)
    assert_close(actual, expected, tolerance)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("tail", TAILS)
def test_jsd_ends_are_the_kls(tail: str, beta: float) -> None:
    z, teacher = students_and_teachers(4, 1)
    ids, logq = teacher_topk(teacher[:, 0], 5)
    one = torch.ones(4)
    expected = run(z, ids, logq, one, loss="forward_kl" if beta == 0 else "reverse_kl", tail=tail)
    actual = run(z, ids, logq, one, loss="jsd", tail=tail, beta=beta)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("loss", LOSSES)
def test_entries_that_leave_the_ids(loss: str, tail: str, backend: str) -> None:
    """Teacher entries of -inf, ids in the padding, and padded columns: their teacher mass belongs to the tail."""
    z, teacher = students_and_teachers(4, 1)
    ids, logq = teacher_topk(teacher[:, 0], 7)
    logq[0, 6] = -torch.inf
    logq[1, :2] = -torch.inf
    ids[2, 3] = VOCAB + 1
    padded = torch.cat([z, torch.full((4, 3), 50.0)], 1).double()
    upstream = torch.linspace(1, 2, 4)
    expected_loss, expected = rows_and_gradient(z, ids, logq, upstream, loss=loss, tail=tail)
    got_loss, got = run(padded, ids, logq, upstream, loss=loss, tail=tail, true_vocab_size=VOCAB, backend=backend)
    assert_close((got_loss, got[:, :VOCAB]), (expected_loss, expected), 1e-10)
    assert torch.count_nonzero(got[:, VOCAB:]) == 0


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("loss", LOSSES)
def test_k_of_one(loss: str, tail: str) -> None:
    z, teacher = students_and_teachers(4, 1)
    ids, logq = teacher_topk(teacher[:, 0], 1)
    upstream = torch.linspace(1, 2, 4)
    expected = rows_and_gradient(z, ids, logq, upstream, loss=loss, tail=tail)
    assert_close(run(z, ids, logq, upstream, loss=loss, tail=tail), expected, 2e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tail", TAILS)
def test_k_of_v_is_the_full_divergence(loss: str, tail: str) -> None:
    """With every id listed there is no tail: all forms become the plain divergence."""
    z, teacher = students_and_teachers(3, 1)
    ids, logq = teacher_topk(teacher[:, 0], VOCAB)
    p, q = torch.log_softmax(z.double(), -1), torch.log_softmax(teacher[:, 0].double(), -1)
    m = torch.log((p.exp() + q.exp()) / 2)
    full = {
        "forward_kl": (q.exp() * (q - p)).sum(-1),
        "reverse_kl": (p.exp() * (p - q)).sum(-1),
        "jsd": ((q.exp() * (q - m)).sum(-1) + (p.exp() * (p - m)).sum(-1)) / 2,
    }[loss]
    got, _ = run(z, ids, logq, torch.ones(3), loss=loss, tail=tail)
    torch.testing.assert_close(got.double(), full, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_gradcheck(backend: str, loss: str, tail: str) -> None:
    z, teachers = students_and_teachers(2, 2)
    z, teachers = z[:, :13].double(), teachers[..., :13]
    ids, logq = teacher_topk(teachers, 3)
    weights = torch.tensor([[0.4, 1.1], [1.0, 0.2]])

    def row_losses(x: Tensor) -> Tensor:
        return parallel_topk_distill(
            x,
            ids,
            logq.double(),
            loss=loss,
            tail=tail,
            beta=0.3,
            temperature=0.8,
            teacher_weights=weights,
            backend=backend,
        )[0]

    assert torch.autograd.gradcheck(row_losses, (z.requires_grad_(),))


def test_repeated_id_of_one_teacher_counts_twice() -> None:
    """Not a valid top-k, but the sums of the formulas are still what is computed."""
    z, teacher = students_and_teachers(2, 1)
    ids, logq = teacher_topk(teacher[:, 0], 4)
    ids[:, 3] = ids[:, 0]
    leaf = z.double().requires_grad_()
    p = torch.softmax(leaf, -1).gather(1, ids)
    q = logq.double().exp()
    rest = 1 - q.sum(1)
    expected = (q * (q / p).log()).sum(1) + rest * (rest / (1 - p.sum(1))).log()
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    assert_close(run(z, ids, logq, torch.ones(2), check_values=False), (expected.detach(), gradient), 2e-6)
