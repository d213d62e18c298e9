"""Top-k losses against their definitions: loss and gradient, every layer, every tail.

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
from tests.parity.losses.test_precision import float64_gradient
from tests.parity.losses.triton_layer import LOSSES, TAILS, run

LAYERS = [
    ("chunked", torch.float32, 2e-6),
    ("chunked", torch.float64, 1e-12),
    ("reference", torch.float64, 1e-12),
    ("triton", torch.float32, 2e-6),
]
VOCAB, PADDED = 101, 104
in_every_layer = pytest.mark.parametrize(("backend", "dtype", "tolerance"), LAYERS)


def in_every_form(test: Any) -> Any:
    return pytest.mark.parametrize("tail", TAILS)(pytest.mark.parametrize("loss", LOSSES)(test))


def assert_close(actual: tuple[Any, ...], expected: tuple[Tensor, Tensor], tolerance: float) -> None:
    """Loss and gradient."""
    for got, want in zip(actual[:2], expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def students_and_teachers(rows: int, teachers: int) -> tuple[Tensor, Tensor]:
    """Logits on a common base, so that teacher and student agree in part and teachers share ids."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(rows, 1, VOCAB, generator=generator) * 2
    logits = base + torch.randn(rows, teachers + 1, VOCAB, generator=generator)
    return logits[:, 0].clone(), logits[:, 1:].clone()


@pytest.mark.parametrize(
    ("loss", "tail", "backend", "dtype", "tolerance"),
    [
        (loss, tail, *layer)
        for loss in LOSSES
        for tail in TAILS
        for layer in LAYERS
        if layer[0] != "triton" or loss == "jsd"  # the interpreter: the others below
    ],
)
def test_one_teacher(loss: str, tail: str, backend: str, dtype: torch.dtype, tolerance: float) -> None:
    """Also: the gradient of a row sums to 0, and a shift of the logits changes nothing."""
    z, teacher = students_and_teachers(4, 1)
    z[2], teacher[2] = z[1] + 64, teacher[1]
    ids, logq = teacher_topk(teacher[:, 0], 7)
    upstream = torch.tensor([0.5, 2.0, 2.0, 1.0])
    options = {"loss": loss, "tail": tail, "beta": 0.3, "temperature": 1.7}
    expected = rows_and_gradient(z, ids, logq, upstream, **options)
    got = run(z.to(dtype), ids, logq, upstream, backend=backend, check_values=True, **options)
    assert_close(got, expected, tolerance)
    assert float(got[1].sum(1).abs().max()) < 2e-6
    torch.testing.assert_close(got[1][2], got[1][1], rtol=1e-5, atol=2e-6)


