"""Many callers at once: what they ask travels together, and each gets its own answers, one by one. Simulated clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mopd.engines.interface import (
    EngineRejected,
    EngineUnavailable,
    Generation,
    SamplingParams,
    Scores,
    ToDraw,
    ToScore,
)
from mopd.engines.replicas.interface import SampleFailed
from mopd.engines.replicas.members import NO_ROOM
from tests.unit.engines.replicas.stand_in import (
    SAMPLING,
    StandIn,
    Teller,
    callers,
    check_scores,
    generate,
    make_rollout,
    make_router,
    run,
    samples,
    score,
    settle,
)

DEAD = EngineUnavailable("connection reset")
LENGTHS = [2 + (i * i * 7 + 3 * i) % 37 for i in range(24)]
FIRST = [[3], [23], [2], [7], [19], [11], [15], [8], [18], [10], [16], [4, 22]]
RECORDED = {
    "teacher": [*FIRST, [6, 20, 1], [12, 14, 5, 21, 9], [17, 13, 0]],
    "rollout": [*FIRST, [6, 20], [1, 12], [14, 5, 21], [9, 17, 13, 0]],
}
"""Requests of one caller as routers sent them before any were joined, 40 tokens a request: whole steps with engines in
the trainer's process repeat bit for bit."""


@pytest.mark.parametrize("max_inflight_tokens", [80, 100_000])
@pytest.mark.parametrize("kind", RECORDED)
def test_a_callers_own_requests_are_never_joined(kind: str, max_inflight_tokens: int) -> None:
    engine = StandIn()
    router = make_router([engine], kind=kind, max_inflight_tokens=max_inflight_tokens)

    async def work() -> None:
        if kind == "teacher":
            await score(router, *samples(*LENGTHS))
        else:
            router.set_weight_version(0)
            prompts = [[1000 + i] * length for i, length in enumerate(LENGTHS)]
            await router.generate(ToDraw(prompts, SAMPLING, list(range(len(prompts)))))

    run(work)
    assert [[first - 1000 for first in call] for call in engine.calls] == RECORDED[kind]


def test_each_response_is_its_callers_as_soon_as_it_is_told() -> None:
    engine = Teller()
    router = make_rollout([engine])
    ended: dict[int, float] = {}
    heard: list[tuple[int, float]] = []

    def now() -> float:
        return asyncio.get_running_loop().time()

    async def one(who: int, *seconds: float) -> None:
        told = (lambda i, given: heard.append((i, now()))) if who == 3 else None
        await generate(router, [(who, s) for s in seconds], on_response=told)
        ended[who] = now()

    async def work() -> None:
        await asyncio.gather(one(1, 9.0), one(2, 1.0), one(3, 2.0, 4.0), one(4, 1.5))
        numbers = router.take_numbers().replicas[0]
        assert numbers.num_samples == 5
        assert [round(value) for value in numbers.latencies_s] == [1, 2, 2, 4, 9]
        await settle(router, [engine])

    run(work)
    assert [len(call) for call in engine.calls] == [5]
    assert {who: round(at, 1) for who, at in ended.items()} == {1: 9.0, 2: 1.0, 3: 4.0, 4: 1.5}
    assert [(i, round(at)) for i, at in heard] == [(0, 2), (1, 4)]


def test_only_what_was_not_told_is_asked_again() -> None:
    engines = [Teller(0, lambda call: DEAD), Teller(1)]
    router = make_rollout(engines, breaker_failures=1)

    async def work() -> None:
        tasks = callers(router, *([(i, 1.0 + i)] for i in range(12)))
        await asyncio.gather(*tasks)
        numbers = router.take_numbers()
        assert [replica.num_samples for replica in numbers.replicas] == [3, 9]
        assert (numbers.replicas[0].failures, numbers.retries) == (1, 3)
        await settle(router, engines)

    run(work)
    first, *again = engines[0].calls
    assert sorted(first) == [0, 2, 4, 6, 8, 10] and again == []
    assert engines[0].told == [0, 2, 4] and sorted(engines[1].told) == [1, 3, 5, 6, 7, 8, 9, 10, 11]
    assert sorted(engines[1].calls[1:]) == [[6], [8], [10]]  # alone: one of them may be at fault


class Garbler(Teller):
    """Tells an impossible response for 13."""

    def _draw(self, prompt: Sequence[int], sampling: SamplingParams, seed: int) -> Generation:
        drawn = super()._draw(prompt, sampling, seed)
        if prompt[0] == 13:
            drawn.logprobs[0] = torch.nan
        return drawn


def test_a_told_response_that_cannot_be_is_its_replicas_failure() -> None:
    engines = [Garbler(0), Teller(1)]
    router = make_rollout(engines)

    async def work() -> None:
        await asyncio.gather(*callers(router, [(11, 1.0)], [(0, 9.0)], [(13, 2.0)], [(0, 9.0)], [(12, 3.0)]))
        numbers = router.take_numbers()
        assert [replica.failures for replica in numbers.replicas] == [1, 0]
        assert [replica.num_samples for replica in numbers.replicas] == [1, 4]
        await settle(router, engines)

    run(work)
    assert engines[0].calls == [[11, 13, 12]] and engines[0].told == [11, 13]


