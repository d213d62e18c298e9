from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel

from mopd.base.types import NonFiniteError, UserError
from mopd.config.student import OptimizerConfig, StudentConfig, VisionConfig
from mopd.conversion.models.reading import read_dims
from mopd.student import cpu_shim
from mopd.student.model.gpt import build_model
from mopd.student.optimizer import build_optimizer, guarded_step, overlaps, wrap_data_parallel
from mopd.student.parallel import Layout
from tests.fixtures.vision import make_vision_model
from tests.unit.student.test_model_config import DIMS


def build(layout: Layout, **keys: Any) -> tuple[DistributedDataParallel, Any, Any]:
    with cpu_shim.activate():
        model = build_model(StudentConfig(model="unused", dtype="float32"), DIMS, layout)
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
        wrapped = wrap_data_parallel([model], use_distributed_optimizer=True)
        return (wrapped[0], *build_optimizer(OptimizerConfig(lr=1.0, **keys), wrapped, num_steps=8))


def lrs(layout: Layout, **keys: Any) -> list[float]:
    _, optimizer, scheduler = build(layout, **keys)
    seen = []
    for _ in range(8):
        seen.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return seen


def test_warm_up_is_a_line_that_reaches_the_peak(layout: Layout) -> None:
    assert lrs(layout, lr_warmup_steps=3, lr_decay_style="constant") == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 5)


def test_decay_ends_at_min_lr_after_the_last_step(layout: Layout) -> None:
    seen = lrs(layout, min_lr=0.2, lr_decay_style="linear")
    assert seen == pytest.approx([1.0 - 0.1 * i for i in range(8)])


def fill_gradients(model: DistributedDataParallel, value: float) -> None:
    for buffer in model.buffers:
        buffer.grad_data.fill_(value)


def test_decay_touches_matrices_only(layout: Layout) -> None:
    model, optimizer, _ = build(layout, weight_decay=0.1)
    with cpu_shim.activate():
        fill_gradients(model, 0.0)
        assert guarded_step(optimizer, [model]) == 0.0
    for name, parameter in model.named_parameters():
        assert torch.all(parameter == (0.5 if parameter.dim() == 1 else 0.45)), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_norm_changes_nothing(layout: Layout, value: float) -> None:
    model, optimizer, _ = build(layout, weight_decay=0.1)
    with cpu_shim.activate():
        fill_gradients(model, 1.0)
        model.buffers[0].grad_data[3] = value
        norm = guarded_step(optimizer, [model])
    assert not norm < float("inf")
    assert all(torch.all(parameter == 0.5) for parameter in model.parameters())
    assert not optimizer.chained_optimizers[0].optimizer.state


def test_a_weight_that_is_no_number_is_named(layout: Layout) -> None:
    """The gradients are in order: some other fault, of which nothing else would tell before the rollout has it."""
    model, optimizer, _ = build(layout)
    name, weight = list(model.module.named_parameters())[-1]
    weight.data.view(-1)[-1] = float("nan")
    with cpu_shim.activate():
        fill_gradients(model, 0.0)
        with pytest.raises(NonFiniteError, match=f"weight {name!r} of the student has values that are NaN"):
            guarded_step(optimizer, [model])


@pytest.mark.parametrize("clip_grad", [1.0, 0.0])
def test_gradients_are_clipped_by_the_global_norm(layout: Layout, clip_grad: float) -> None:
    model, optimizer, _ = build(layout, clip_grad=clip_grad)
    with cpu_shim.activate():
        fill_gradients(model, 2.0)
        norm = guarded_step(optimizer, [model])
    count = sum(parameter.numel() for parameter in model.parameters())
    assert norm == pytest.approx(2.0 * count**0.5, rel=1e-5)
    (part,) = optimizer.chained_optimizers
    first_moment = torch.cat([states["exp_avg"] for states in part.optimizer.state.values()])
    assert first_moment.double().norm() == pytest.approx(0.1 * (clip_grad or norm), rel=1e-4)


@pytest.mark.parametrize(
    ("device", "dp_size", "cp_size", "is_on"),
    [("cuda", 2, 1, True), ("cuda", 1, 2, True), ("cuda", 1, 1, False), ("cpu", 2, 2, False)],
)
def test_overlap_is_the_default_where_gpus_sum_gradients(
    layout: Layout, tmp_path: Path, device: str, dp_size: int, cp_size: int, is_on: bool
) -> None:
    student = StudentConfig(model="unused")
    several = replace(layout, device=torch.device(device), dp_size=dp_size, cp_size=cp_size)
    assert overlaps(student, DIMS, several) is is_on
    seeing = read_dims(make_vision_model(tmp_path))
    assert not overlaps(student, seeing, several)  # its tower is trained
    assert overlaps(replace(student, vision=VisionConfig(freeze="tower_and_merger")), seeing, several) is is_on


def test_overlap_is_left_out_where_it_brings_nothing_or_a_tower_is_trained(layout: Layout, tmp_path: Path) -> None:
    student = StudentConfig(model="unused")
    assert not overlaps(student, DIMS, layout)  # a world of one rank
    assert overlaps(replace(student, overlap=True), DIMS, layout)
    seeing = read_dims(make_vision_model(tmp_path))
    with pytest.raises(UserError, match=r"set student\.vision\.freeze: tower_and_merger"):
        overlaps(replace(student, overlap=True), seeing, layout)
    frozen = replace(student, overlap=True, vision=VisionConfig(freeze="tower_and_merger"))
    assert overlaps(frozen, seeing, layout)
