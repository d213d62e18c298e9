"""Clamps, caps and floors: where they bite, what they leave of the gradient, and that they are counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.losses.on_device import parallel_topk_distill

LOSSES = ("forward_kl", "reverse_kl", "jsd")
TAILS = ("bucket", "generalized", "renormalize", "none")


def from_probabilities(p: list[float], q: list[float], **options: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One row with student probabilities ``p``; the teacher lists ``q`` on the first ids. Loss, dz, metrics."""
    z = torch.tensor([p], dtype=torch.float64).log().requires_grad_()
    ids = torch.arange(len(q)).unsqueeze(0)
    loss, metrics = parallel_topk_distill(z, ids, torch.tensor([q], dtype=torch.float64).log(), **options)
    loss.sum().backward()
    assert z.grad is not None
    return loss.detach()[0], z.grad[0], metrics


P, Q = [0.5, 0.01, 0.2, 0.29], [0.3, 0.4, 0.02]


def test_logprob_clamp_as_verl_does_it() -> None:
    """Floor e^-3 (0.0498): raises the student's second and the teacher's third entry; worked out by hand."""
    loss, gradient, metrics = from_probabilities(P, Q, tail="none", logprob_min_clamp=-3.0)
    floor = math.exp(-3)
    q = [0.3, 0.4, floor]
    p = [0.5, floor, 0.2]
    assert float(loss) == pytest.approx(sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)))
    g = [-0.3, 0.0, -floor]  # the held entry has no gradient of its own
    expected = [g[j] - sum(g) * P[j] for j in range(3)] + [-sum(g) * P[3]]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64))
    assert float(metrics["clamped"]) == 1
    assert float(metrics["clamped_entries"]) == pytest.approx(1 / 3)
    assert float(metrics["teacher_mass"]) == pytest.approx(0.72)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "options",
    [
        {"logprob_min_clamp": -3.0},
        {"loss_soft_cap": 0.05},
        {"loss_max_clamp": 0.05},
        {"entry_max_clamp": 0.05, "logprob_min_clamp": -3.0},
    ],
)
def test_both_layers_agree(loss: str, tail: str, options: dict[str, float]) -> None:
    """The reference differentiates torch.clamp by autograd."""
    results = [from_probabilities(P, Q, loss=loss, tail=tail, backend=b, **options) for b in ("chunked", "reference")]
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    for name, value in results[0][2].items():
        torch.testing.assert_close(value, results[1][2][name], msg=name)


@pytest.mark.parametrize("loss", LOSSES)
def test_clamp_that_holds_nothing_changes_nothing(loss: str) -> None:
    plain, clamped = (from_probabilities(P, Q, loss=loss, logprob_min_clamp=c) for c in (None, -20.0))
    torch.testing.assert_close(clamped[0], plain[0])
    torch.testing.assert_close(clamped[1], plain[1])
    assert float(clamped[2]["clamped"]) == 0


def test_an_entry_is_held_by_itself() -> None:
    """Of 0.3 log(0.3 / 0.5), 0.4 log(0.4 / 0.01) and 0.02 log(0.02 / 0.2) the second is above 0.05."""
    loss, gradient, metrics = from_probabilities(P, Q, tail="none", entry_max_clamp=0.05)
    assert float(loss) == pytest.approx(0.3 * math.log(0.6) + 0.05 + 0.02 * math.log(0.1))
    g = [-0.3, 0.0, -0.02]
    expected = [g[j] - sum(g) * P[j] for j in range(3)] + [-sum(g) * P[3]]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64))
    assert float(metrics["clamped"]) == 1 and float(metrics["clamped_entries"]) == pytest.approx(1 / 3)


def test_hard_clamp_stops_the_gradient() -> None:
    loss, gradient, metrics = from_probabilities(P, Q, loss_max_clamp=0.1)
    assert float(loss) == pytest.approx(0.1) and torch.count_nonzero(gradient) == 0
    assert float(metrics["clamped"]) == 1
    assert float(from_probabilities(P, Q, loss_max_clamp=1e3)[2]["clamped"]) == 0


def test_soft_cap_keeps_it() -> None:
    x, plain, _ = from_probabilities(P, Q)
    c = float(x) / 4
    loss, gradient, metrics = from_probabilities(P, Q, loss_soft_cap=c)
    assert float(loss) == pytest.approx(c * (1 + math.log(4)))
    torch.testing.assert_close(gradient, plain / 4)
    assert float(metrics["clamped"]) == 1
    above = from_probabilities(P, Q, loss_soft_cap=float(x) * 1.01)
    torch.testing.assert_close(above[0], x)
    torch.testing.assert_close(above[1], plain)
    assert float(above[2]["clamped"]) == 0


def test_soft_cap_of_an_infinite_loss_has_no_gradient_left() -> None:
    z = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    loss, _ = parallel_topk_distill(z, torch.tensor([[2]]), torch.tensor([[-0.5]]), loss_soft_cap=5.0)
    loss.sum().backward()
    assert z.grad is not None and torch.count_nonzero(z.grad) == 0


def sure_student(tail: float) -> tuple[Tensor, Tensor]:
    z = torch.tensor([[1 - tail, tail / 2, tail / 2]], dtype=torch.float64).log()
    return z, torch.tensor([[0]])


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_bucket_below_its_floor_keeps_the_gradient(backend: str) -> None:
    """Student tail 1e-9, teacher tail 0.1: value on the tangent of the logarithm, gradient p - q, row counted."""
    z, ids = sure_student(1e-9)
    z.requires_grad_()
    loss, metrics = parallel_topk_distill(z, ids, torch.tensor([[0.9]]).log().double(), backend=backend)  # type: ignore[arg-type]
    loss.sum().backward()
    assert z.grad is not None
    tangent = math.log(1e-6) + (1e-9 - 1e-6) / 1e-6
    expected = 0.9 * math.log(0.9 / (1 - 1e-9)) + 0.1 * (math.log(0.1) - tangent)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(z.grad[0], torch.tensor([0.1, -0.05, -0.05], dtype=torch.float64), rtol=1e-6, atol=1e-8)
    assert float(metrics["tail_floored"]) == 1


def test_value_of_the_bucket_is_continuous_at_the_floor() -> None:
    values = []
    for tail in (0.999999e-6, 1.000001e-6):
        z, ids = sure_student(tail)
        values.append(float(parallel_topk_distill(z, ids, torch.tensor([[0.5]]).log().double())[0]))
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_reverse_bucket_holds_the_teachers_tail() -> None:
    """The teacher's list holds all of its mass (a little more, by rounding): finite, and counted."""
    z = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log().requires_grad_()
    logq = torch.tensor([[0.7, 0.3]], dtype=torch.float64).log() + 5e-5
    loss, metrics = parallel_topk_distill(
        z, torch.tensor([[0, 1]]), logq, loss="reverse_kl", tail="bucket", check_values=True
    )
    on_ids = 0.6 * (math.log(0.6 / 0.7) - 5e-5) - 0.3 * 5e-5
    assert float(loss.detach()) == pytest.approx(on_ids + 0.1 * math.log(0.1 / 1e-6))
    assert float(metrics["tail_floored"]) == 1


def test_teacher_mass_just_above_one_is_rounding() -> None:
    z, ids = sure_student(0.2)
    loss, metrics = parallel_topk_distill(z, ids, torch.tensor([[5e-5]]), check_values=True)
    assert float(metrics["teacher_mass"]) == pytest.approx(1 + 5e-5)
    assert float(loss) == pytest.approx(math.exp(5e-5) * (5e-5 - math.log(0.8)))