class Refuser(Teller):
    """Refuses, as ``error``, any request that holds 13."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def generate(self, asked: ToDraw, **more: Any) -> list[Generation]:
        if any(prompt[0] == 13 for prompt in asked.prompts):
            self.calls.append([prompt[0] for prompt in asked.prompts])
            raise self.error
        return await super().generate(asked, **more)


@pytest.mark.parametrize("error", [EngineRejected("longer than the model"), ZeroDivisionError("a bug")], ids=repr)
def test_a_refused_joint_request_fails_its_bad_caller_alone(error: Exception) -> None:
    engine = Refuser(error)
    router = make_rollout([engine])

    async def work() -> None:
        tasks = callers(router, [(11, 1.0)], [(13, 1.0)], [(12, 1.0)])
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(outcome, list) for outcome in outcomes] == [True, False, True]
        expected: Any = SampleFailed if isinstance(error, EngineRejected) else ZeroDivisionError
        assert isinstance(outcomes[1], expected) and str(error) in str(outcomes[1])
        assert router.take_numbers().replicas[0].state == "closed"
        await settle(router, [engine])

    run(work)
    assert engine.calls == [[11, 13, 12], [11], [13], [12]]


class Picky(StandIn):
    """Refuses any request that holds the sample 1003."""

    async def score(self, asked: ToScore) -> list[Scores]:
        if any(int(sequence[0]) == 1003 for sequence in asked.tokens):
            raise EngineRejected("sequence longer than the model")
        return await super().score(asked)


@pytest.mark.parametrize("stops", [True, False])
def test_every_caller_decides_for_itself_what_a_failure_means(stops: bool) -> None:
    tokens, _ = samples(*[4] * 6)
    engine = Picky()
    router = make_router([engine], max_tokens_per_request=100, max_inflight_tokens=100)

    async def one(positions: Sequence[int], stop_at_failure: bool) -> Any:
        mine = [tokens[i] for i in positions]
        return await router.score(
            ToScore(mine, [1] * len(mine), top_k=2, temperature=2.0), stop_at_failure=stop_at_failure
        )

    async def work() -> None:
        first, bad, last = await asyncio.gather(
            one([0, 1], True), one([2, 3], stops), one([4, 5], True), return_exceptions=True
        )
        check_scores(tokens[:2], first)
        check_scores(tokens[4:], last)
        if stops:
            assert isinstance(bad, SampleFailed) and bad.positions == (1,)
        else:
            check_scores(tokens[2:3], bad[:1])
            assert isinstance(bad[1], SampleFailed) and bad[1].positions == (1,)

    run(work)
    assert sorted(engine.calls) == [[1000, 1001], [1002], [1004, 1005]]  # and what it refused


def test_a_cancelled_caller_takes_its_samples_out_and_no_others() -> None:
    engine = Teller()
    router = make_rollout([engine], max_sequences=2)

    async def work() -> None:
        tasks = callers(router, *([(i, 4.0)] for i in range(8)))
        await asyncio.sleep(1)
        assert engine.running == 3
        for task in (tasks[1], tasks[4]):  # under way, and waiting
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(outcome, list) for outcome in outcomes] == [i not in (1, 4) for i in range(8)]
        assert router.take_numbers().replicas[0].num_samples == 6
        tasks = callers(router, [(20, 9.0)], [(21, 9.0)])
        await asyncio.sleep(1)
        for task in tasks:
            assert engine.running == 2  # until its last caller has gone
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert engine.running == 0 and router._pool.members[0].in_flight == NO_ROOM
        await settle(router, [engine])

    run(work)
    assert 4 not in engine.told and sorted(engine.told) == [0, 1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("num_callers", [400, 1])
def test_a_replica_never_runs_dry_and_gets_few_requests(num_callers: int) -> None:
    """Heavy-tailed responses to 400 prompts, of one caller each or all of one's, on an engine of 32 sequences."""
    engine = Teller()
    router = make_rollout([engine], max_sequences=32)
    prompts = [(i, min(random.Random(i).paretovariate(1.2), 20.0)) for i in range(400)]

    async def work() -> None:
        tasks = callers(router, *(prompts[i::num_callers] for i in range(num_callers)))
        await asyncio.sleep(0.5)
        while router._pool._waiters:
            assert 32 <= engine.running <= 36
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        await settle(router, [engine])

    run(work)
    assert engine.most_running == 36 and len(engine.calls) <= 101


def test_a_version_is_at_least() -> None:
    """Replicas with newer weights serve those who ask for older ones, not the other way round."""
    engines = [Teller(0), Teller(1)]
    router = make_rollout(engines)

    async def work() -> None:
        engines[0].weight_version, engines[1].weight_version = 3, 5
        router.set_weight_version(4)
        assert router.needs_weights == ("rollout.0",) and router.lacking(3) == ()
        await asyncio.gather(*callers(router, [(1, 1.0)], [(2, 1.0)]))
        await settle(router, engines)

    run(work)
    assert engines[0].calls == [] and engines[1].calls == [[1, 2]]
