"""Padding rows (weight 0) of the sampled losses: whatever they hold stays there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.losses.on_device import parallel_policy_gradient, parallel_sampled_kl


def step(function: str, spoiled: bool, backend: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3, 2, 11, generator=generator)
    target = torch.randint(0, 11, (3, 2), generator=generator)
    teacher, rollout = -torch.rand(2, 3, 2, generator=generator)
    weight = torch.tensor([[1.0, 0], [0.5, 2], [0, 1]])
    if spoiled:
        for row in ((0, 1), (2, 0)):
            z[row] = torch.nan if row == (0, 1) else torch.inf
            target[row], teacher[row], rollout[row] = -1, torch.nan, torch.inf
    z.requires_grad_()
    options: dict[str, Any] = {"loss_weight": weight, "backend": backend, "check_values": True}
    if function == "policy_gradient":
        options |= {"rollout_logprobs": rollout, "correction": ("tis", 0.0, 2.0)}
        loss, metrics = parallel_policy_gradient(z, target, teacher, **options)
    else:
        loss, metrics = parallel_sampled_kl(z, target, teacher, function, **options)
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    return loss.detach(), gradient, metrics


@pytest.mark.parametrize(("backend", "skips"), [("chunked", True), ("chunked", False), ("reference", True)])
@pytest.mark.parametrize("function", ["k2", "k3", "k3_reverse", "policy_gradient"])
def test_padding_reaches_nothing(monkeypatch: pytest.MonkeyPatch, function: str, backend: str, skips: bool) -> None:
    if not skips:  # as on an accelerator: rows are computed and masked
        monkeypatch.setattr("mopd.losses.chunked.blocks.SYNCHRONOUS_DEVICES", ())
    clean, spoiled = (step(function, spoiled, backend) for spoiled in (False, True))
    assert torch.equal(spoiled[0], clean[0])
    assert torch.equal(spoiled[1], clean[1])
    assert all(torch.equal(spoiled[2][name], clean[2][name]) for name in clean[2])
    assert torch.count_nonzero(clean[1][[0, 2], [1, 0]]) == 0
