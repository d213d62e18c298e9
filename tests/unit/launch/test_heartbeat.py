"""A rank waits for rank 0 as long as that lives, and no longer."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from mopd.base.types import UserError
from mopd.launch import heartbeat

SCRIPT = Path(__file__).parent / "heartbeat_script.py"
DEADLINE_S = 180.0
SILENT = "rank 0 gave no sign of life for {:g} s (schedule.wait_timeout_s), and did not say what comes next"
Start = Callable[[str, float], Callable[[], str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start two ranks; the returned call gives what rank 1 heard, once it has ended. Both are this process's children,
    with the store that torchrun's agent keeps."""
    started: list[subprocess.Popen[str]] = []
    stores: list[TCPStore] = []

    def begin(behaviour: str, timeout_s: float) -> Callable[[], str]:
        stores.append(store := TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        for rank in range(2):
            variables = {
                "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": SCRIPT.parents[3],
            }  # fmt: skip
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            command = [sys.executable, str(SCRIPT), behaviour, str(timeout_s)]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        follower = started[-1]
        return lambda: follower.communicate(timeout=DEADLINE_S)[0]

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_rank_0s_waits_may_take_longer_than_one(start: Start) -> None:
    """Between commands, and before the ranks join: two and a half times as long."""
    both = {behaviour: start(behaviour, 4.0) for behaviour in ("waits", "late")}  # their time passes once
    assert {behaviour: heard() for behaviour, heard in both.items()} == dict.fromkeys(both, "one\ntwo\n")


@pytest.mark.parametrize("behaviour", ["stopped", "held"])
def test_rank_0_that_hangs_is_not_waited_for(start: Start, behaviour: str) -> None:
    one, line = start(behaviour, 2.0)().splitlines()
    assert one == "one" and line.startswith(SILENT.format(2))


def test_rank_0_that_is_killed_is_known_at_once(start: Start) -> None:
    """By its connection: the deadline is far beyond the test's."""
    assert start("killed", 1000.0)() == "one\nlost\n"


class Nothing:
    """A group in which nothing is ever sent, and its work."""

    def broadcast(self, *arguments: Any) -> Nothing:
        return self

    def wait(self, timeout: Any) -> None:
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def test_a_store_that_does_not_answer_is_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the first question nor at a later one."""
    signs: list[int] = []

    def refuse(prefix: str) -> None:
        raise RuntimeError("connection refused")

    monkeypatch.setattr(heartbeat, "agent_store", refuse)
    watch = heartbeat.LeaderWatch(0.05)
    watch.on_sign = lambda: signs.append(1)
    nothing: Any = Nothing()
    with pytest.raises(UserError, match=re.escape(SILENT.format(0.05))):
        watch.receive(torch.zeros(1), nothing)
    assert signs == []


def test_an_event_loop_that_does_not_turn_is_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the thread beside it could say."""
    monkeypatch.setattr(heartbeat, "LOOP_S", 0.3)
    beats: list[float] = []

    async def more_than(num: int) -> None:
        while len(beats) <= num:
            await asyncio.sleep(0.01)

    async def work(beating: heartbeat.Heartbeat) -> None:
        with beating.depending_on(asyncio.get_running_loop()):
            await more_than(5)
            time.sleep(1.0)
            num = len(beats)
            time.sleep(1.0)
            assert len(beats) == num
            await more_than(num)

    with heartbeat.Heartbeat(lambda: beats.append(time.monotonic()), 0.3) as beating:
        asyncio.run(work(beating))
