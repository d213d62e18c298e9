"""fp32 and bf16 gradients against float64, where cancellation hurts most.

Invariant: with fp32 logits the gradient of every row is within 2e-6 of float64, relative to |p_S| + |q_S|, near the
optimum and far from it, down to a student tail of 1e-7; with bf16 logits it is as good as the float64 gradient rounded.
Not exercised: the loss value of the bucket form below its floor, which continues on a tangent by design.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parity.losses.triton_layer import DEVICE, LOSSES, TAILS, run

SIZES = {"chunked": (8, 5003, 64), "triton": (1, 1501, 16)}
"""Rows, vocabulary and ids of each layer: small for the interpreter."""
in_both_layers = pytest.mark.parametrize("backend", SIZES)


def divergence(a: Tensor, b: Tensor, generalized: bool) -> Tensor:
    safe_a, safe_b = a.clamp_min(1e-300), b.clamp_min(1e-300)
    total = (a * (safe_a / safe_b).log()).sum(-1)
    return total + (b - a).sum(-1) if generalized else total


def float64_gradient(z: Tensor, ids: Tensor, logq: Tensor, loss: str, tail: str) -> Tensor:
    """Autograd over probability vectors, all rows at once (definitions.py goes row by row)."""
    leaf = z.double().requires_grad_()
    everything = torch.softmax(leaf, -1)
    p, q = everything.gather(1, ids), logq.double().exp()
    if tail == "bucket":
        outside = torch.ones_like(everything).scatter(1, ids, 0)
        p = torch.cat([p, (everything * outside).sum(1, keepdim=True)], 1)
        q = torch.cat([q, 1 - q.sum(1, keepdim=True)], 1)
    if tail == "renormalize":
        p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    m, generalized = (p + q) / 2, tail == "generalized"
    value = {
        "forward_kl": lambda: divergence(q, p, generalized),
        "reverse_kl": lambda: divergence(p, q, generalized),
        "jsd": lambda: (divergence(q, m, generalized) + divergence(p, m, generalized)) / 2,
    }[loss]()
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return gradient


def student_with_tail(tail: float, rows: int, vocab: int, k: int) -> tuple[Tensor, Tensor]:
    """fp32 logits (log-sum-exp about 20) whose mass outside ``ids`` is ``tail``."""
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(rows, vocab, dtype=torch.float64, generator=generator) * 2
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(rows)])
    inside = torch.zeros(rows, vocab, dtype=torch.bool).scatter(1, ids, True)
    mass = [z.masked_fill(~part, -torch.inf).logsumexp(1, keepdim=True) for part in (inside, ~inside)]
    z = torch.where(inside, z - mass[0] + torch.tensor(1 - tail).log(), z - mass[1] + torch.tensor(tail).log())
    return (z + 20).float(), ids


@in_both_layers
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("loss", LOSSES)
def test_fp32_gradient(loss: str, tail: str, backend: str) -> None:
    """Each student tail with a teacher near and with one far away."""
    parts = []
    for number, student_tail in enumerate((1e-1, 1e-3, 1e-5, 1e-6, 1e-7)):
        z, ids = student_with_tail(student_tail, *SIZES[backend])
        logp = torch.log_softmax(z.double(), -1).gather(1, ids)
        noise = torch.randn(logp.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        for sigma, teacher_tail in ((0.01, 1.3 * student_tail), (3.0, 0.02)):
            moved = torch.log_softmax(logp + noise * sigma, -1)
            parts.append((z, ids, (moved + torch.tensor(1 - teacher_tail, dtype=torch.float64).log()).float()))
    z, ids, logq = (torch.cat(part) for part in zip(*parts, strict=True))
    expected = float64_gradient(z, ids, logq, loss, tail)
    _, got, _ = run(z, ids, logq, loss=loss, tail=tail, backend=backend)
    p, q = torch.softmax(z.double(), -1).gather(1, ids), logq.double().exp()
    error = (got.double() - expected).norm(dim=1) / (p.norm(dim=1) + q.norm(dim=1))
    assert float(error.max()) < 2e-6, error


@in_both_layers
def test_pull_on_a_small_tail_keeps_its_digits(backend: str) -> None:
    """Both tails near 1e-5: off the ids the gradient is their difference, which 1 - P and 1 - Q in fp32 know to 1 %."""
    z, ids = student_with_tail(1e-5, *SIZES[backend])
    moved = torch.log_softmax(torch.randn(ids.shape, generator=torch.Generator().manual_seed(7)).double(), -1)
    logq = (moved + torch.tensor(1 - 1.5e-5, dtype=torch.float64).log()).float()
    outside = torch.ones_like(z).scatter(1, ids, 0)
    expected = float64_gradient(z, ids, logq, "forward_kl", "bucket") * outside
    error = (run(z, ids, logq, backend=backend)[1] * outside - expected).norm(dim=1)
    assert float((error / expected.norm(dim=1)).max()) < 1e-4


GAPS = (40.0, 66.0, 75.0, 88.0, 104.0, 300.0)
"""Logits of the ids above all others: e^-66 is under 1e-30 with V - 3 of them, e^-104 under the smallest fp32."""


def far_tails(teachers: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, ids and log-probs of one or two teachers, whose masses are near 0.6, for each gap; and their gradient."""
    generator = torch.Generator().manual_seed(8)
    z = torch.randn(len(GAPS), 29, generator=generator)
    z[:, : 3 if teachers == 1 else 2] += torch.tensor(GAPS)[:, None]
    ids = torch.tensor([[0, 1, 2], [0, 1, 4]])[:teachers].expand(len(GAPS), -1, -1).clone()
    logq = torch.tensor([0.3, 0.2, 0.1]).log() + 0.05 * torch.randn(ids.shape, generator=generator)
    expected = torch.zeros(z.shape, dtype=torch.float64)
    for d in range(teachers):  # p - q on the ids, and the tail's q shared out by the student's own ratios
        q = logq[:, d].double().exp()
        outside = torch.softmax(z.double().scatter(1, ids[:, d], -torch.inf), -1) * (1 - q.sum(1, keepdim=True))
        expected += torch.softmax(z.double(), -1) - outside.scatter(1, ids[:, d], q)
    return z, ids, logq, expected


