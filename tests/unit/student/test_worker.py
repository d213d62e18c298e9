"""A student of one rank: what a step says that must not be made, and the step after a warm-up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from mopd.base.types import MicroBatchPlan, NonFiniteError
from mopd.config.data import DataConfig
from mopd.config.groups import TeacherConfig
from mopd.config.losses import TopKLossConfig
from mopd.config.rollout import RolloutConfig
from mopd.config.schedule import ScheduleConfig, WarmUpConfig
from mopd.config.schema import Recipe
from mopd.config.student import OptimizerConfig, StudentConfig
from mopd.data.packing import pack
from mopd.data_plane.local import LocalDataPlane
from mopd.student.parallel import Layout
from mopd.student.worker import StudentWorker
from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student.samples import DOMAINS, make_samples

TOP_K = 4


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Megatron has small functions compiled, which takes seconds each."""
    with torch._dynamo.config.patch(disable=True):
        yield


def build(
    folder: Path, schedule: ScheduleConfig, optimizer: OptimizerConfig, dtype: Any = "float32"
) -> tuple[StudentWorker, Callable[[int], MicroBatchPlan]]:
    """A student, and what makes the plan of a step from the number of its first sample."""
    student = StudentConfig(model=str(make_hf_model(folder / "student")), dtype=dtype, optimizer=optimizer)
    recipe = Recipe(
        run_dir="unused",
        student=student,
        teachers={"all": TeacherConfig(model="unused", domains=DOMAINS)},
        data=DataConfig(train=("unused",), max_prompt_length=16),
        rollout=RolloutConfig(max_response_length=16),
        loss=TopKLossConfig(top_k=TOP_K),
        schedule=schedule,
    )
    plane = LocalDataPlane()
    worker = StudentWorker(recipe, plane.reader(), DOMAINS)

    def plan(first_id: int) -> MicroBatchPlan:
        drawn = {"vocab_size": worker.dims.vocab_size, "top_k": TOP_K, "seed": first_id, "first_id": first_id}
        metas, fields = make_samples(2, **drawn)
        asyncio.run(plane.put(metas, fields))
        return pack(metas, worker.packing, dp_size=1)

    return worker, plan


def test_a_gradient_without_end_names_its_step_and_samples(layout: Layout, tmp_path: Path) -> None:
    """The first step's, and the second's after it; the weights stay as they were."""
    worker, plan = build(tmp_path, ScheduleConfig(steps=4, prompts_per_step=2), OptimizerConfig())
    for step in (1, 2):
        worker.forward_backward(plan(10 * step), diagnostics=False)
        for buffer in worker._chunks[0].buffers:
            buffer.grad_data.fill_(float("inf"))
        before = [parameter.clone() for parameter in worker._chunks[0].parameters()]
        with pytest.raises(NonFiniteError, match=rf"^gradient norm is inf at step {step} .* {step}0\b.* {step}1\b"):
            worker.optim_step()
        assert all(map(torch.equal, worker._chunks[0].parameters(), before))
        worker.forward_backward(plan(10 * step + 2), diagnostics=False)
        assert worker.optim_step()["grad_norm"] > 0
        assert not all(map(torch.equal, worker._chunks[0].parameters(), before))


@pytest.mark.parametrize(
    ("dtype", "keys"),
    [
        ("float32", {}),
        ("float32", {"use_distributed_optimizer": False}),
        ("float32", {"offload_fraction": 0.5}),
        ("bfloat16", {}),
        ("bfloat16", {"offload_fraction": 1.0}),
    ],
)
def test_after_a_warm_up_the_optimizer_is_a_new_one(
    layout: Layout, tmp_path: Path, dtype: str, keys: dict[str, Any]
) -> None:
    """Weights are, step by step, those of plain PyTorch's AdamW over fp32 weights, given the same gradients and made
    anew after the warm-up's two steps; learning rates are those of two schedules, of six steps and of four."""
    lrs = [0.5, 1.0, 0.5, 1.0, 2 / 3, 1 / 3]
    optimizer = OptimizerConfig(lr=0.01, lr_warmup_steps=1, lr_decay_style="linear", weight_decay=0.1, **keys)
    warm_up = WarmUpConfig(objective="sft_on_teacher", steps=2)
    worker, plan = build(tmp_path, ScheduleConfig(steps=6, prompts_per_step=2, warm_up=warm_up), optimizer, dtype)
    weights: list[Any] = list(worker._chunks[0].parameters())
    twins = [weight.detach().float().clone().requires_grad_() for weight in weights]
    decays = [{"params": [twin for twin in twins if (twin.dim() > 1) is big]} for big in (True, False)]
    for step, share in enumerate(lrs, 1):
        if step in (1, 3):
            adam = torch.optim.AdamW(decays, betas=(0.9, 0.95), eps=1e-8)
        worker.forward_backward(plan(10 * step), diagnostics=False)
        for twin, weight in zip(twins, weights, strict=True):
            twin.grad = weight.main_grad.clone()
        norm = clip_grad_norm_(twins, 1.0)
        for group, decay in zip(adam.param_groups, (0.1, 0.0), strict=True):
            group.update(lr=0.01 * share, weight_decay=decay)
        adam.step()
        metrics = worker.optim_step()
        assert metrics["lr"] == pytest.approx(0.01 * share)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        for twin, weight in zip(twins, weights, strict=True):
            torch.testing.assert_close(weight.float(), twin.to(weight.dtype).float(), rtol=2e-5, atol=2e-5)
