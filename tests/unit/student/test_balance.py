"""Balancing losses in one process: padding weighs nothing. Layouts are the matter of ``tests/parity/student``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from mopd.config.student import MoeConfig, StudentConfig
from mopd.student import cpu_shim
from mopd.student.model.balance import Balance
from mopd.student.model.gpt import StudentModel, build_model
from mopd.student.parallel import Layout
from tests.unit.student.test_model_config import DIMS, EXPERTS

LENGTH, NUM = 6, 3
RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "block": {
        "megatron_overrides": {
            "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2
        }
    },
    "moe": {"megatron_overrides": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def forgotten_scale() -> Iterator[None]:
    """Without a schedule Megatron sets a scale of another shape than with one, in a variable of the class."""
    yield
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def gradients(layout: Layout, mask: Tensor | None, **keys: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients of the routers by name after one micro-batch whose loss is the balancing losses alone, and the
    metrics."""
    moe = MoeConfig(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.02)
    student = StudentConfig(model="unused", dtype="float32", moe=moe, **keys)
    dims = replace(DIMS, moe=EXPERTS)
    with cpu_shim.activate():
        model: StudentModel = build_model(student, dims, layout)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.train()
        balance = Balance([model], moe, EXPERTS, layout)
        balance.begin(1)
        tokens = torch.randint(1, DIMS.vocab_size, (NUM, LENGTH), generator=torch.Generator().manual_seed(1))
        options: dict[str, Any] = {} if mask is None else {"padding_mask": mask}
        positions = torch.arange(LENGTH).expand(NUM, LENGTH)
        logits = model(tokens, positions, **options)
        (logits * 0.0).sum().backward()
        named = {name: p.grad for name, p in model.named_parameters() if "router" in name and p.grad is not None}
        return named, balance.metrics()


@pytest.mark.parametrize("recompute", ["full", "block", "moe"])
def test_padding_changes_the_losses_alike_however_layers_are_recomputed(layout: Layout, recompute: str) -> None:
    padding = torch.arange(LENGTH).expand(NUM, LENGTH) >= torch.tensor([[6], [4], [2]])
    plain, _ = gradients(layout, None)
    expected, with_padding = gradients(layout, padding)
    other, metrics = gradients(layout, padding, **RECOMPUTE[recompute])
    assert metrics == pytest.approx(with_padding, rel=1e-6)
    for name, grad in expected.items():
        torch.testing.assert_close(other[name], grad, rtol=1e-5, atol=1e-8)
        assert not torch.allclose(grad, plain[name], rtol=1e-3)