@pytest.mark.parametrize("teachers", [1, 2])
@pytest.mark.parametrize(
    ("backend", "accelerated"), [("reference", False), ("chunked", False), ("chunked", True), ("triton", False)]
)
def test_far_tail_is_pulled_as_hard_as_a_near_one(
    monkeypatch: pytest.MonkeyPatch, backend: str, teachers: int, accelerated: bool
) -> None:
    if accelerated:  # as on a device, where no number steers the program
        monkeypatch.setattr("mopd.losses.chunked.blocks.SYNCHRONOUS_DEVICES", ())
    z, ids, logq, expected = far_tails(teachers)
    weights = torch.ones(len(GAPS), teachers)
    upstream = torch.full((len(GAPS),), 2.0**16)  # a loss scale must not overflow what is divided by the tail
    loss, got, metrics = run(z, ids, logq, upstream, teacher_weights=weights, backend=backend)
    assert bool(loss.isfinite().all()) and bool(metrics["tail_floored"].all())
    assert float((got.double() / 2**16 - expected).norm(dim=1).max()) < 2e-6


@in_both_layers
@pytest.mark.parametrize(("loss", "tail"), [("forward_kl", "bucket"), ("reverse_kl", "generalized"), ("jsd", "bucket")])
def test_bf16_gradient_is_rounded_once(loss: str, tail: str, backend: str) -> None:
    """A student 0.02 from its teacher: rounding p to bf16 first would cost 12 % here."""
    generator = torch.Generator().manual_seed(5)
    z = (torch.randn(4 if backend == "chunked" else 2, 151_936, generator=generator) * 2.5).bfloat16()
    teacher = z.double() + 0.02 * torch.randn(z.shape, dtype=torch.float64, generator=generator)
    logq, ids = torch.log_softmax(teacher, -1).topk(64, -1)
    whole = float64_gradient(z, ids, logq.float(), loss, tail)
    _, got, _ = run(z, ids, logq.float(), loss=loss, tail=tail, backend=backend)
    assert got.dtype == torch.bfloat16
    exact, ours = whole.gather(1, ids), got.gather(1, ids).double()
    if backend == "chunked" or DEVICE.type == "cuda":
        assert float((ours - exact).norm()) < 1.1 * float((exact.bfloat16().double() - exact).norm())
    else:  # cut off instead of rounded: up to one unit in the last place, which is 2^-7 of the power of two below
        ulp = 2.0 ** (exact.abs().log2().floor() - 7)
        p = torch.softmax(z.double(), -1).gather(1, ids)
        assert float(((ours - exact).abs() - 1e-6 * p - ulp).max()) <= 0
    outside = torch.ones_like(whole).scatter(1, ids, 0)
    assert float(((got.double() - whole) * outside).norm() / (whole * outside).norm()) < 2**-7


@in_both_layers
def test_loss_near_the_optimum_keeps_its_digits(backend: str) -> None:
    """A KL of about 1e-8, which a sum of q (log q - log p) in fp32 would bury in noise of 1e-7."""
    rows, k = (16, 64) if backend == "chunked" else (4, 32)
    generator = torch.Generator().manual_seed(6)
    z = torch.randn(rows, 1009, generator=generator) * 3 + 15
    teacher = torch.log_softmax(z.double() + 1e-4 * torch.randn(z.shape, generator=generator), -1)
    logq, ids = teacher.topk(k, -1)
    p, q = torch.softmax(z.double(), -1).gather(1, ids), logq.float().double().exp()
    p, q = torch.cat([p, 1 - p.sum(1, keepdim=True)], 1), torch.cat([q, 1 - q.sum(1, keepdim=True)], 1)
    exact = divergence(q, p, False)
    got, _, _ = run(z, ids, logq.float(), backend=backend)
    assert float(exact.max()) < 1e-7
    assert float((got.double() - exact).abs().max()) < 2e-10
    assert float(got.min()) >= 0
