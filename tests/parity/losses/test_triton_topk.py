"""The Triton layer's top-k losses against their definitions and against float64.

Invariant: for every loss and tail the kernels give the loss and gradient that autograd finds in float64 from
probability vectors; fp32 gradients are within 2e-6 of it relative to |p_S| + |q_S|, near the optimum and far from it,
down to a student tail of 1e-7; bf16 gradients are the float64 gradient rounded once. Not exercised here: tensor
parallelism, clamps and caps (their own tests).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.losses.definitions import rows_and_gradient, teacher_topk
from tests.parity.losses.test_precision import float64_gradient, student_with_tail
from tests.parity.losses.triton_layer import DEVICE, LOSSES, TAILS, run

VOCAB, PADDED = 101, 104
every_form = [pytest.mark.parametrize("tail", TAILS), pytest.mark.parametrize("loss", LOSSES)]


def in_every_form(test: Any) -> Any:
    for mark in every_form:
        test = mark(test)
    return test


def logits_and_teachers(rows: int, teachers: int) -> tuple[Tensor, Tensor]:
    """Logits on a common base, so that teacher and student agree in part and teachers share ids."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, 1, VOCAB, generator=generator) * 2
    logits = logits + torch.randn(rows, teachers + 1, VOCAB, generator=generator)
    return logits[:, 0].clone(), logits[:, 1:].clone()


@in_every_form
def test_one_teacher(loss: str, tail: str) -> None:
    """Also: the gradient of a row sums to 0, and a shift of the logits changes nothing."""
    z, teacher = logits_and_teachers(3, 1)
    z[2] = z[1] + 64
    teacher[2] = teacher[1]
    ids, logq = teacher_topk(teacher[:, 0], 7)
    upstream = torch.tensor([0.5, 2.0, 2.0])
    options = {"loss": loss, "tail": tail, "beta": 0.3, "temperature": 1.7}
    expected_loss, expected = rows_and_gradient(z, ids, logq, upstream, **options)
    got_loss, got, _ = run(z, ids, logq, upstream, **options)
    torch.testing.assert_close(got_loss.double(), expected_loss, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=2e-6)
    assert float(got.sum(1).abs().max()) < 2e-6
    torch.testing.assert_close(got[2], got[1], rtol=1e-5, atol=2e-6)