@in_every_layer
@in_every_form
def test_three_teachers_with_everything(
    loss: str, tail: str, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Shared ids, int32, entries of -inf, ids in the padding, padded columns, a teacher of weight 0, an odd width."""
    z, teachers = students_and_teachers(4, 3)
    ids, logq = teacher_topk(teachers, 5)
    assert all(len(set(row.flatten().tolist())) < row.numel() for row in ids)
    logq[0, 1, 4] = -torch.inf
    ids[1, 2, 3] = VOCAB + 1
    logq[2, 0, 1:] = -torch.inf
    weights = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    weights[3, 1] = 0
    upstream = torch.linspace(0.5, 2, 4)
    padded = torch.cat([z, torch.full((4, PADDED - VOCAB), 50.0)], 1).to(dtype)
    options = {"loss": loss, "tail": tail, "beta": 0.6}
    expected = rows_and_gradient(z, ids, logq, upstream, weights, **options)
    options |= {"backend": backend, "true_vocab_size": VOCAB, "check_values": True}
    got_loss, got, _ = run(padded, ids.int(), logq, upstream, teacher_weights=weights, **options)
    assert_close((got_loss, got[:, :VOCAB]), expected, tolerance)
    assert torch.count_nonzero(got[:, VOCAB:]) == 0


@in_every_layer
@in_every_form
def test_no_entry_counts_for_more_than_its_clamp(
    loss: str, tail: str, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Two teachers that share ids; rows with none, some and all of their entries held, the tail's term above it; a
    student that has no mass on an id."""
    z, teachers = students_and_teachers(5, 2)
    ids, logq = teacher_topk(teachers, 5)
    z[1] = teachers[1].mean(0)
    z[2, ids[2].flatten()] -= 12
    z[3, ids[3, 0, 0]] = -40.0
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    upstream = torch.linspace(0.5, 2, 5)
    options = {"loss": loss, "tail": tail, "beta": 0.4, "temperature": 1.3, "entry_max_clamp": 0.05}
    expected = rows_and_gradient(z, ids, logq, upstream, weights, **options)
    got = run(z.to(dtype), ids, logq, upstream, backend=backend, teacher_weights=weights, **options)
    assert_close(got, expected, tolerance)
    held = got[2]["clamped_entries"]
    assert float(held.max()) > 0 and torch.equal(got[2]["clamped"] > 0, held > 0)


CORRECTIONS = {"none": None, "tis": ("tis", 0.5, 1.2), "icepop": ("icepop", 0.5, 1.5), "gate": ("gate", 0.9, 1.5)}


ADVANTAGES = [
    ("forward_kl", "bucket", "none"),
    ("forward_kl", "bucket", "icepop"),
    ("reverse_kl", "generalized", "tis"),
    ("reverse_kl", "renormalize", "gate"),
    ("jsd", "none", "icepop"),
]
"""Loss, tail and correction."""


@pytest.mark.parametrize(
    ("loss", "tail", "correction", "teachers", "backend", "dtype", "tolerance"),
    [
        (*one, teachers, *layer)
        for number, one in enumerate(ADVANTAGES)
        for layer in LAYERS
        for teachers in ((1, 2) if layer[0] != "triton" else (1 + number % 2,))
    ],
)
def test_a_task_advantage_joins_the_divergence(
    loss: str, tail: str, correction: str, teachers: int, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Of sampled tokens that all teachers list, one, or none; a row of weight 0 whose numbers are none; rows whose tail
    fp32 cannot tell from 0; a target in the padding has no loss."""
    z, others = students_and_teachers(7, teachers)
    ids, logq = teacher_topk(others, 5)
    target = torch.stack(
        [ids[0, 0, 0], ids[1, -1, 4], z[2].argmin(), z[3].argmin(), ids[4, 0, 0], ids[5, 0, 0], ids[6, 0, 0]]
    )
    target[5] = z[5].scatter(0, ids[5].flatten(), -99.0).argmax()  # most of the tail
    assert not (ids[[2, 3, 5]] == target[[2, 3, 5], None, None]).any()
    z[5].scatter_add_(0, ids[5].flatten(), torch.full((ids[5].numel(),), 100.0 if tail == "bucket" else 5.0))
    weights = torch.linspace(0.3, 1.5, 7 * teachers).view(7, teachers)
    upstream = torch.tensor([0.5, 2.0, 1.0, 1.0, 0.0, 1.5, 1.0])
    advantage = torch.tensor([1.0, -2.0, 0.7, 3.0, torch.nan, -1.0, 1.0])
    log_p = torch.log_softmax(z.double() / 0.8, -1).gather(1, target.unsqueeze(1)).squeeze(1)
    rollout = (log_p - torch.tensor([0.0, 0.3, -0.2, 2.0, torch.nan, 0.1, 0.0])).float()
    kind, low, high = CORRECTIONS[correction] or ("none", 0, 0)
    factors = []
    for ratio in torch.exp(log_p - rollout.double()).tolist():
        inside = low <= ratio <= high
        factors.append({"none": 1.0, "tis": min(ratio, high)}.get(kind, ratio if inside else 0.0))
    pull = -torch.tensor(factors, dtype=torch.float64) * 0.5 * advantage.double()
    expected, gradient = rows_and_gradient(z, ids, logq, upstream, weights, loss=loss, tail=tail, temperature=0.8)
    one_hot = torch.nn.functional.one_hot(target, VOCAB)
    gradient += (upstream * pull)[:, None] * (one_hot - torch.softmax(z.double() / 0.8, -1)) / 0.8
    expected, gradient[4] = upstream * (expected + pull), 0
    expected[4] = 0
    options = {"loss": loss, "tail": tail, "temperature": 0.8, "backend": backend, "true_vocab_size": VOCAB}
    options |= {"teacher_weights": weights, "task_advantage": advantage, "task_reward_weight": 0.5}
    options |= {"rollout_logprobs": rollout, "correction": CORRECTIONS[correction], "loss_weight": upstream}
    padded = torch.cat([z, torch.full((7, PADDED - VOCAB), 50.0)], 1).to(dtype)
    target[6] = VOCAB + 1
    got, found, metrics = run(padded, ids, logq, target=target, with_entropy=True, **options)
    told = [0, 1, 2, 3, 4] + [5] * (tail != "bucket")  # below its floor the bucket's value is another
    assert_close((got[told], found[:6, :VOCAB]), (expected[told], gradient[:6]), 10 * tolerance)
    assert not got[6].isfinite() and torch.count_nonzero(found[:6, VOCAB:]) == 0
    live = torch.tensor([0, 1, 2, 3, 5])
    for name, wanted in (("task_loss", pull), ("correction_weight", torch.tensor(factors, dtype=torch.float64))):
        torch.testing.assert_close(metrics[name][live].double(), wanted[live], rtol=1e-4, atol=1e-6)
    task = ("task_advantage", "task_reward_weight", "rollout_logprobs", "correction")
    plain = run(
        padded, ids, logq, target=target, with_entropy=True, **{k: options[k] for k in options if k not in task}
    )
    metrics["unweighted_loss"] = metrics["unweighted_loss"] - metrics["task_loss"]
    for name, wanted in plain[2].items():
        torch.testing.assert_close(metrics[name][live], wanted[live], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("tail", TAILS)
def test_jsd_ends_are_the_kls(tail: str, beta: float) -> None:
    z, teacher = students_and_teachers(4, 1)
    ids, logq = teacher_topk(teacher[:, 0], 5)
    one = torch.ones(4)
    expected = run(z, ids, logq, one, loss="forward_kl" if beta == 0 else "reverse_kl", tail=tail, backend="auto")
    actual = run(z, ids, logq, one, loss="jsd", tail=tail, beta=beta, backend="auto")
    assert all(torch.equal(a, b) for a, b in zip(actual[:2], expected[:2], strict=True))


@pytest.mark.parametrize(
    ("backend", "tail"), [*(("chunked", tail) for tail in TAILS), ("triton", "bucket"), ("triton", "none")]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_k_of_one(loss: str, tail: str, backend: str) -> None:
    z, teacher = students_and_teachers(2, 1)
    ids, logq = teacher_topk(teacher[:, 0], 1)
    upstream = torch.linspace(1, 2, 2)
    expected = rows_and_gradient(z, ids, logq, upstream, loss=loss, tail=tail)
    assert_close(run(z, ids, logq, upstream, loss=loss, tail=tail, backend=backend), expected, 2e-6)


@pytest.mark.parametrize(("backend", "tail"), [*(("chunked", tail) for tail in TAILS), ("triton", "renormalize")])
@pytest.mark.parametrize("loss", LOSSES)
def test_k_of_v_is_the_full_divergence(loss: str, tail: str, backend: str) -> None:
    """With every id listed there is no tail. More ids than the kernel sorts by comparing all pairs."""
    z, teacher = students_and_teachers(2, 1)
    ids, logq = teacher_topk(teacher[:, 0], VOCAB)
    p, q = torch.log_softmax(z.double(), -1), torch.log_softmax(teacher[:, 0].double(), -1)
    m = torch.log((p.exp() + q.exp()) / 2)
    full = {
        "forward_kl": (q.exp() * (q - p)).sum(-1),
        "reverse_kl": (p.exp() * (p - q)).sum(-1),
        "jsd": ((q.exp() * (q - m)).sum(-1) + (p.exp() * (p - m)).sum(-1)) / 2,
    }[loss]
    value, gradient, _ = run(z, ids, logq, loss=loss, tail=tail, backend=backend)
    torch.testing.assert_close(value.double(), full, rtol=1e-5, atol=1e-6)
    if tail == "renormalize":
        expected = float64_gradient(z, ids, logq, loss, tail)
        torch.testing.assert_close(gradient.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_repeated_id_of_one_teacher_counts_twice(backend: str) -> None:
    """Not a valid top-k, but the sums of the formulas are still what is computed."""
    z, teacher = students_and_teachers(2, 1)
    ids, logq = teacher_topk(teacher[:, 0], 5)
    ids[:, 3] = ids[:, 0]
    ids[1, 4] = ids[1, 0]
    leaf = z.double().requires_grad_()
    p, q = torch.softmax(leaf, -1).gather(1, ids), logq.double().exp()
    rest, p_rest = 1 - q.sum(1), 1 - p.sum(1)
    assert p_rest.detach().min() > 0.05
    expected = (q * (q / p).log()).sum(1) + rest * (rest / p_rest).log()
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    assert_close(run(z, ids, logq, backend=backend), (expected.detach(), gradient), 2e-6)
