from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mopd.base.types import UserError
from mopd.config.student import ParallelConfig
from mopd.student import parallel
from mopd.student.parallel import check_world_size, device_number


def test_world_size_must_be_the_recipes() -> None:
    layout = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=3)
    with pytest.raises(UserError, match=r"world size 4 is not .*'s 6, .*'context_parallel_size': 3.*: start 6 ranks"):
        check_world_size(layout, 4)
    check_world_size(layout, 6)


def test_a_ranks_gpu_is_its_number_on_its_machine() -> None:
    """Not the global rank: on a second machine of 8 ranks with 4 GPUs each, rank 5 is local rank 1."""
    assert [device_number(rank, num_devices=4, is_alone=False) for rank in range(4)] == [0, 1, 2, 3]
    assert device_number(None, num_devices=2, is_alone=True) == 0
    with pytest.raises(UserError, match=r"LOCAL_RANK 3 sees 1 CUDA devices .*CUDA_VISIBLE_DEVICES") as error:
        device_number(3, num_devices=1, is_alone=False)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="local_rank"):
        device_number(None, num_devices=2, is_alone=False)


def test_a_layouts_process_groups_end_with_it() -> None:
    """Each has threads of its own, some of which never sleep for long. The world's, made in the first round, stay."""
    made: list[set[str]] = []
    try:
        for _ in range(3):
            before = _threads()
            parallel.initialize(ParallelConfig(), timeout_s=60, seed=0)
            made.append(_threads() - before)
            parallel.destroy()
            assert dist.is_initialized()
            if len(made) > 1:
                assert len(made[-1]) > 20
                _await_end(made[-1])
    finally:
        parallel.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _await_end(threads: set[str]) -> None:
    """The system may see those that were joined for a moment more."""
    gc.collect()
    deadline = time.monotonic() + 30
    while left := threads & _threads():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_collective_waits_longer_than_one_rank_alone() -> None:
    """For samples, or for a checkpoint, which alone has its own deadline: what is late there is told, not the group."""

    def deadline_s(group: dist.ProcessGroup) -> float:
        backend: Any = group._get_backend(torch.device("cpu"))
        return float(backend.options._timeout.total_seconds())

    try:
        layout = parallel.initialize(ParallelConfig(), timeout_s=60, seed=0)
        assert min(map(deadline_s, (layout.control_group, layout.samples_group, dist.group.WORLD))) >= 70
        assert deadline_s(layout.checkpoint_group) > 86_400
    finally:
        parallel.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()
