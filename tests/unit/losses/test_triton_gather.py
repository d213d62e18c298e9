"""The gather primitive and the sampled losses on the Triton layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import parallel_gather_logprobs, parallel_policy_gradient, parallel_sampled_kl
from tests.parity.losses.triton_layer import DEVICE

VOCAB = 37


def test_gather_against_autograd() -> None:
    """Repeated ids, an id outside the vocabulary, temperature, a masked row, both outputs used."""
    z = torch.randn(3, 2, VOCAB, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, VOCAB - 1, (3, 2, 4), generator=torch.Generator().manual_seed(1))
    ids[..., 3] = ids[..., 0]
    ids[1, 1] = ids[1, 1, 0]
    ids[0, 0, 1] = VOCAB - 1
    mask = torch.ones(3, 2)
    mask[2, 1] = 0
    upstream = torch.linspace(-1, 2, 24).view(3, 2, 4)
    leaf = z.double().clone().requires_grad_()
    scaled = leaf[..., : VOCAB - 1] / 0.6
    used = (ids < VOCAB - 1) & (mask > 0).unsqueeze(-1)
    log_p = torch.log_softmax(scaled, -1).gather(-1, ids.clamp_max(VOCAB - 2))
    total = (log_p * upstream * used).sum() + (2 * scaled.logsumexp(-1) * mask).sum()
    (expected,) = torch.autograd.grad(total, leaf)

    own = z.to(DEVICE).requires_grad_()
    got, lse = parallel_gather_logprobs(
        own,
        ids.to(DEVICE),
        temperature=0.6,
        loss_weight=mask.to(DEVICE),
        true_vocab_size=VOCAB - 1,
        backend="triton",
        check_values=False,
    )
    finite = torch.where(used.to(DEVICE), got, 0)
    ((finite * upstream.to(DEVICE)).sum() + (2 * lse).sum()).backward()
    assert own.grad is not None and lse.shape == (3, 2)
    torch.testing.assert_close(own.grad.cpu().double(), expected, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(finite.cpu().double(), torch.where(used, log_p, 0), rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(lse.detach().cpu().double(), scaled.logsumexp(-1) * mask, rtol=3e-6, atol=3e-6)
    assert float(got[0, 0, 1].detach()) == -torch.inf
    assert torch.count_nonzero(got[2, 1]) == 0 and torch.count_nonzero(own.grad[2, 1]) == 0


@pytest.mark.parametrize("used", ["logprobs", "lse"])
def test_either_output_alone(used: str) -> None:
    z = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[1, 5], [36, 0], [7, 8]])
    own, leaf = z.to(DEVICE).requires_grad_(), z.double().requires_grad_()
    outputs = parallel_gather_logprobs(own, ids.to(DEVICE), backend="triton")
    both = (torch.log_softmax(leaf, -1).gather(1, ids), leaf.logsumexp(-1))
    pick = 0 if used == "logprobs" else 1
    (gradient,) = torch.autograd.grad(outputs[pick].square().sum(), own)
    (expected,) = torch.autograd.grad(both[pick].square().sum(), leaf)
    torch.testing.assert_close(gradient.cpu().double(), expected, rtol=3e-6, atol=3e-6)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "k2": lambda *a, **o: parallel_sampled_kl(*a, "k2", **o),
    "k3": lambda *a, **o: parallel_sampled_kl(*a, "k3", **o),
    "k3_reverse": lambda *a, **o: parallel_sampled_kl(*a, "k3_reverse", **o),
    "policy_gradient": parallel_policy_gradient,
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_sampled_losses_equal_the_chunked_layer(function: str) -> None:
    """Padding rows hold NaN, an id below 0 and an infinite log-prob; int32 targets."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, VOCAB, generator=generator)
    target = torch.randint(0, VOCAB, (4,), generator=generator)
    teacher = -torch.rand(4, generator=generator)
    weight = torch.tensor([1.0, 0, 0.5, 2])
    z[1], target[1], teacher[1] = torch.nan, -1, -torch.inf

    def step(dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        leaf = z.to(DEVICE, dtype).requires_grad_()
        arguments = [x.to(DEVICE) for x in (target.int(), teacher)]
        options = {"loss_weight": weight.to(DEVICE), "temperature": 0.8, "backend": backend, "check_values": True}
        loss, metrics = FUNCTIONS[function](leaf, *arguments, **options)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        return loss.detach().double(), gradient.double(), {k: v.double() for k, v in metrics.items()}

    expected, actual = step(torch.float64, "chunked"), step(torch.float32, "triton")
    torch.testing.assert_close(actual, expected, rtol=5e-6, atol=5e-6)
    assert torch.count_nonzero(actual[1][1]) == 0 and torch.count_nonzero(actual[1][0]) > VOCAB // 2


@pytest.mark.parametrize(("estimator", "forward"), [("k2", False), ("k3", True), ("k3_reverse", False)])
def test_expected_gradient_by_enumeration(estimator: str, forward: bool) -> None:
    """sum_y p(y) grad(y) is the gradient of reverse KL, and for k3 of forward KL."""
    vocab = 11
    z, q = torch.randn(2, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1.5
    log_q = torch.log_softmax(q, -1)
    whole = z.clone().requires_grad_()
    log_p = torch.log_softmax(whole, -1)
    kl = (log_q.exp() * (log_q - log_p)).sum() if forward else (log_p.exp() * (log_p - log_q)).sum()
    (expected,) = torch.autograd.grad(kl, whole)
    leaf = z.float().expand(vocab, vocab).to(DEVICE).requires_grad_()
    target = torch.arange(vocab).to(DEVICE)
    loss, _ = parallel_sampled_kl(leaf, target, log_q.float().to(DEVICE), estimator, backend="triton")
    (gradient,) = torch.autograd.grad((loss * torch.softmax(z, -1).float().to(DEVICE)).sum(), leaf)
    torch.testing.assert_close(gradient.sum(0).cpu().double(), expected, rtol=1e-5, atol=2e-6)
