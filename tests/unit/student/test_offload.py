"""States in host memory: the step is that of a student whose states are all on its device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel

from mopd.config.student import OptimizerConfig, StudentConfig
from mopd.student import cpu_shim
from mopd.student.memory import offload
from mopd.student.memory.offload import HostWeights, choose
from mopd.student.model.gpt import build_model
from mopd.student.optimizer import build_optimizer, guarded_step, wrap_data_parallel
from mopd.student.parallel import Layout
from tests.unit.student.test_model_config import DIMS


def build(layout: Layout, fraction: float, dtype: Any) -> tuple[DistributedDataParallel, Any]:
    with cpu_shim.activate():
        model = build_model(StudentConfig(model="unused", dtype=dtype), DIMS, layout)
        drawn = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=drawn))
        (wrapped,) = wrap_data_parallel([model], use_distributed_optimizer=True)
        config = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=1.0, offload_fraction=fraction)
        optimizer, _ = build_optimizer(config, [wrapped], num_steps=8)
    return wrapped, optimizer


def trained(layout: Layout, fraction: float, dtype: str) -> tuple[dict[str, torch.Tensor], list[float], Any]:
    model, optimizer = build(layout, fraction, dtype)
    drawn = torch.Generator().manual_seed(2)
    norms = []
    for _ in range(3):
        for buffer in model.buffers:
            buffer.grad_data.copy_(torch.randn(buffer.grad_data.shape, generator=drawn))
        norms.append(guarded_step(optimizer, [model]))
        optimizer.zero_grad()
    (part,) = optimizer.chained_optimizers
    return {name: weights.detach().clone() for name, weights in model.named_parameters()}, norms, part


def share(part: Any) -> float:
    mains = [main for group in part.optimizer.param_groups for main in group["params"]]
    return sum(main.numel() for main in mains if isinstance(main, HostWeights)) / sum(main.numel() for main in mains)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_the_step_is_the_same_wherever_the_states_are(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, fraction: float, dtype: str
) -> None:
    monkeypatch.setattr(offload, "BATCH_NUMEL", 1)  # as many batches as the largest tensor allows
    weights, norms, part = trained(layout, 0.0, dtype)
    assert share(part) == 0
    others, other_norms, other = trained(layout, fraction, dtype)
    assert fraction <= share(other) < fraction + 0.02
    assert other_norms == norms
    for name, own in weights.items():
        # Another order of the same operations; in bfloat16 it may tip the rounding of a weight.
        torch.testing.assert_close(others[name], own, rtol=1e-5 if dtype == "float32" else 2**-7, atol=1e-6)
    for main, twin in zip(part.get_parameters(), other.get_parameters(), strict=True):
        torch.testing.assert_close(twin.as_subclass(torch.Tensor), main, rtol=1e-5, atol=1e-6)
        for name, state in part.optimizer.state[main].items():
            torch.testing.assert_close(other.optimizer.state[twin][name], state, rtol=1e-5, atol=1e-7)


def test_host_weights_are_nobody_elses(layout: Layout) -> None:
    model, optimizer = build(layout, 1.0, "float32")
    (part,) = optimizer.chained_optimizers
    own = {main.untyped_storage().data_ptr() for main in part.get_parameters()}
    assert not own & {weights.untyped_storage().data_ptr() for weights in model.parameters()}
    assert len(own) == len(part.get_parameters())


def test_a_bad_norm_changes_nothing(layout: Layout) -> None:
    model, optimizer = build(layout, 1.0, "bfloat16")
    (part,) = optimizer.chained_optimizers
    before = [main.clone() for main in part.get_parameters()]
    model.buffers[0].grad_data.fill_(float("nan"))
    assert guarded_step(optimizer, [model]) != 0
    assert all(map(torch.equal, part.get_parameters(), before))
    assert not part.optimizer.state


@pytest.mark.parametrize(
    ("sizes", "fraction", "chosen"),
    [
        ([10, 60, 30], 0.0, set()),
        ([10, 60, 30], 1.0, {0, 1, 2}),
        ([10, 60, 30], 0.6, {1}),
        ([10, 60, 30], 0.35, {0, 2}),
        ([10, 60, 30], 0.05, {0}),
        ([100], 0.5, {0}),
        ([], 0.5, set()),
    ],
)
def test_as_little_as_whole_tensors_allow_is_moved(sizes: list[int], fraction: float, chosen: set[int]) -> None:
    assert choose(sizes, fraction) == chosen