@in_every_form
def test_three_teachers_with_everything(loss: str, tail: str) -> None:
    """Shared ids, int32, entries of -inf, ids in the padding, padded columns, a teacher of weight 0, an odd width."""
    z, teachers = logits_and_teachers(4, 3)
    ids, logq = teacher_topk(teachers, 5)
    assert all(len(set(row.flatten().tolist())) < row.numel() for row in ids)
    logq[0, 1, 4] = -torch.inf
    ids[1, 2, 3] = VOCAB + 1
    logq[2, 0, 1:] = -torch.inf
    weights = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    weights[3, 1] = 0
    upstream = torch.linspace(0.5, 2, 4)
    padded = torch.cat([z, torch.full((4, PADDED - VOCAB), 50.0)], 1)
    options = {"loss": loss, "tail": tail, "beta": 0.6}
    expected_loss, expected = rows_and_gradient(z, ids, logq, upstream, weights, **options)
    got_loss, got, _ = run(
        padded, ids.int(), logq, upstream, teacher_weights=weights, true_vocab_size=VOCAB, check_values=True, **options
    )
    torch.testing.assert_close(got_loss.double(), expected_loss, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(got[:, :VOCAB].double(), expected, rtol=2e-6, atol=2e-6)
    assert torch.count_nonzero(got[:, VOCAB:]) == 0


STUDENT_TAILS = (1e-1, 1e-3, 1e-5, 1e-6, 1e-7)


def rows_of_all_tails() -> tuple[Tensor, Tensor, Tensor]:
    """Logits, ids and teacher log-probs: each student tail with a teacher near and with one far away."""
    rows = []
    for number, student_tail in enumerate(STUDENT_TAILS):
        z, ids = student_with_tail(student_tail, rows=1, vocab=1501, k=16)
        logp = torch.log_softmax(z.double(), -1).gather(1, ids)
        noise = torch.randn(logp.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        for sigma, teacher_tail in ((0.01, 1.3 * student_tail), (3.0, 0.02)):
            moved = torch.log_softmax(logp + noise * sigma, -1)
            logq = (moved + torch.tensor(1 - teacher_tail, dtype=torch.float64).log()).float()
            rows.append((z, ids, logq))
    z, ids, logq = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return z, ids, logq


@in_every_form
def test_fp32_gradient(loss: str, tail: str) -> None:
    z, ids, logq = rows_of_all_tails()
    expected = float64_gradient(z, ids, logq, loss, tail)
    _, got, _ = run(z, ids, logq, loss=loss, tail=tail)
    p, q = torch.softmax(z.double(), -1).gather(1, ids), logq.double().exp()
    error = (got.double() - expected).norm(dim=1) / (p.norm(dim=1) + q.norm(dim=1))
    assert float(error.max()) < 2e-6, error


def test_pull_on_a_small_tail_keeps_its_digits() -> None:
    """Both tails near 1e-5: off the ids the gradient is their difference, which 1 - P and 1 - Q in fp32 know to 1 %."""
    z, ids = student_with_tail(1e-5, rows=3, vocab=1501, k=16)
    moved = torch.log_softmax(torch.randn(ids.shape, generator=torch.Generator().manual_seed(7)).double(), -1)
    logq = (moved + torch.tensor(1 - 1.5e-5, dtype=torch.float64).log()).float()
    outside = torch.ones_like(z).scatter(1, ids, 0)
    expected = float64_gradient(z, ids, logq, "forward_kl", "bucket") * outside
    error = (run(z, ids, logq)[1] * outside - expected).norm(dim=1)
    assert float((error / expected.norm(dim=1)).max()) < 1e-4


@pytest.mark.parametrize(("loss", "tail"), [("forward_kl", "bucket"), ("reverse_kl", "generalized"), ("jsd", "bucket")])
def test_bf16_gradient_over_a_whole_vocabulary(loss: str, tail: str) -> None:
    """A student 0.02 from its teacher: rounding p to bf16 first would cost 12 % here."""
    generator = torch.Generator().manual_seed(5)
    z = (torch.randn(2, 151_936, generator=generator) * 2.5).bfloat16()
    teacher = z.double() + 0.02 * torch.randn(z.shape, dtype=torch.float64, generator=generator)
    logq, ids = torch.log_softmax(teacher, -1).topk(64, -1)
    whole = float64_gradient(z, ids, logq.float(), loss, tail)
    _, got, _ = run(z, ids, logq.float(), loss=loss, tail=tail)
    assert got.dtype == torch.bfloat16
    exact, ours = whole.gather(1, ids), got.gather(1, ids).double()
    rounded = exact.bfloat16().double()
    if DEVICE.type == "cuda":
        assert float((ours - exact).norm()) < 1.1 * float((rounded - exact).norm())
    else:  # cut off instead of rounded: up to one unit in the last place, which is 2^-7 of the power of two below
        ulp = 2.0 ** (exact.abs().log2().floor() - 7)
        p = torch.softmax(z.double(), -1).gather(1, ids)
        assert float(((ours - exact).abs() - 1e-6 * p - ulp).max()) <= 0
    outside = torch.ones_like(whole).scatter(1, ids, 0)
    assert float(((got.double() - whole) * outside).norm() / (whole * outside).norm()) < 2**-7


@pytest.mark.parametrize("tail", ["bucket", "generalized", "renormalize"])
@pytest.mark.parametrize("loss", LOSSES)
def test_zero_where_equal_and_above_elsewhere(loss: str, tail: str) -> None:
    z, teacher = logits_and_teachers(4, 1)
    ids, logq = teacher_topk(teacher[:, 0], 9)
    own = torch.log_softmax(z.double(), -1).gather(1, ids).float()
    logq = torch.cat([own[:2], logq[2:]])
    value, gradient, _ = run(z, ids, logq, loss=loss, tail=tail)
    assert float(value.min()) >= 0 and float(value[:2].max()) < 1e-11 and float(value[2:].min()) > 1e-3
    assert float(gradient[:2].abs().max()) < 3e-7 and float(gradient[2:].abs().max()) > 1e-2


def test_loss_near_the_optimum_keeps_its_digits() -> None:
    """A KL of about 1e-8, which a sum of q (log q - log p) in fp32 would bury in noise of 1e-7."""
    generator = torch.Generator().manual_seed(6)
    z = torch.randn(4, 1009, generator=generator) * 3 + 15
    teacher = torch.log_softmax(z.double() + 1e-4 * torch.randn(z.shape, generator=generator), -1)
    logq, ids = teacher.topk(32, -1)
    p, q = torch.softmax(z.double(), -1).gather(1, ids), logq.float().double().exp()
    p, q = torch.cat([p, 1 - p.sum(1, keepdim=True)], 1), torch.cat([q, 1 - q.sum(1, keepdim=True)], 1)
    exact = (q * (q / p).log()).sum(1)
    got, _, _ = run(z, ids, logq.float())
    assert float(exact.max()) < 1e-7 and float(got.min()) >= 0
    assert float((got.double() - exact).abs().max()) < 2e-10


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tail", TAILS)
def test_k_of_one(loss: str, tail: str) -> None:
    z, teacher = logits_and_teachers(2, 1)
    ids, logq = teacher_topk(teacher[:, 0], 1)
    expected_loss, expected = rows_and_gradient(z, ids, logq, torch.ones(2), loss=loss, tail=tail)
    got_loss, got, _ = run(z, ids, logq, loss=loss, tail=tail)
    torch.testing.assert_close(got_loss.double(), expected_loss, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_k_of_v_is_the_full_divergence(loss: str) -> None:
    """Every id listed, so no tail; more ids than are sorted by comparing all pairs."""
    z, teacher = logits_and_teachers(2, 1)
    ids, logq = teacher_topk(teacher[:, 0], VOCAB)
    p, q = torch.log_softmax(z.double(), -1), torch.log_softmax(teacher[:, 0].double(), -1)
    m = torch.log((p.exp() + q.exp()) / 2)
    full = {
        "forward_kl": (q.exp() * (q - p)).sum(-1),
        "reverse_kl": (p.exp() * (p - q)).sum(-1),
        "jsd": ((q.exp() * (q - m)).sum(-1) + (p.exp() * (p - m)).sum(-1)) / 2,
    }[loss]
    value, gradient, _ = run(z, ids, logq, loss=loss, tail="renormalize")
    torch.testing.assert_close(value.double(), full, rtol=1e-5, atol=1e-6)
    expected = float64_gradient(z, ids, logq, loss, "renormalize")
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-6, atol=2e-6)


def test_repeated_id_of_one_teacher_counts_twice() -> None:
    """Not a valid top-k, but the sums of the formulas are still what is computed."""
    z, teacher = logits_and_teachers(2, 1)
    ids, logq = teacher_topk(teacher[:, 0], 5)
    ids[:, 3] = ids[:, 0]
    ids[1, 4] = ids[1, 0]
    leaf = z.double().requires_grad_()
    p, q = torch.softmax(leaf, -1).gather(1, ids), logq.double().exp()
    rest = 1 - q.sum(1)
    p_rest = 1 - p.sum(1)
    assert p_rest.detach().min() > 0.05
    expected = (q * (q / p).log()).sum(1) + rest * (rest / p_rest).log()
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    value, got, _ = run(z, ids, logq)
    torch.testing.assert_close(value.double(), expected.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(got.double(), gradient, rtol=2e-6, atol=2e-6)
