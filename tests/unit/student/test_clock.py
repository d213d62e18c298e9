"""Shares of a step's time, from the spans that Megatron's schedule and the tower mark."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from mopd.student.parallel import Layout
from mopd.student.vision import TOWER, StageClock

Sleep = Callable[[float], None]


class Ticks:
    """Time that passes when a test says so, whatever else the machine does."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def perf_counter(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture
def sleep(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Sleep:
    if layout.device.type == "cuda":  # its spans are events
        return time.sleep
    ticks = Ticks()
    monkeypatch.setattr("mopd.student.vision.time", ticks)
    return ticks.sleep


def _pass(clock: StageClock, sleep: Sleep, name: str, seconds: float, tower_s: float = 0.0) -> None:
    """A pass of a micro-batch; the tower's part first, as in a forward pass."""
    clock(name, log_level=2).start()
    if tower_s:
        clock(TOWER).start()
        sleep(tower_s)
        clock(TOWER).stop()
    sleep(seconds - tower_s)
    clock(name).stop()


def test_shares(layout: Layout, sleep: Sleep) -> None:
    clock = StageClock(layout)
    _pass(clock, sleep, "forward-compute", 0.5)
    clock.begin()  # what came before belongs to the last step
    _pass(clock, sleep, "forward-compute", 0.2, tower_s=0.1)
    sleep(0.1)
    clock("backward-recv").start()
    clock("backward-recv").stop()
    clock(TOWER).stop()  # its end is seen in passes that it has no part in
    _pass(clock, sleep, "backward-compute", 0.2)
    assert clock.metrics() == pytest.approx(
        {"rate/vision_tower_share": 0.25, "rate/pipeline_bubble_share": 0.2},
        abs=0.08 if layout.device.type == "cuda" else 1e-6,  # fp32
    )
