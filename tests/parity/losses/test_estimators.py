"""Sampled estimators and the policy gradient, by enumeration of the whole vocabulary.

Invariant: summing p(y) * (gradient at sampled token y) over all y, which is the expectation on-policy without sampling
noise, gives the gradient of reverse KL for k2, k3_reverse and the policy gradient, and that of forward KL for k3. A
baseline from other responses keeps it, one that sees the response's own later tokens does not. The refusals rest on the
same sums: k1's expected gradient is 0, and k3 as an advantage gives grad reverse - grad forward.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mopd.losses.sampled import domain_baselines
from tests.parity.losses.on_device import parallel_policy_gradient, parallel_sampled_kl

VOCAB = 23


@pytest.fixture
def student() -> Tensor:
    return torch.randn(VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1.5


@pytest.fixture
def log_q() -> Tensor:
    return torch.log_softmax(
        torch.randn(VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1.5, -1
    )


def full_kls(z: Tensor, log_q: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Values and gradients of both full-vocabulary divergences."""
    leaf = z.clone().requires_grad_()
    log_p = torch.log_softmax(leaf, -1)
    reverse, forward = (log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
    return {
        "reverse": (reverse.detach(), torch.autograd.grad(reverse, leaf, retain_graph=True)[0]),
        "forward": (forward.detach(), torch.autograd.grad(forward, leaf)[0]),
    }


def every_token(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One row per token: leaf [V, V], targets [V], probability of each [V]."""
    return z.expand(VOCAB, VOCAB).clone().requires_grad_(), torch.arange(VOCAB), torch.softmax(z, -1)


@pytest.mark.parametrize(
    ("estimator", "gradient_of"), [("k2", "reverse"), ("k3", "forward"), ("k3_reverse", "reverse")]
)
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_expected_gradient(student: Tensor, log_q: Tensor, estimator: str, gradient_of: str, backend: str) -> None:
    leaf, target, p = every_token(student)
    loss, _ = parallel_sampled_kl(leaf, target, log_q, estimator, backend=backend)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad((loss * p).sum(), leaf)
    torch.testing.assert_close(gradient.sum(0), full_kls(student, log_q)[gradient_of][1])


@pytest.mark.parametrize("estimator", ["k3", "k3_reverse"])
def test_value_of_k3_is_the_reverse_kl(student: Tensor, log_q: Tensor, estimator: str) -> None:
    leaf, target, p = every_token(student)
    loss, metrics = parallel_sampled_kl(leaf, target, log_q, estimator)
    reverse = full_kls(student, log_q)["reverse"][0]
    torch.testing.assert_close((loss.detach() * p).sum(), reverse)
    torch.testing.assert_close((metrics["k1"] * p).sum(), reverse)
    assert float(loss.detach().min()) >= 0


def test_k1_teaches_nothing(student: Tensor, log_q: Tensor) -> None:
    leaf, target, p = every_token(student)
    _, metrics = parallel_sampled_kl(leaf, target, log_q, "k2")
    log_p = torch.log_softmax(leaf, -1).diagonal()
    torch.testing.assert_close(metrics["k1"], (log_p - log_q).detach())
    (gradient,) = torch.autograd.grad(((log_p - log_q) * p).sum(), leaf)
    assert float(gradient.sum(0).abs().max()) < 1e-15
    with pytest.raises(ValueError, match="would not learn"):
        parallel_sampled_kl(leaf, target, log_q, "k1")


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_policy_gradient_is_the_reverse_kl(student: Tensor, log_q: Tensor, temperature: float) -> None:
    z = student * temperature
    leaf, target, p = every_token(z)
    p = torch.softmax(z / temperature, -1)
    loss, metrics = parallel_policy_gradient(leaf, target, log_q, temperature=temperature)
    (gradient,) = torch.autograd.grad((loss * p).sum(), leaf)
    torch.testing.assert_close(gradient.sum(0) * temperature, full_kls(student, log_q)["reverse"][1])
    assert torch.equal(metrics["ratio"], torch.ones(VOCAB, dtype=torch.float64))


def test_policy_gradient_has_the_gradient_of_k2_token_by_token(student: Tensor, log_q: Tensor) -> None:
    gradients = []
    for call in (parallel_policy_gradient, lambda *a: parallel_sampled_kl(*a, "k2")):
        leaf, target, _ = every_token(student)
        gradients.append(torch.autograd.grad(call(leaf, target, log_q)[0].sum(), leaf)[0])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize(("num_teachers", "most"), [(1, 0.8), (2, 0.8), (1, 0.5)])
def test_a_baseline_keeps_the_expected_gradient_and_takes_variance_away(
    student: Tensor, log_q: Tensor, num_teachers: int, most: float
) -> None:
    """Also with a baseline from half of the vocabulary. That of a whole one leaves an advantage of mean 0. At most half
    of the variance is left where a run begins: the student knows nothing yet, and its teacher is sure."""
    if most == 0.5:
        student, log_q = 0.1 * student, torch.log_softmax(log_q + 8 * (torch.arange(VOCAB) == 5), -1)
    teachers = torch.stack([log_q, torch.log_softmax(-log_q, -1)][:num_teachers])
    weights = torch.tensor([0.75, 0.25][:num_teachers], dtype=torch.float64) if num_teachers > 1 else torch.ones(1)
    mean_q, p = (weights.double()[:, None] * teachers).sum(0), torch.softmax(student, -1)

    def of(options: dict[str, Tensor]) -> tuple[Tensor, float, Tensor]:
        leaf, target, _ = every_token(student)
        loss, metrics = parallel_policy_gradient(leaf, target, mean_q, **options)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        mean = (p[:, None] * gradient).sum(0)
        return mean, float((p[:, None] * (gradient - mean).square()).sum()), metrics["advantage"]

    def topk(k: int) -> dict[str, Tensor]:
        best = teachers.topk(k, -1)
        given = {"topk_ids": best.indices, "topk_logprobs": best.values, "topk_weights": weights}
        return {name: value.expand(VOCAB, *value.shape) for name, value in given.items()}

    plain, half, whole = of({}), of(topk(VOCAB // 2)), of(topk(VOCAB))
    constant = of({"baseline": torch.full((VOCAB,), -1.0, dtype=torch.float64)})
    for mean, variance, _ in (half, whole, constant)[: 3 if most == 0.8 else 2]:
        torch.testing.assert_close(mean, plain[0])
        assert variance < most * plain[1]
    assert abs(float((p * whole[2]).sum())) < 1e-14
    if num_teachers == 1:
        torch.testing.assert_close(plain[0], full_kls(student, log_q)["reverse"][1])
        torch.testing.assert_close(whole[2], plain[2] + full_kls(student, log_q)["reverse"][0])


WORDS, RESPONSES = 4, 2


@pytest.mark.parametrize(("seed", "left"), [(0, (0.527, 0.825, 0.573)), (3, (0.647, 1.147, 0.702))])
def test_a_mean_of_the_others_keeps_the_expected_gradient_and_the_own_one_does_not(
    seed: int, left: tuple[float, float, float]
) -> None:
    """Two responses of two words each, the second word's distribution by the first: all 256 pairs with their
    probability. The student knows nothing yet, and its teacher is sure. ``left``: shares of the plain gradient's
    variance that are left with the KL, the mean of the one other response, and the mean of ever so many."""
    generator = torch.Generator().manual_seed(seed)
    z = 0.3 * torch.randn(1 + WORDS, WORDS, dtype=torch.float64, generator=generator)  # the first row begins
    log_q = torch.log_softmax(4 * torch.randn(1 + WORDS, WORDS, dtype=torch.float64, generator=generator), -1)
    log_p = torch.log_softmax(z, -1)
    words = torch.cartesian_prod(*[torch.arange(WORDS)] * 2 * RESPONSES).view(-1, RESPONSES, 2)
    state = torch.stack([torch.zeros_like(words[..., 0]), 1 + words[..., 0]], -1)  # row of z that draws each word
    probability = log_p[state, words].sum((1, 2)).exp()
    advantage = (log_q - log_p)[state, words]

    def of(**options: Tensor) -> tuple[Tensor, float]:
        leaf = z[state].flatten(0, 2).clone().requires_grad_()
        options = {name: value.flatten(0, 2) for name, value in options.items()}
        loss, _ = parallel_policy_gradient(leaf, words.flatten(), log_q[state, words].flatten(), **options)
        (rows,) = torch.autograd.grad(loss.sum(), leaf)
        own = z.new_zeros(len(words), *z.shape)
        pairs = torch.arange(len(words)).repeat_interleave(RESPONSES * 2)
        own.index_put_((pairs, state.flatten()), rows, accumulate=True)
        mean = (probability[:, None, None] * own).sum(0)
        return mean, float((probability * (own - mean).square().sum((1, 2))).sum())

    of_others = [domain_baselines(["d"] * RESPONSES, sums, [2] * RESPONSES) for sums in advantage.sum(-1).tolist()]
    others = torch.tensor(of_others, dtype=torch.float64)[..., None].expand(-1, -1, 2)
    every = torch.arange(WORDS).expand(*state.shape, WORDS)
    of_many = (probability * advantage.mean((1, 2))).sum().expand_as(advantage)
    plain = of()
    found = (of(topk_ids=every, topk_logprobs=log_q[state]), of(baseline=others), of(baseline=of_many))
    for (mean, variance), share in zip(found, left, strict=True):
        torch.testing.assert_close(mean, plain[0])
        assert variance / plain[1] == pytest.approx(share, abs=0.001)
    biased, _ = of(baseline=advantage.mean((1, 2), keepdim=True).expand_as(advantage))
    assert float((biased - plain[0]).norm() / plain[0].norm()) > 0.1


def test_off_policy_samples_with_importance_weights(student: Tensor, log_q: Tensor) -> None:
    """Sampled by another policy and corrected by untruncated weights, the expectation is unchanged."""
    rollout = torch.log_softmax(student + 0.3 * torch.sin(torch.arange(VOCAB)), -1)
    leaf, target, _ = every_token(student)
    loss, _ = parallel_policy_gradient(leaf, target, log_q, rollout_logprobs=rollout, correction=("tis", 0.0, 1e9))
    (gradient,) = torch.autograd.grad((loss * rollout.exp()).sum(), leaf)
    torch.testing.assert_close(gradient.sum(0), full_kls(student, log_q)["reverse"][1])
    leaf, target, _ = every_token(student)
    loss, _ = parallel_policy_gradient(
        leaf, target, log_q, old_logprobs=rollout, clip_ratio_low=0.99, clip_ratio_high=100.0
    )
    (gradient,) = torch.autograd.grad((loss * rollout.exp()).sum(), leaf)
    torch.testing.assert_close(gradient.sum(0), full_kls(student, log_q)["reverse"][1])


@pytest.mark.parametrize(
    ("estimator", "gradient_of"), [("k2", "reverse"), ("k3", "forward"), ("k3_reverse", "reverse")]
)
def test_estimators_off_policy_with_importance_weights(
    student: Tensor, log_q: Tensor, estimator: str, gradient_of: str
) -> None:
    """The same for the estimators; without the weights another gradient is expected."""
    rollout = torch.log_softmax(student + 0.3 * torch.sin(torch.arange(VOCAB)), -1)
    expected = full_kls(student, log_q)[gradient_of][1]
    for correction in (("tis", 0.0, 1e9), None):
        leaf, target, _ = every_token(student)
        loss, _ = parallel_sampled_kl(leaf, target, log_q, estimator, rollout_logprobs=rollout, correction=correction)
        (gradient,) = torch.autograd.grad((loss * rollout.exp()).sum(), leaf)
        error = float((gradient.sum(0) - expected).abs().max())
        assert error < 1e-12 if correction else error > 1e-3, (correction, error)


@pytest.mark.parametrize("gap", [79.0, 80.0, 81.0, 100.0, 3000.0])
@pytest.mark.parametrize("estimator", ["k3", "k3_reverse"])
def test_k3_beyond_its_exponent(estimator: str, gap: float) -> None:
    """Delta below -80: value and gradient go on where the exponential would overflow, and never turn round."""
    leaf = torch.zeros(1, 3, requires_grad=True)
    own = float(torch.tensor(1 / 3).log())
    loss, _ = parallel_sampled_kl(leaf, torch.tensor([1]), torch.tensor([own + gap]), estimator)
    loss.sum().backward()
    e80 = math.exp(80)
    value = math.expm1(gap) - gap if gap <= 80 else e80 - 81 + (e80 - 1) * (gap - 80)
    slope = -gap if estimator == "k3_reverse" else 1 - math.exp(min(gap, 80))
    assert leaf.grad is not None
    assert float(loss.detach()) == pytest.approx(value, rel=1e-4)
    assert float(leaf.grad[0, 1]) == pytest.approx(slope * 2 / 3, rel=1e-4)


def test_off_policy_extremes_stay_finite() -> None:
    """Delta of -300 overflows exp; the capped loss must not turn into NaN."""
    leaf = torch.tensor([[0.0, -300.0, 0.0]], requires_grad=True)
    target, teacher = torch.tensor([1]), torch.tensor([-0.1])
    loss, metrics = parallel_sampled_kl(leaf, target, teacher, "k3", loss_max_clamp=10.0)
    loss.sum().backward()
    assert leaf.grad is not None
    assert float(loss.detach()) == 10 and float(metrics["clamped"]) == 1 and torch.count_nonzero(leaf.grad) == 0
