"""The baselines compute the losses that they are labelled with, and so do the float64 definitions that judge them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from mopd.bench.losses import contenders as styles
from mopd.bench.losses.cases import Case
from mopd.bench.losses.inputs import make_head_inputs
from tests.parity.losses.definitions import rows_and_gradient, teacher_topk

ROWS, VOCAB, K = 7, 41, 5
TAILS = {"bucket": "bucket", "truncated": "none", "renormalized": "renormalize", "renormalized teacher": "none"}
STYLES: list[tuple[Callable[..., Tensor], str]] = [
    (styles.eager, "bucket"),
    (styles.ghost_token, "bucket"),
    (styles.verl, "truncated"),
    (styles.nemo_rl, "renormalized teacher"),
    (styles.eager_renormalized, "renormalized"),
]


class Problem:
    """Logits, ids, log-probs and upstream of a few rows, and what a loss and its gradient are by definition."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.logits = torch.randn(ROWS, VOCAB, generator=generator).mul_(2)
        self.ids, self.logprobs = teacher_topk(torch.randn(ROWS, VOCAB, generator=generator).mul_(2), K)
        self.upstream = torch.rand(ROWS, generator=generator) + 0.5

    def expected(self, loss: str) -> tuple[Tensor, Tensor]:
        logprobs = self.logprobs.double().log_softmax(1) if loss == "renormalized teacher" else self.logprobs
        rows, gradient = rows_and_gradient(
            self.logits, self.ids, logprobs, self.upstream, loss="forward_kl", tail=TAILS[loss]
        )
        if loss == "truncated":
            gradient[rows < 0] = 0
            rows = rows.clamp_min(0)
        return rows, gradient

    def error(self, loss: str, gradient: Tensor) -> float:
        exact = partial(styles.exact_rows, loss, ids=self.ids, log_q=self.logprobs)
        return styles.error(exact, gradient, self.logits, self.upstream)


@pytest.fixture
def problem() -> Problem:
    return Problem()


@pytest.mark.parametrize(("style", "loss"), STYLES, ids=lambda x: getattr(x, "__name__", x))
def test_styles_by_definition(
    problem: Problem, style: Callable[..., Tensor], loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(styles, "CHUNK_ROWS", 3)  # several chunks, the last one shorter
    rows, gradient = problem.expected(loss)
    leaf = problem.logits.clone().requires_grad_()
    got = style(leaf, problem.ids, problem.logprobs)
    (got_gradient,) = torch.autograd.grad(got, leaf, problem.upstream)
    torch.testing.assert_close(got.double(), rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_gradient.double(), gradient, rtol=1e-5, atol=1e-6)
    assert torch.equal(leaf, problem.logits)


@pytest.mark.parametrize("loss", TAILS)
def test_errors_are_relative_to_the_definition(problem: Problem, loss: str) -> None:
    given = (problem.logits, problem.ids, problem.logprobs)
    rows, gradient = problem.expected(loss)
    torch.testing.assert_close(styles.exact_rows(loss, *given), rows, rtol=1e-9, atol=1e-12)
    assert problem.error(loss, gradient) < 1e-12
    gradient[2, problem.ids[2, 0]] += 0.125 * float(gradient.norm())
    assert problem.error(loss, gradient) == pytest.approx(0.125, rel=0.1)
    gradient[0, 0] = torch.nan
    assert math.isnan(problem.error(loss, gradient))


def test_clamped_entries_pull_no_longer() -> None:
    """Where the student's log-prob is below -10 its entry neither adds to the row's q mass nor to its own gradient."""
    logits = torch.tensor([[30.0, 0.0, 5.0, 1.0]], requires_grad=True)
    ids = torch.tensor([[0, 1]])
    logprobs = torch.tensor([[0.5, 0.25]]).log()
    loss, _, _ = styles.VerlTopK.apply(logits, ids, logprobs)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    p = logits.detach().double().softmax(1)
    expected = 0.5 * p
    expected[0, 0] -= 0.5
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-7)
    known = 0.5 * (torch.tensor(0.5).log() - p[0, 0].log()) + 0.25 * (torch.tensor(0.25).log() + 10)
    torch.testing.assert_close(loss[0].double(), known.double(), rtol=1e-5, atol=1e-6)


def test_diagnostics(problem: Problem) -> None:
    _, shared, mass = styles.VerlTopK.apply(problem.logits, problem.ids, problem.logprobs)
    p = problem.logits.double().softmax(1)
    for t in range(ROWS):
        best = sorted(range(VOCAB), key=lambda j: -float(p[t, j]))[:K]
        both = set(best) & set(problem.ids[t].tolist())
        assert int(shared[t]) == len(both)
        assert float(mass[t]) == pytest.approx(sum(float(p[t, j]) for j in both), rel=1e-5)
    assert int(shared.sum()) > 0


def test_both_ways_to_the_full_kl() -> None:
    """Several pieces, and the gradient of the head in its buffer."""
    inputs = make_head_inputs(Case(rows=70, vocab=300, k=4, dtype="float32", hidden=8), torch.device("cpu"))
    ours = next(entry for entry in styles.head_contenders(inputs) if entry.name == "linear_full_distill")
    log_p, log_q = (
        (states.double() @ weight.double().T).log_softmax(1).detach()
        for states, weight in ((inputs.hidden, inputs.weight), (inputs.teacher_hidden, inputs.teacher_weight))
    )
    expected = (log_q.exp() * (log_q - log_p)).sum(1).mean()
    eager = styles.eager_full(inputs)
    (wanted,) = torch.autograd.grad(eager, inputs.hidden)
    assert not isinstance(ours.forward, str)
    fused = ours.forward()
    (got,) = torch.autograd.grad(fused, inputs.hidden)
    torch.testing.assert_close(torch.stack([eager, fused]).detach().double(), expected.expand(2), rtol=0, atol=1e-6)
    assert float((got - wanted).norm() / wanted.norm()) < 1e-4
