"""A student of one rank: what a step says that must not be made."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from mopd.base.types import MicroBatchPlan, NonFiniteError
from mopd.config.data import DataConfig
from mopd.config.groups import TeacherConfig
from mopd.config.losses import TopKLossConfig
from mopd.config.schema import Recipe, RolloutConfig, ScheduleConfig
from mopd.config.student import StudentConfig
from mopd.data.packing import pack
from mopd.data_plane.local import LocalDataPlane
from mopd.student.parallel import Layout
from mopd.student.worker import StudentWorker
from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student.samples import DOMAINS, make_samples

TOP_K = 4


def test_a_gradient_without_end_names_its_step_and_samples(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step's, and the second's after it; the weights stay as they were."""
    monkeypatch.setattr(torch._dynamo.config, "disable", True)  # Megatron has small functions compiled
    recipe = Recipe(
        run_dir="unused",
        student=StudentConfig(model=str(make_hf_model(tmp_path / "student")), dtype="float32"),
        teachers={"all": TeacherConfig(model="unused", domains=DOMAINS)},
        data=DataConfig(train=("unused",), max_prompt_length=16),
        rollout=RolloutConfig(max_response_length=16),
        loss=TopKLossConfig(top_k=TOP_K),
        schedule=ScheduleConfig(steps=4, prompts_per_step=2),
    )
    plane = LocalDataPlane()
    worker = StudentWorker(recipe, plane.reader(), DOMAINS)

    def plan(first_id: int) -> MicroBatchPlan:
        drawn = {"vocab_size": worker.dims.vocab_size, "top_k": TOP_K, "seed": first_id, "first_id": first_id}
        metas, fields = make_samples(2, **drawn)
        asyncio.run(plane.put(metas, fields))
        return pack(metas, worker.packing, dp_size=1)

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
