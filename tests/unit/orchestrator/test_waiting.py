"""The wait for a batch contains requests, with their attempts and restarts of replicas: it never ends before them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mopd.base.types import Prompt, UserError
from mopd.engines.interface import EngineUnavailable
from mopd.engines.replicas.interface import SampleFailed
from mopd.engines.replicas.router import Router
from mopd.orchestrator.ledger import Ledger, Slot
from mopd.orchestrator.training import extend_wait_for_batch
from mopd.rewards.domains import DomainRewards
from mopd.rewards.interface import Graded, RewardItem
from tests.fixtures.samples import meta_of
from tests.unit.engines.replicas.stand_in import StandIn, make_router, run, samples, score

DEADLINE_S = 15.0
"""Longer than one attempt (10 s), shorter than two."""


def ledger_of(router: Router, rewards: Any = None) -> Ledger:
    ledger = Ledger(prompts_per_step=1, max_staleness=0, step=0)
    ledger.admit([Prompt(sample_id=0, domain="math", row=0)])
    workers: Any = SimpleNamespace(
        routers={"rollout": router}, inputs=SimpleNamespace(rewards=rewards, environments=None), plane=None
    )
    extend_wait_for_batch(ledger, workers)
    return ledger


async def taken_while(ledger: Ledger, work: Callable[[], Awaitable[Any]]) -> tuple[list[Slot], float]:
    """The batch, which is complete with the end of ``work``, and the time of that."""

    async def sample() -> None:
        await work()
        assert ledger.complete(ledger.slots[0], [meta_of(0, "math")])

    task = asyncio.ensure_future(sample())
    try:
        slots = await ledger.take(timeout_s=DEADLINE_S)
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return slots, asyncio.get_running_loop().time()


def test_attempts_together_may_take_longer_than_the_deadline() -> None:
    router = make_router([StandIn(plan=lambda call: 100.0 if call < 2 else None)])
    ledger = ledger_of(router)
    slots, ended = run(lambda: taken_while(ledger, lambda: score(router, *samples(8))))
    assert len(slots) == 1 and ended > 2 * 10.0 > DEADLINE_S


def test_a_restart_may_take_longer_than_the_deadline() -> None:
    router = make_router([StandIn()])
    ledger = ledger_of(router)

    async def work() -> None:
        router.suspend("math.0", reason="is being restarted", timeout_s=200.0)
        asyncio.get_running_loop().call_later(150.0, router.replace, "math.0", StandIn())
        await score(router, *samples(8))

    slots, ended = run(lambda: taken_while(ledger, work))
    assert len(slots) == 1 and ended > 150.0


def test_a_request_that_nobody_answers_ends_by_its_own_line() -> None:
    """Its attempts are counted: the wait for the batch ends with them, and the line names the replica."""
    engine = StandIn(plan=lambda call: 1000.0)
    router = make_router([engine], breaker_failures=9)
    ledger = ledger_of(router)

    async def work() -> None:
        failing = asyncio.ensure_future(score(router, *samples(8)))
        taking = asyncio.ensure_future(ledger.take(timeout_s=DEADLINE_S))
        with pytest.raises(SampleFailed, match=r"3 attempts on math.0.*no answer within 10 s"):
            await failing
        ended = asyncio.get_running_loop().time()
        assert not taking.done()
        with pytest.raises(UserError, match=r"waited 15 s \(schedule.wait_timeout_s\)"):
            await taking
        assert asyncio.get_running_loop().time() - ended == pytest.approx(DEADLINE_S, abs=0.1)

    run(work)
    assert len(engine.calls) == 3


def test_a_replica_that_is_given_up_ends_the_wait_by_its_own_line() -> None:
    router = make_router([StandIn()])
    ledger = ledger_of(router)

    async def work() -> None:
        router.suspend("math.0", reason="is being restarted", timeout_s=200.0)
        asyncio.get_running_loop().call_later(100.0, lambda: router.remove("math.0", reason="restarts: 3 of 3"))
        await score(router, *samples(8))

    async def both() -> None:
        taking = asyncio.ensure_future(ledger.take(timeout_s=DEADLINE_S))
        with pytest.raises(SampleFailed, match="restarts: 3 of 3"):
            await work()
        assert not taking.done()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)

    run(both)


def test_rewards_may_take_longer_than_the_deadline() -> None:
    class Slow:
        def check(self, item: RewardItem) -> None: ...

        async def __call__(self, items: Sequence[RewardItem]) -> list[Graded]:
            await asyncio.sleep(100.0)
            return [Graded(1.0, None)] * len(items)

        def close(self) -> None: ...

    rewards = DomainRewards({}, {"default": Slow()})
    ledger = ledger_of(make_router([StandIn()]), rewards)
    item: Any = SimpleNamespace(domain="math")
    _, ended = run(lambda: taken_while(ledger, lambda: rewards.score([item])))
    assert ended == pytest.approx(100.0, abs=0.1)


def test_a_prompt_that_nothing_works_on_is_late_at_the_deadline() -> None:
    router = make_router([StandIn(plan=lambda call: EngineUnavailable("down") if call == 0 else None)])
    ledger = ledger_of(router)

    async def work() -> None:
        await score(router, *samples(8))
        await asyncio.sleep(1000.0)

    with pytest.raises(UserError, match=r"waited 15 s \(schedule.wait_timeout_s\) for the 1 prompts of step 1"):
        run(lambda: taken_while(ledger, work))
