"""Who may go first: room kept for requests that cannot go elsewhere. Simulated clock."""

from __future__ import annotations

import asyncio

import pytest

from mopd.config.groups import RoutingConfig
from mopd.replicas.interface import LIMITS, NoReplica, Replica
from mopd.replicas.pool import Member, Pool, Want
from tests.unit.replicas.stand_in import StandIn, run

ROUTING = RoutingConfig(max_inflight_tokens=50, max_tokens_per_request=50, request_timeout_s=10.0)


def make_pool() -> Pool:
    return Pool(ROUTING, LIMITS, [Replica(name=name, engine=StandIn()) for name in "ab"])


def test_room_is_kept_for_a_request_that_has_nowhere_else_to_go() -> None:
    async def work() -> None:
        pool = make_pool()
        first, second = Want(order=0, tokens=30), Want(order=1, tokens=40)
        on_a, on_b = await pool.acquire(first), await pool.acquire(second)
        assert (on_a.name, on_b.name) == ("a", "b")
        long = asyncio.create_task(pool.acquire(Want(order=2, tokens=45, failed_on=["b"])))
        short = asyncio.create_task(pool.acquire(Want(order=3, tokens=15)))  # would fit beside the 30 tokens on a
        await asyncio.sleep(1)
        assert not long.done() and not short.done()
        pool.ended(on_a, first)
        assert (await long).name == "a"
        await asyncio.sleep(1)
        assert not short.done()
        pool.ended(on_b, second)
        assert (await short).name == "b"

    run(work)


def test_smaller_numbers_go_first_whenever_they_came() -> None:
    async def work() -> None:
        pool = make_pool()
        wants = [Want(order=i, tokens=50) for i in range(2)]
        held = [(await pool.acquire(want), want) for want in wants]
        got: list[int] = []

        async def take(order: int) -> tuple[Member, Want]:
            want = Want(order=order, tokens=50)
            member = await pool.acquire(want)
            got.append(order)
            return member, want

        waiting = [asyncio.create_task(take(order)) for order in (9, 7, 8, 5)]
        await asyncio.sleep(1)
        for _ in range(2):
            for member, want in held:
                pool.ended(member, want)
            await asyncio.sleep(1)
            held = [task.result() for task in waiting if task.done()][-2:]
        assert got == [5, 7, 8, 9]

    run(work)


def test_a_request_avoids_replicas_while_there_are_others() -> None:
    async def work() -> None:
        pool = make_pool()
        on_a = await pool.acquire(Want(order=0, tokens=10))
        on_b = await pool.acquire(Want(order=1, tokens=20, failed_on=["a"]))
        assert (on_a.name, on_b.name) == ("a", "b")
        assert (await pool.acquire(Want(order=3, tokens=5, failed_on=["a"]))).name == "b"
        both = Want(order=4, tokens=10, failed_on=["a", "b"])  # nobody is left: any will do
        assert (await pool.acquire(both)).name == "a"

    run(work)


def test_a_cancelled_wait_gives_back_what_it_was_just_given() -> None:
    async def work() -> None:
        pool = make_pool()
        wants = [Want(order=i, tokens=50) for i in range(2)]
        held = [await pool.acquire(want) for want in wants]
        waiting = asyncio.create_task(pool.acquire(Want(order=2, tokens=50)))
        await asyncio.sleep(1)
        pool.ended(held[0], wants[0])  # grants it; the task has not run since
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.member("a").in_flight_tokens == 0
        pool.ended(held[1], wants[1])

    run(work)


def test_a_wait_lasts_while_something_moves_and_no_longer() -> None:
    async def work() -> None:
        pool = make_pool()
        pool.member("b").suspended = "restarting"
        working = Want(order=0, tokens=50)
        member = await pool.acquire(working)
        waiting = asyncio.create_task(pool.acquire(Want(order=1, tokens=50, version=1)))
        await asyncio.sleep(35)  # a is at work all the time
        assert not waiting.done()
        pool.ended(member, working)
        with pytest.raises(NoReplica, match=r"in time \(a stale, b restarting\)"):
            await waiting
        assert 45 <= asyncio.get_running_loop().time() <= 56

    run(work)
