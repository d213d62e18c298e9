"""The token budget and the gathering of requests."""

from __future__ import annotations

import asyncio

import pytest

from mopd.engines.concurrency import TokenBudget, all_or_none, cancel


def test_budget_is_never_exceeded_and_large_work_is_not_overtaken() -> None:
    async def run() -> tuple[list[int], int]:
        budget, order, held, most = TokenBudget(10), [], 0, 0

        async def work(tokens: int) -> None:
            nonlocal held, most
            async with budget.hold(tokens):
                order.append(tokens)
                held += tokens
                most = max(most, held)
                await asyncio.sleep(0.005)
                held -= tokens

        await asyncio.wait_for(all_or_none([work(n) for n in (4, 4, 10, 1, 1, 6, 6)]), 10)
        return order, most

    order, most = asyncio.run(run())
    assert order == [4, 4, 10, 1, 1, 6, 6]  # 1 would fit beside 4 + 4, but 10 came first
    assert most == 10


def test_budget_survives_failures_and_cancelled_waits() -> None:
    async def run() -> None:
        budget = TokenBudget(5)

        async def hold(tokens: int) -> None:
            async with budget.hold(tokens):
                raise RuntimeError

        with pytest.raises(RuntimeError):
            await hold(5)
        async with budget.hold(5):
            waiting = asyncio.ensure_future(hold(3))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        async with budget.hold(5):  # everything came back
            pass
        with pytest.raises(ValueError, match="6 tokens exceed the budget of 5"):
            await hold(6)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_first_failure_ends_the_others() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("wait")

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise KeyError("first")

    async def run() -> None:
        with pytest.raises(KeyError, match="first"):
            await all_or_none([wait(), fail(), wait()])
        assert ended == ["wait", "wait"]
        task = asyncio.ensure_future(all_or_none([wait()]))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(ended) == 3

    asyncio.run(asyncio.wait_for(run(), 10))


def test_cancelled_work_has_its_time_to_end() -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)

    async def run(grace_s: float) -> bool:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        await cancel([task], grace_s=grace_s)
        return task.done()

    assert not asyncio.run(run(0.0)) and asyncio.run(run(30.0))
