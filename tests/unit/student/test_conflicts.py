"""The cosines between domains' gradients: right to a hundredth, and training does not see that they were measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.base.types import MicroBatchPlan
from mopd.data.packing import pack
from mopd.student import cpu_shim, parallel
from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student.ranks import Case

ONE = {"tp": 1, "pp": 1, "dp": 1, "sp": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "a budget, small micro-batches": ("qwen3", {"loss": "domain_budget", "micro_batch_size": 2, "packing": False}),
    # a router that learns in every backward, and counts tokens
    "deepseek_v3": ("deepseek_v3", {"moe": {"moe_router_bias_update_rate": 0.01}}),
}


@cpu_shim.activate()
def whole_gradient(case: Case, plan: MicroBatchPlan, domain: str) -> Tensor:
    """Return the gradient of the plan's samples of one domain alone, all parameters in one row."""
    samples = [s for rank in plan.micro_batches for batch in rank for s in batch if s.domain == domain]
    case.worker.forward_backward(pack(samples, case.worker.packing, dp_size=1), diagnostics=False)
    case.worker._optimizer.prepare_grads()
    parts = [part.get_main_grads_for_grad_norm() for part in case.worker._optimizer.chained_optimizers]
    return torch.cat([gradient.flatten().double() for part in parts for gradient in part])


@pytest.mark.parametrize("name", CASES)
def test_cosines_are_right_and_training_does_not_see_them(name: str, layout: parallel.Layout, tmp_path: Path) -> None:
    family, options = CASES[name]
    model = str(make_hf_model(tmp_path, family))
    plain, probed = (Case(model, {**ONE, **options, **more}) for more in ({}, {"cosine_every": 2}))
    expected, steps = plain.train(3), probed.train(3)
    found = [{key: step.pop(key) for key in list(step) if key.startswith("gradient_cosine/")} for step in steps]
    assert steps == expected and probed.weights_hash() == plain.weights_hash()
    assert [list(one) for one in found] == [["gradient_cosine/math|code"], ["gradient_cosine/math|code"], []]
    for case in (plain, probed):
        case.close()
    fresh = Case(model, {**ONE, **options})
    plan = fresh.plan(1)
    a, b = (whole_gradient(fresh, plan, domain) for domain in ("math", "code"))
    fresh.close()
    exact = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
    assert found[0]["gradient_cosine/math|code"] == pytest.approx(exact, abs=0.02)
