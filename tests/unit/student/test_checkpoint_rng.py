"""Random states of a checkpoint that this process cannot take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.base.types import UserError
from mopd.student.checkpoints.checkpoint import _check_rng_state, _rng_state
from mopd.student.parallel import Layout


def test_a_random_state_of_another_machine_is_refused(layout: Layout) -> None:
    own = _rng_state()
    assert own["megatron"]
    _check_rng_state(Path("step_1"), own)
    tracked = next(iter(own["megatron"]))
    others: list[Any] = [None, {}, {**own, "megatron": None}, {**own, "cpu": torch.zeros(3)}, {**own, "cpu": b"state"}]
    others += [{**own, "megatron": {}}, {**own, "megatron": {**own["megatron"], tracked: torch.zeros(3)}}]
    for state in others:
        with pytest.raises(UserError, match=r"^step_1: its random state '.*' does not fit this machine"):
            _check_rng_state(Path("step_1"), state)
