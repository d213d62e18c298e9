"""Replicas that are restarted, replaced, added, given up; weight versions of rollout replicas. Simulated clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from mopd.base.types import UserError
from mopd.engines.interface import EngineUnavailable, Generation, StaleWeights, ToDraw
from mopd.engines.replicas.interface import Replica, SampleFailed
from mopd.engines.replicas.router import Router
from tests.unit.engines.replicas.stand_in import (
    SAMPLING,
    StandIn,
    Teller,
    callers,
    check_scores,
    make_rollout,
    make_router,
    run,
    samples,
    score,
)

DEAD = EngineUnavailable("connection reset")
WEIGHTS = [("w", torch.zeros(1))]


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_restart_is_waited_for_and_nothing_is_lost() -> None:
    tokens, starts = samples(*[20] * 12)
    dying, restarted = StandIn(0, lambda call: DEAD if call else None), StandIn(1)
    router = make_router([dying])

    async def work() -> None:
        scoring = asyncio.create_task(score(router, tokens, starts))
        await asyncio.sleep(0.3)
        router.suspend("math.0", reason="restarting after exit code -9", timeout_s=100)
        await asyncio.sleep(60)  # longer than a request may take
        assert not scoring.done()
        router.replace("math.0", restarted)
        check_scores(tokens, await scoring)
        assert router.take_numbers().replicas[0].state == "closed"

    run(work)
    assert sorted(dying.answered + restarted.answered) == [1000 + i for i in range(12)]


def test_a_replica_that_never_comes_back_ends_the_wait() -> None:
    router = make_router([StandIn(0, lambda call: DEAD)], breaker_failures=9)
    tokens, starts = samples(5)

    async def work() -> None:
        scoring = asyncio.create_task(score(router, tokens, starts))
        await asyncio.sleep(0.1)
        router.suspend("math.0", reason="restarting after exit code -9", timeout_s=50)
        with pytest.raises(SampleFailed, match=r"connection reset; then .*\(math.0 restarting after exit code -9\)"):
            await scoring
        assert now() == pytest.approx(50.1, abs=0.1)

    run(work)


def test_the_last_replica_given_up_ends_every_wait_at_once() -> None:
    router = make_router([StandIn(0, lambda call: DEAD), StandIn(1, lambda call: DEAD)], breaker_failures=1)
    tokens, starts = samples(*[30] * 5)

    async def work() -> None:
        scoring = asyncio.create_task(score(router, tokens, starts))
        await asyncio.sleep(0.1)
        router.remove("math.1", reason="it died 4 times")
        router.remove("math.0", reason="it died 3 times")
        with pytest.raises(SampleFailed, match=r"no replica is left \(math.0 is gone: it died 3 times\)"):
            await scoring
        assert now() < 1.1
        with pytest.raises(SampleFailed, match="no replica was tried; last error: no replica is left"):
            await score(router, tokens, starts)
        assert [replica.state for replica in router.take_numbers().replicas] == ["gone", "gone"]
        with pytest.raises(KeyError):
            router.replace("math.0", StandIn())

    run(work)


def test_late_failures_of_the_old_life_do_not_count_against_the_new_one() -> None:
    old, new = StandIn(0, lambda call: 3.0), StandIn(1)
    router = make_router([old], request_timeout_s=1.0, breaker_failures=1)
    tokens, starts = samples(20)

    async def work() -> None:
        scoring = asyncio.create_task(score(router, tokens, starts))
        await asyncio.sleep(0.5)
        router.replace("math.0", new)
        check_scores(tokens, await scoring)
        assert now() == pytest.approx(1.0 + 0.5 + 0.2, abs=0.01)  # no breaker in the way
        numbers = router.take_numbers()
        assert numbers.replicas[0].failures == 1 and numbers.replicas[0].state == "closed"

    run(work)


def test_a_closed_group_takes_no_work() -> None:
    router = make_router([StandIn(0, lambda call: 5.0)], max_inflight_tokens=40)
    tokens, starts = samples(40, 40)

    async def work() -> None:
        scoring = asyncio.create_task(score(router, tokens, starts))
        await asyncio.sleep(0.1)
        await router.close()
        with pytest.raises(SampleFailed, match="the group is closed"):
            await scoring

    run(work)


class Hanging(Teller):
    """Tells its responses, and then does not end the request."""

    async def generate(self, *args: Any, **kwargs: Any) -> list[Generation]:
        await super().generate(*args, **kwargs)
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody has woken it")


def test_a_closed_group_answers_whoever_still_waits_and_ends_what_nobody_waits_for() -> None:
    router = make_rollout([Hanging(0), Teller(1)])

    async def work() -> None:
        done, waiting = callers(router, [(1, 1.0)], [(2, 5.0)])
        await done
        assert now() == pytest.approx(1.0) and len(router._requests) == 2
        await router.close()
        assert now() == pytest.approx(1.0) and len(router._requests) == 1
        await waiting
        assert now() == pytest.approx(5.0)
        await asyncio.sleep(0.01)  # its request ends in the turn after its caller's

    run(work)


async def push(router: Router, version: int) -> None:
    """To every replica that works."""
    for member in router._pool.members:
        if member.suspended is None:
            assert isinstance(member.engine, StandIn)
            await member.engine.load_weights(WEIGHTS, version)
    router.set_weight_version(version)


def test_a_replica_that_says_it_is_stale_is_left_out_until_the_next_push() -> None:
    """The far side was restarted behind the engine's back: only its answer tells."""
    stale, current = StandIn(0, lambda call: StaleWeights("serves -1, not 3") if call < 4 else None), StandIn(1)
    router = make_router([stale, current], kind="rollout", max_tokens_per_request=10, max_inflight_tokens=10)

    async def work() -> None:
        await push(router, 3)
        await router.generate(ToDraw([[5]] * 8, SAMPLING, list(range(8))))
        assert len(stale.calls) == 4 and len(current.answered) == 8  # half of them were under way at once
        assert router.needs_weights == ("math.0",)
        numbers = router.take_numbers()
        assert (numbers.replicas[0].stale_answers, numbers.replicas[0].failures, numbers.retries) == (4, 0, 4)
        await push(router, 3)  # the same version once more
        assert router.needs_weights == ()
        await router.generate(ToDraw([[5]] * 8, SAMPLING, list(range(8))))
        assert len(stale.calls) > 4

    run(work)


