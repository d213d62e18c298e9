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


TOPK = {
    "topk_ids": torch.tensor([[[3, 1], [1, 2]], [[-7, 1], [1, 1]], [[0, 5], [5, 9]], [[2, 4], [4, 2]]]).to(DEVICE),
    "topk_logprobs": torch.tensor([0.5, 0.25]).log().expand(4, 2, 2).to(DEVICE),
    "topk_weights": torch.tensor([0.75, 0.25]).expand(4, 2).to(DEVICE),
}
"""Two teachers' lists of two ids, also the same and the sampled one's; those of a row without weight are wrong."""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "k2": lambda *a, **o: parallel_sampled_kl(*a, "k2", **o),
    "k3": lambda *a, **o: parallel_sampled_kl(*a, "k3", **o),
    "k3_reverse": lambda *a, **o: parallel_sampled_kl(*a, "k3_reverse", **o),
    "policy_gradient": parallel_policy_gradient,
    "policy_gradient kl": lambda *a, **o: parallel_policy_gradient(*a, **TOPK, **o),
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
