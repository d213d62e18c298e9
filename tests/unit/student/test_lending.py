"""What a student lends comes back bit for bit, and while it is away the memory is free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.config.student import OptimizerConfig, StudentConfig
from mopd.student import cpu_shim
from mopd.student.memory.lending import GpuMemoryLease
from mopd.student.model.gpt import build_model
from mopd.student.optimizer import build_optimizer, guarded_step, wrap_data_parallel
from mopd.student.parallel import Layout
from tests.unit.student.test_model_config import DIMS

CPU = torch.device("cpu")


class Built:
    """A model with an optimizer that has made one step."""

    def __init__(self, layout: Layout, dtype: Any, *, distributed: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        with cpu_shim.activate():
            model = build_model(StudentConfig(model="unused", dtype=dtype), DIMS, layout)
            for parameter in model.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
            (self.model,) = wrap_data_parallel([model], use_distributed_optimizer=distributed, overlap=False)
            config = OptimizerConfig(lr=0.1, use_distributed_optimizer=distributed)
            self.optimizer, _ = build_optimizer(config, [self.model], num_steps=8)
        self.lending = GpuMemoryLease([self.model], self.optimizer, CPU)
        self.step(1)

    @cpu_shim.activate()
    def step(self, seed: int) -> float:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.model.buffers:
            buffer.grad_data.copy_(torch.randn(buffer.grad_data.shape, generator=generator))
        return guarded_step(self.optimizer, [self.model])

    def states(self) -> list[Tensor]:
        (part,) = self.optimizer.chained_optimizers
        masters = [tensor for group in part.optimizer.param_groups for tensor in group["params"]]
        moments = [state[name] for state in part.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [*masters, *moments]


@pytest.mark.parametrize(("dtype", "distributed"), [("float32", True), ("float32", False), ("bfloat16", True)])
def test_training_goes_on_bit_for_bit(
    layout: Layout, dtype: str, distributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cycles between steps change no bit of weights and states, though they travel in pieces."""
    monkeypatch.setattr("mopd.student.memory.lending.SLAB_BYTES", 100_001)
    lends, stays = Built(layout, dtype, distributed=distributed), Built(layout, dtype, distributed=distributed)
    for seed in (2, 3):
        lends.lending.lend()
        for buffer in lends.model.buffers:
            assert buffer.grad_data.untyped_storage().nbytes() == 0
        lends.lending.restore()
        assert lends.step(seed) == stays.step(seed)
        for mine, theirs in zip(lends.model.parameters(), stays.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert all(torch.equal(*both) for both in zip(lends.states(), stays.states(), strict=True))


def test_the_parameters_stay_and_the_states_are_gone(layout: Layout) -> None:
    """Main parameters of a bf16 model leave too; an fp32 model's are the model's own, which the rollout is given."""
    for dtype, moving in (("bfloat16", 3), ("float32", 2)):
        built = Built(layout, dtype, distributed=False)
        before = [parameter.clone() for parameter in built.model.parameters()]
        count = sum(map(Tensor.numel, before))
        built.lending.lend()
        assert all(torch.equal(*both) for both in zip(built.model.parameters(), before, strict=True))
        gone = [tensor for tensor in built.states() if tensor.untyped_storage().nbytes() == 0]
        assert sum(map(Tensor.numel, gone)) == moving * count
        lent = built.lending.numbers["memory/student_lent_gib"] * 2**30
        assert lent == pytest.approx((moving + 1) * 4 * count, rel=0.01)  # and the gradients
