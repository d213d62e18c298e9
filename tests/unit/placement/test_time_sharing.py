"""A pool of GPUs that groups share by turns: who sleeps, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from mopd.placement.time_sharing import SharedPool


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


def test_one_at_a_time_and_no_change_without_need() -> None:
    async def work() -> None:
        pool = Pool(math=0.9, code=0.9)
        for key in ("math", "math", "code", "code", "math"):
            await pool.use(key)
        assert pool.log == ["+math", "-math", "+code", "-code", "+math"]

    run(work())


def test_the_least_recently_used_sleeps_first() -> None:
    async def work() -> None:
        pool = Pool(a=0.4, b=0.4, c=0.4)
        for key in ("a", "b", "a", "c"):  # b was used before a
            await pool.use(key)
        assert pool.log == ["+a", "+b", "-b", "+c"]
        assert pool.awake == ["a", "c"]

    run(work())


def test_only_as_many_sleep_as_room_needs() -> None:
    async def work() -> None:
        pool = Pool(a=0.3, b=0.3, c=0.3, big=0.6)
        for key in ("a", "b", "c", "big"):
            await pool.use(key)
        assert pool.log[3:] == ["-a", "-b", "+big"]

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
                assert pool.awake == ["math"]

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


def test_many_groups_at_once_all_get_their_turn() -> None:
    async def work() -> None:
        pool = Pool(a=0.6, b=0.6, c=0.3, d=1.0)
        await asyncio.gather(*(pool.use(key) for key in "abcd" * 10))

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
        assert pool.awake == ["code"]

    run(work())