def test_a_single_stale_replica_is_waited_for_until_the_push_and_not_for_ever() -> None:
    engine = StandIn(0)
    router = make_router([engine], kind="rollout")

    async def work() -> None:
        await push(router, 3)
        engine.weight_version = -1
        generating = asyncio.create_task(router.generate(ToDraw([[5]], SAMPLING, [1])))
        await asyncio.sleep(5)
        await engine.load_weights(WEIGHTS, 3)
        router.set_weight_version(3)
        assert len(await generating) == 1
        engine.weight_version = -1
        with pytest.raises(SampleFailed, match=r"rollout 'math' .* no replica was tried; .*\(math.0 stale\)"):
            await router.generate(ToDraw([[5]], SAMPLING, [1]))
        assert now() == pytest.approx(15, abs=0.5)

    run(work)


def test_weights_do_not_wait_for_a_replica_that_restarts() -> None:
    engines = [StandIn(0), StandIn(1)]
    router = make_router(engines, kind="rollout")

    async def work() -> None:
        router.suspend("math.1", reason="restarting", timeout_s=5)
        await push(router, 3)
        assert [engine.weight_version for engine in engines] == [3, 0]
        router.replace("math.1", engines[1])
        assert router.needs_weights == ("math.1",)

    run(work)


def test_one_more_replica_takes_its_share_of_what_waits() -> None:
    first, second = StandIn(0), StandIn(1)
    router = make_router([first], max_inflight_tokens=40)
    tokens, starts = samples(*[40] * 10)

    async def work() -> None:
        scoring = asyncio.create_task(score(router, tokens, starts))
        await asyncio.sleep(0.9)
        router.add(Replica(name="math.1", engine=second))
        check_scores(tokens, await scoring)
        assert now() == pytest.approx(0.4 * 10 / 2 + 0.4, abs=0.3)  # alone it would take 4 s
        numbers = {replica.name: replica.num_samples for replica in router.take_numbers().replicas}
        assert sum(numbers.values()) == 10 and numbers["math.1"] >= 3
        with pytest.raises(ValueError, match=r"two replicas have one name: math\.1"):
            router.add(Replica(name="math.1", engine=StandIn(2)))

    run(work)
    assert sorted(first.answered + second.answered) == [1000 + i for i in range(10)]


def test_a_dead_replicas_requests_go_elsewhere_at_once() -> None:
    """A machine that lost its power closes no connection: its requests would wait for their deadline."""
    dead, other = StandIn(0, lambda call: 1000.0), StandIn(1)
    router = make_router([dead, other], request_timeout_s=500.0)
    tokens, starts = samples(*[20] * 8)

    async def work() -> None:
        scoring = asyncio.create_task(score(router, tokens, starts))
        await asyncio.sleep(1)
        router.suspend("math.0", reason="is silent", timeout_s=100, is_dead=True)
        check_scores(tokens, await scoring)
        assert now() < 5
        assert router.take_numbers().replicas[0].failures > 0

    run(work)
    assert sorted(other.answered) == [1000 + i for i in range(8)] and not dead.answered


def test_a_group_that_failed_says_why_to_all_that_wait_and_come() -> None:
    router = make_router([StandIn(0)])
    tokens, starts = samples(5)

    async def work() -> None:
        router.suspend("math.0", reason="is gone", timeout_s=1000)
        scoring = asyncio.create_task(score(router, tokens, starts))
        await asyncio.sleep(20)
        assert not scoring.done()
        router.fail(UserError("too few are left"))
        for asked in (scoring, score(router, tokens, starts)):
            with pytest.raises(UserError, match="too few are left"):
                await asked
        assert now() == 20

    run(work)
