"""Who may go first: room kept for requests that cannot go elsewhere; what travels together. Simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from mopd.config.groups import RoutingConfig
from mopd.engines.interface import EngineLimits
from mopd.engines.replicas.interface import LIMITS, NO_LIMITS, NoReplica, Replica
from mopd.engines.replicas.members import Member, Room, WorkRequest
from mopd.engines.replicas.pool import Pool
from tests.fixtures.effort import measured_effort
from tests.unit.engines.replicas.stand_in import StandIn, run

ROUTING = RoutingConfig(max_inflight_tokens=50, max_tokens_per_request=50, request_timeout_s=10.0)


class Sent:
    """A pool whose requests are noted and end when they are told to."""

    def __init__(self, names: str = "ab", routing: RoutingConfig = ROUTING, limits: EngineLimits = NO_LIMITS) -> None:
        self.requests: list[tuple[str, list[WorkRequest]]] = []
        replicas = [Replica(name=name, engine=StandIn(), limits=limits) for name in names]
        self.pool: Pool[WorkRequest] = Pool(routing, LIMITS, replicas, self._note)
        self._where: dict[int, Member] = {}

    def _note(self, member: Member, wants: Sequence[WorkRequest]) -> None:
        self.requests.append((member.name, list(wants)))
        self._where |= {id(want): member for want in wants}

    async def acquire(self, want: WorkRequest) -> str:
        """The name of the replica that it was sent to."""
        await self.pool.acquire(want)
        return self._where[id(want)].name

    def end(self, want: WorkRequest) -> None:
        self.pool.ended(self._where[id(want)], want)


def want(order: int, tokens: int, *, sequences: int = 0, **keys: Any) -> WorkRequest:
    return WorkRequest(order=(order,), room=Room(tokens, sequences, tokens), **keys)


def test_room_is_kept_for_a_request_that_has_nowhere_else_to_go() -> None:
    async def work() -> None:
        sent = Sent()
        first, second = want(0, 30), want(1, 40)
        assert (await sent.acquire(first), await sent.acquire(second)) == ("a", "b")
        long = asyncio.create_task(sent.acquire(want(2, 45, failed_on=["b"])))
        short = asyncio.create_task(sent.acquire(want(3, 15)))  # would fit beside the 30 tokens on a
        await asyncio.sleep(1)
        assert not long.done() and not short.done()
        sent.end(first)
        assert await long == "a"
        await asyncio.sleep(1)
        assert not short.done()
        sent.end(second)
        assert await short == "b"

    run(work)


def test_smaller_numbers_go_first_whenever_they_came() -> None:
    async def work() -> None:
        sent = Sent()
        held = [want(i, 50) for i in range(2)]
        for one in held:
            await sent.acquire(one)
        wants = [want(order, 50) for order in (9, 7, 8, 5)]
        waiting = [asyncio.create_task(sent.acquire(one)) for one in wants]
        await asyncio.sleep(1)
        for _ in range(2):
            for one in held:
                sent.end(one)
            await asyncio.sleep(1)
            held = [one for _, (one,) in sent.requests[-2:]]
        assert [one.order for _, (one,) in sent.requests[2:]] == [(5,), (7,), (8,), (9,)]
        await asyncio.gather(*waiting)

    run(work)


def test_a_request_avoids_replicas_while_there_are_others() -> None:
    async def work() -> None:
        sent = Sent()
        assert await sent.acquire(want(0, 10)) == "a"
        assert await sent.acquire(want(1, 20, failed_on=["a"])) == "b"
        assert await sent.acquire(want(3, 5, failed_on=["a"])) == "b"
        assert await sent.acquire(want(4, 10, failed_on=["a", "b"])) == "a"  # nobody is left: any will do

    run(work)


def test_a_wait_lasts_while_something_moves_and_no_longer() -> None:
    async def work() -> None:
        sent = Sent()
        sent.pool.member("b").suspended = "restarting"
        working = want(0, 50)
        await sent.acquire(working)
        waiting = asyncio.create_task(sent.acquire(want(1, 50, version=1)))
        await asyncio.sleep(35)  # a is at work all the time
        assert not waiting.done()
        sent.end(working)
        with pytest.raises(NoReplica, match=r"in time \(a stale, b restarting\)"):
            await waiting
        assert 45 <= asyncio.get_running_loop().time() <= 56

    run(work)


async def joined(sent: Sent, wants: Sequence[WorkRequest]) -> list[tuple[str, list[int]]]:
    """Requests in which wants travel that ask at one moment."""
    await asyncio.gather(*(sent.acquire(one) for one in wants))
    return [(name, [one.order[0] for one in together]) for name, together in sent.requests]


def test_what_gets_room_at_one_moment_travels_together_by_key_and_caller() -> None:
    wide = RoutingConfig(max_inflight_tokens=1000, max_tokens_per_request=25)

    def requests(*keys: dict[str, Any], routing: RoutingConfig = wide) -> list[list[int]]:
        wants = [want(i, 10, **own) for i, own in enumerate(keys)]
        return [together for _, together in run(lambda: joined(Sent("a", routing), wants))]

    one, other = {"key": "x", "caller": 1}, {"key": "x", "caller": 2}
    assert requests(one, other) == [[0, 1]]
    assert requests(one, {**other, "key": "y"}) == [[0], [1]]
    assert requests(one, {**other, "is_counted": False}) == [[0], [1]]
    assert requests(one, one, other) == [[0, 2], [1]]  # a caller's own pieces stay apart
    assert requests({}, {}) == [[0], [1]]
    assert requests(*({"key": "x", "caller": i} for i in range(7))) == [[0, 1], [2, 3], [4, 5], [6]]  # 25 tokens


def test_a_replica_on_trial_gets_one_request_of_one_caller() -> None:
    async def work() -> None:
        sent = Sent("a")
        for _ in range(LIMITS.breaker_failures):
            sent.pool.member("a").breaker.failed(sent.pool.now())
        tasks = [asyncio.create_task(sent.acquire(want(i, 5, key="x", caller=i))) for i in range(3)]
        await asyncio.sleep(LIMITS.breaker_reset_s + 1)
        assert [len(together) for _, together in sent.requests] == [1]
        sent.pool.member("a").breaker.succeeded()
        sent.end(sent.requests[0][1][0])
        await asyncio.gather(*tasks)
        assert [len(together) for _, together in sent.requests] == [1, 2]

    run(work)


def test_requests_keep_to_the_replicas_own_limit() -> None:
    limits = EngineLimits(max_tokens_per_request=10)
    wants = [want(i, 5, key="x", caller=i) for i in range(5)]
    requests = run(lambda: joined(Sent("a", limits=limits), wants))
    assert requests == [("a", [0, 1]), ("a", [2, 3]), ("a", [4])]


def test_a_replica_is_filled_up_to_a_spare_once_its_own_queue_is_empty() -> None:
    """16 sequences at a time: 2 wait at it, and what ends is replaced by 2 at a time."""
    wide = RoutingConfig(max_inflight_tokens=1000, max_tokens_per_request=1000)

    async def work() -> None:
        sent = Sent("a", wide, EngineLimits(max_sequences=16))
        wants = [want(i, 5, sequences=1, key="x", caller=i) for i in range(30)]
        tasks = [asyncio.create_task(sent.acquire(one)) for one in wants]
        for ended in (0, 1, 2):
            await asyncio.sleep(1)
            assert [len(together) for _, together in sent.requests] == ([18] if ended < 2 else [18, 2])
            sent.end(wants[ended])
        for one in wants[3:18]:
            sent.end(one)
        await asyncio.sleep(1)
        assert all(task.done() for task in tasks)
        assert sum(len(together) for _, together in sent.requests) == 30

    run(work)


def test_prompts_count_by_what_the_engine_says_it_holds() -> None:
    """Given sequences go by ``max_inflight_tokens``, whatever the engine holds of drawn ones."""
    for sequences, most in ((1, 8), (0, 5)):
        sent = Sent("a", limits=EngineLimits(max_running_tokens=80))
        wants = [want(i, 10, sequences=sequences) for i in range(20)]

        async def work(sent: Sent = sent, wants: Sequence[WorkRequest] = wants) -> int:
            tasks = [asyncio.create_task(sent.acquire(one)) for one in wants]
            await asyncio.sleep(1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return len(sent.requests)

        assert run(work) == most


def test_thousands_that_wait_cost_no_more_than_a_few() -> None:
    """Looks at 4,096 that wait, each for one that ended, take as many calls as looks at 256."""

    def calls(num_waiting: int, num_looks: int = 200) -> int:
        async def work() -> int:
            sent = Sent("abcd", RoutingConfig(max_inflight_tokens=64, max_tokens_per_request=16))
            wants = [want(i, 1, version=0, key="x", caller=i) for i in range(num_waiting + 256)]
            tasks = [asyncio.create_task(sent.acquire(one)) for one in wants]
            await asyncio.sleep(1)
            assert sum(len(together) for _, together in sent.requests) == 256
            with measured_effort() as effort:
                for one in wants[:num_looks]:
                    sent.end(one)
                    await asyncio.sleep(0)
            assert sum(len(together) for _, together in sent.requests) == min(256 + num_looks, len(wants))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert sent.pool._num_waiting == 0 and not sent.pool._demands
            return effort.calls

        return int(run(work))

    few, many = calls(256), calls(4096)
    assert many < 2 * few, (few, many)
