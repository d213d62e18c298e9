"""Student and rollout on one memory: who has it, and what becomes of it when a side fails at any point."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from mopd.placement.sharing.turns import GpuTurns
from tests.fixtures.token_clock import run_on_token_clock

SIDES = ("student", "rollout")


class Memory:
    """Notes every change, and that it is never promised twice; fails at the ``fails_at``-th call, if any."""

    def __init__(self, seconds: float = 0.0, fails_at: int | None = None) -> None:
        self.owner: str | None = "student"
        self.log: list[str] = []
        self.seconds, self.fails_at = seconds, fails_at
        self.turns = GpuTurns(SideOf(self, "student"), SideOf(self, "rollout"))

    async def call(self, what: str, side: str) -> None:
        self.log.append(f"{side} {what}")
        if len(self.log) == self.fails_at:
            raise ConnectionError(f"{side} could not {what}")
        if what == "give back":
            assert self.owner == side
            await asyncio.sleep(self.seconds)
            self.owner = None
        else:
            assert self.owner is None
            await asyncio.sleep(self.seconds)
            self.owner = side

    async def work(self, side: str, seconds: float = 0.0) -> None:
        async with self.turns.kept_awake(side):
            assert self.owner == side
            await asyncio.sleep(seconds)
            assert self.owner == side


class SideOf:
    def __init__(self, memory: Memory, name: str) -> None:
        self._memory, self._name = memory, name

    async def give_back(self) -> None:
        await self._memory.call("give back", self._name)

    async def take(self) -> None:
        await self._memory.call("take", self._name)


def run(work: Coroutine[Any, Any, None]) -> None:
    run_on_token_clock(asyncio.wait_for(work, 1e6))


TO_ROLLOUT = ["student give back", "rollout take"]
TO_STUDENT = ["rollout give back", "student take"]


def test_a_synchronous_run_changes_hands_twice_a_step() -> None:
    async def work() -> None:
        memory = Memory(seconds=3.0)
        for _ in range(3):
            await asyncio.gather(*(memory.work("rollout", n) for n in (1.0, 5.0, 2.0)))
            await memory.work("student", 2.0)
        assert memory.log == (TO_ROLLOUT + TO_STUDENT) * 3
        assert memory.turns.take_numbers() == {"timing/to_student_s": 18.0, "timing/to_rollout_s": 18.0}

    run(work())


def test_what_is_expected_comes_early_and_goes_back_if_the_other_side_works_first() -> None:
    async def work() -> None:
        memory = Memory(seconds=3.0)
        await memory.work("rollout")
        memory.turns.expect("student")
        await asyncio.sleep(10.0)  # while teachers score
        assert memory.owner == "student"
        await memory.work("rollout")  # a prompt was replaced: its response is drawn anew
        assert memory.log == TO_ROLLOUT + TO_STUDENT + TO_ROLLOUT
        memory.turns.expect("student")
        await memory.work("rollout")  # in the middle of the change
        await asyncio.sleep(10.0)
        assert memory.owner == "rollout" and memory.log[6:] == TO_STUDENT + TO_ROLLOUT
        await memory.work("student")
        assert memory.owner == "student"

    run(work())


def test_a_side_that_works_is_not_interrupted() -> None:
    async def work() -> None:
        memory = Memory(seconds=1.0)
        long = asyncio.create_task(memory.work("rollout", 100.0))
        await asyncio.sleep(10.0)
        step = asyncio.create_task(memory.work("student"))
        memory.turns.expect("student")
        await asyncio.sleep(10.0)
        assert memory.owner == "rollout" and not step.done()
        await memory.work("rollout")  # a replica that is started again while another one draws
        await asyncio.gather(long, step)
        assert memory.log == TO_ROLLOUT + TO_STUDENT

    run(work())


def test_a_wait_that_is_given_up_moves_nothing_afterwards() -> None:
    async def work() -> None:
        memory = Memory(seconds=1.0)
        async with memory.turns.kept_awake("student"):
            waiting = asyncio.create_task(memory.work("rollout"))
            await asyncio.sleep(1.0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(5.0)
        assert memory.log == []
        waiting = asyncio.create_task(memory.work("rollout"))
        await asyncio.sleep(0.5)  # in the middle of the change
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await memory.work("student")
        assert memory.log == TO_ROLLOUT + TO_STUDENT

    run(work())


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_after_a_failed_change_nobody_works(fails_at: int) -> None:
    """At every call of two cycles: what waits and what comes later gets the error, and nothing moves any more."""

    async def work() -> None:
        memory = Memory(seconds=1.0, fails_at=fails_at)
        with pytest.raises(ConnectionError) as failed:
            for _ in range(2):
                await asyncio.gather(*(memory.work("rollout", n) for n in (1.0, 2.0)))
                await memory.work("student", 1.0)
        assert len(memory.log) == fails_at
        for side in SIDES:
            with pytest.raises(ConnectionError) as later:
                await memory.work(side)
            assert later.value is failed.value
            memory.turns.expect(side)
            await asyncio.sleep(1.0)
        assert len(memory.log) == fails_at

    run(work())


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_an_end_in_the_middle_of_a_change_is_quick(fails_at: int) -> None:
    """At every call: the run is cancelled while that call never returns."""

    async def work() -> None:
        memory = Memory(seconds=1.0)

        async def stuck(what: str, side: str) -> None:
            if len(memory.log) + 1 == fails_at:
                await asyncio.Event().wait()
            await Memory.call(memory, what, side)

        memory.call = stuck  # type: ignore[method-assign]

        async def steps() -> None:
            for _ in range(2):
                await memory.work("rollout", 1.0)
                await memory.work("student", 1.0)

        going = asyncio.create_task(steps())
        await asyncio.sleep(100.0)
        assert len(memory.log) == fails_at - 1 and not going.done()
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        await asyncio.wait_for(memory.turns.close(), 10.0)

    run(work())


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_of_work_hints_and_cancellations_ends(seed: int) -> None:
    """Everybody gets a turn, the memory has one owner at a time (``Memory`` looks), whatever is asked when."""

    async def work() -> None:
        chance, memory = random.Random(seed), Memory(seconds=2.0)

        async def one(side: str) -> None:
            await asyncio.sleep(chance.uniform(0.0, 60.0))
            await memory.work(side, chance.uniform(0.0, 4.0))

        async def noise() -> None:
            for _ in range(30):
                await asyncio.sleep(chance.uniform(0.0, 4.0))
                memory.turns.expect(chance.choice(SIDES))
                lost = asyncio.create_task(memory.work(chance.choice(SIDES)))
                await asyncio.sleep(chance.uniform(0.0, 3.0))
                lost.cancel()
                await asyncio.gather(lost, return_exceptions=True)

        await asyncio.gather(noise(), *(one(chance.choice(SIDES)) for _ in range(40)))
        assert len(memory.log) > 4

    run(work())
