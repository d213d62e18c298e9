"""A pool of GPUs that groups share by turns: who sleeps, and when."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from mopd.placement.sharing.pool import TURN_S, SharedPool
from tests.fixtures.effort import measured_effort
from tests.fixtures.token_clock import run_on_token_clock


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10.0))


class Pool(SharedPool):
    """Notes what sleeps and wakes, and that memory is never promised twice."""

    def __init__(self, **shares: float) -> None:
        super().__init__("gpus")
        self.log: list[str] = []
        self.holding: dict[str, float] = {}
        for key, share in shares.items():
            self.add(key, share=share, sleep=self._sleep(key), wake=self._wake(key, share))

    def _sleep(self, key: str) -> Callable[[], Awaitable[None]]:
        async def sleep() -> None:
            await asyncio.sleep(0)
            self.log.append(f"-{key}")
            del self.holding[key]

        return sleep

    def _wake(self, key: str, share: float) -> Callable[[], Awaitable[None]]:
        async def wake() -> None:
            await asyncio.sleep(0)
            self.log.append(f"+{key}")
            self.holding[key] = share
            assert sum(self.holding.values()) <= 1.0 + 1e-6

        return wake

    async def use(self, key: str) -> None:
        async with self.kept_awake(key):
            assert key in self.holding
            await asyncio.sleep(0.001)
            assert key in self.holding


@pytest.mark.parametrize(
    ("shares", "used", "log"),
    [
        ({"m": 0.9, "c": 0.9}, "mmccm", "+m -m +c -c +m"),  # no change without need
        ({"a": 0.4, "b": 0.4, "c": 0.4}, "abac", "+a +b -b +c"),  # b was used before a
        ({"a": 0.3, "b": 0.3, "c": 0.3, "d": 0.6}, "abcd", "+a +b +c -a -b +d"),  # as many as room needs
    ],
)
def test_the_least_recently_used_sleeps_first(shares: dict[str, float], used: str, log: str) -> None:
    async def work() -> None:
        pool = Pool(**shares)
        for key in used:
            await pool.use(key)
        assert pool.log == log.split()

    run(work())


def test_a_working_group_is_not_put_to_sleep() -> None:
    async def work() -> None:
        pool = Pool(math=0.9, code=0.9)
        inside = asyncio.Event()
        leave = asyncio.Event()

        async def long() -> None:
            async with pool.kept_awake("math"):
                inside.set()
                await leave.wait()
                assert list(pool.holding) == ["math"]

        first = asyncio.create_task(long())
        await inside.wait()
        other = asyncio.create_task(pool.use("code"))
        await pool.use("math")  # its own group may join
        await asyncio.sleep(0.01)
        assert not other.done()
        leave.set()
        await asyncio.gather(first, other)
        assert pool.log == ["+math", "-math", "+code"]

    run(work())


def test_work_that_comes_in_the_moment_of_a_change_waits_for_the_next() -> None:
    """Its group is still awake then, and about to sleep."""

    async def work() -> None:
        pool = Pool(math=0.9, code=0.9)
        await pool.use("math")
        await asyncio.gather(pool.use("code"), pool.use("math"))
        assert pool.log == ["+math", "-math", "+code", "-code", "+math"]

    run(work())


def test_a_cancelled_wait_and_a_failed_turn_leave_the_pool_usable() -> None:
    async def work() -> None:
        pool = Pool(math=0.9, code=0.9)
        with pytest.raises(RuntimeError, match="boom"):
            async with pool.kept_awake("math"):
                waiting = asyncio.create_task(pool.use("code"))
                await asyncio.sleep(0.001)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                raise RuntimeError("boom")
        await pool.use("code")
        assert list(pool.holding) == ["code"]

    run(work())


WAKE_S = 2.0


class SlowPool(Pool):
    """Changes take ``WAKE_S`` each, a block as long as is asked for. For simulated time."""

    async def work(self, key: str, seconds: float) -> None:
        async with self.kept_awake(key):
            assert key in self.holding
            await asyncio.sleep(seconds)
            assert key in self.holding

    def _wake(self, key: str, share: float) -> Callable[[], Awaitable[None]]:
        wake = super()._wake(key, share)

        async def slow() -> None:
            await asyncio.sleep(WAKE_S)
            await wake()

        return slow


async def endless(pool: SlowPool, key: str, done: list[tuple[str, float]], *, lanes: int = 8) -> None:
    """New work the moment that some has ended, in several lanes: the group is never idle by itself."""

    async def lane(number: int) -> None:
        while True:
            await pool.work(key, 1.0 + 0.1 * number)
            done.append((key, asyncio.get_running_loop().time()))

    await asyncio.gather(*map(lane, range(lanes)))


def test_groups_with_endless_work_take_turns() -> None:
    done: list[tuple[str, float]] = []

    async def work() -> None:
        pool = SlowPool(a=0.9, b=0.9, c=0.9)
        tasks = [asyncio.create_task(endless(pool, key, done)) for key in "abc"]
        await asyncio.sleep(600)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        woken = [entry[1] for entry in pool.log if entry[0] == "+"]
        assert woken == [("abc" * 10)[i] for i in range(len(woken))]
        turn_s = TURN_S + 1.7 + WAKE_S  # and what runs at its end
        assert 600 / turn_s - 1 <= len(woken) <= 600 / (TURN_S + WAKE_S) + 1
        for key in "abc":
            times = [at for name, at in done if name == key]
            assert max(b - a for a, b in itertools.pairwise(times)) < 2 * turn_s + WAKE_S + 2
            assert len(times) > 0.8 * len(done) / 3

    run_on_token_clock(work())


def test_a_group_that_nobody_waits_for_is_never_put_to_sleep() -> None:
    async def work() -> None:
        pool = SlowPool(a=0.9, b=0.9)
        done: list[tuple[str, float]] = []
        task = asyncio.create_task(endless(pool, "a", done))
        await asyncio.sleep(1000)
        assert pool.log == ["+a"] and len(done) > 8 * 500
        begun = asyncio.get_running_loop().time()
        await pool.work("b", 1.0)  # its turn has long been over
        assert asyncio.get_running_loop().time() - begun < 1.7 + WAKE_S + 1.1
        await asyncio.sleep(1000)
        assert pool.log == ["+a", "-a", "+b", "-b", "+a"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_on_token_clock(work())


def test_a_short_turn_is_given_up_at_once_and_a_new_one_is_not_cut() -> None:
    async def work() -> None:
        pool = SlowPool(a=0.9, b=0.9)
        await pool.work("a", 1.0)
        busy = asyncio.create_task(endless(pool, "b", []))
        await asyncio.sleep(WAKE_S + 1)
        waiting = asyncio.create_task(pool.work("a", 1.0))
        await asyncio.sleep(TURN_S - 5)
        assert not waiting.done()
        await asyncio.sleep(15)
        assert waiting.done()
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)

    run_on_token_clock(work())


def test_a_large_group_is_not_starved_by_small_ones() -> None:
    async def work() -> None:
        pool = SlowPool(a=0.4, b=0.4, big=1.0)
        tasks = [asyncio.create_task(endless(pool, key, [])) for key in "ab"]
        await asyncio.sleep(5)
        waiting = asyncio.create_task(pool.work("big", 1.0))
        await asyncio.sleep(TURN_S + 1.7 + 2 * WAKE_S + 2)
        assert waiting.done()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_on_token_clock(work())


def test_whoever_waits_behind_one_that_gives_up_goes_on() -> None:
    """``a``'s turn is over and ``b`` waits: when ``b`` goes away, ``a`` gets work again."""

    async def work() -> None:
        pool = SlowPool(a=0.9, b=0.9)
        long = asyncio.create_task(pool.work("a", 100.0))
        await asyncio.sleep(TURN_S + 10)
        other = asyncio.create_task(pool.work("b", 1.0))
        await asyncio.sleep(1)
        more = asyncio.create_task(pool.work("a", 1.0))
        await asyncio.sleep(5)
        assert not more.done() and not other.done()
        other.cancel()
        await asyncio.sleep(2)
        assert more.done()
        await long
        assert pool.log == ["+a"]

    run_on_token_clock(work())


