"""Shares of a step's time, from the spans that Megatron's schedule and the tower mark."""

from __future__ import annotations

import time

import pytest

from mopd.student.clock import TOWER, StageClock
from mopd.student.parallel import Layout


def _pass(clock: StageClock, name: str, seconds: float, tower_s: float = 0.0) -> None:
    """A pass of a micro-batch; the tower's part first, as in a forward pass."""
    clock(name, log_level=2).start()
    if tower_s:
        clock(TOWER).start()
        time.sleep(tower_s)
        clock(TOWER).stop()
    time.sleep(seconds - tower_s)
    clock(name).stop()


def test_shares(layout: Layout) -> None:
    clock = StageClock(layout)
    _pass(clock, "forward-compute", 0.5)
    clock.begin()  # what came before belongs to the last step
    _pass(clock, "forward-compute", 0.2, tower_s=0.1)
    time.sleep(0.1)
    clock("backward-recv").start()
    clock("backward-recv").stop()
    clock(TOWER).stop()  # its end is seen in passes that it has no part in
    _pass(clock, "backward-compute", 0.2)
    assert clock.metrics() == pytest.approx(
        {"rate/vision_tower_share": 0.25, "rate/pipeline_bubble_share": 0.2}, abs=0.08
    )