@pytest.mark.parametrize("num_ticks", range(4))
def test_one_that_is_cancelled_in_the_moment_of_its_turn_leaves_at_once(num_ticks: int) -> None:
    """Also between being let in and its task's next step."""

    async def work() -> None:
        pool = Pool(math=0.9, code=0.9)
        leave = asyncio.Event()

        async def long() -> None:
            async with pool.kept_awake("math"):
                await leave.wait()

        first, second = asyncio.create_task(long()), asyncio.create_task(pool.use("code"))
        await asyncio.sleep(0.01)
        while pool.log[-1:] != ["+code"]:
            leave.set()
            await asyncio.sleep(0)
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await pool.use("math")

    run(work())


def test_an_error_of_a_change_is_told_to_all_that_wait_for_it() -> None:
    async def work() -> None:
        pool = Pool(math=0.9, code=0.9)

        async def broken() -> None:
            raise RuntimeError("no memory")

        pool.add("bad", share=0.9, sleep=broken, wake=broken)
        await pool.use("math")
        outcomes = await asyncio.gather(pool.use("bad"), pool.use("bad"), return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["no memory"] * 2
        await pool.use("code")
        assert pool.log == ["+math", "-math", "+code"]

    run(work())


def test_thousands_that_wait_are_no_more_work_each_than_a_few() -> None:
    def calls(count: int) -> float:
        async def work() -> None:
            pool = SlowPool(a=0.9, b=0.9)
            await asyncio.gather(*(pool.work(key, 0.5 + i / count) for i in range(count) for key in "ab"))

        with measured_effort() as effort:
            run_on_token_clock(work())
        return effort.calls / count

    few, many = calls(100), calls(2000)
    assert many < 2 * few, (few, many)
