"""Many callers at once: what they ask travels together, and each gets its own answers, one by one. Simulated clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.config.groups import RoutingConfig
from mopd.engines.interface import (
    EngineBusy,
    EngineLimits,
    EngineRejected,
    EngineUnavailable,
    Generation,
    SamplingParams,
    Scores,
    Told,
)
from mopd.metrics import apart
from mopd.replicas.interface import Replica, RouterLimits, SampleFailed
from mopd.replicas.members import NO_ROOM
from mopd.replicas.router import Router
from tests.unit.replicas.stand_in import SAMPLING, StandIn, Teller, check_scores, make_router, run, samples, score

DEAD = EngineUnavailable("connection reset")
Prompt = tuple[int, float]
"""Who it is, and the seconds that its response takes: see ``Teller``."""


def now() -> float:
    return asyncio.get_running_loop().time()


def make_rollout(
    engines: Sequence[Any], *, max_sequences: int | None = None, max_tokens_per_request: int = 1000, **limits: Any
) -> Router:
    router = Router(
        "rollout",
        [
            Replica(name=f"rollout.{i}", engine=engine, limits=EngineLimits(max_sequences=max_sequences))
            for i, engine in enumerate(engines)
        ],
        RoutingConfig(max_tokens_per_request=max_tokens_per_request, max_inflight_tokens=10_000, request_timeout_s=30),
        kind="rollout",
        limits=RouterLimits(**{"breaker_reset_s": 1.0, **limits}),
    )
    router.weight_version = 0
    return router


async def generate(
    router: Router, prompts: Sequence[Prompt], sampling: SamplingParams = SAMPLING, told: Told | None = None
) -> list[Generation]:
    """One caller; its answers are its own."""
    seeds = [7 * who for who, _ in prompts]
    drawn = await router.generate(prompts, sampling, seeds, told=told)  # type: ignore[arg-type]
    assert [int(given.tokens[0]) for given in drawn] == [8 * who for who, _ in prompts]
    assert all(float(given.logprobs[0]) == -sampling.temperature for given in drawn)
    return drawn


def callers(router: Router, *calls: Sequence[Prompt]) -> list[asyncio.Task[list[Generation]]]:
    return [asyncio.create_task(generate(router, prompts)) for prompts in calls]


async def settle(router: Router, engines: Sequence[Any]) -> None:
    """Nothing is left behind: no room, nobody who waits, no work."""
    await router.close()
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not router._pool._waiters and not router._requests
    assert all(engine.tokens_now == 0 and getattr(engine, "running", 0) == 0 for engine in engines)


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
            await router.generate(prompts, SAMPLING, list(range(len(prompts))))

    run(work)
    assert [[first - 1000 for first in call] for call in engine.calls] == RECORDED[kind]


def test_each_response_is_its_callers_as_soon_as_it_is_told() -> None:
    engine = Teller()
    router = make_rollout([engine])
    ended: dict[int, float] = {}
    heard: list[tuple[int, float]] = []

    async def one(who: int, *seconds: float) -> None:
        told = (lambda i, given: heard.append((i, now()))) if who == 3 else None
        await generate(router, [(who, s) for s in seconds], told=told)
        ended[who] = now()

    async def work() -> None:
        await asyncio.gather(one(1, 9.0), one(2, 1.0), one(3, 2.0, 4.0), one(4, 1.5))
        numbers = router.take_numbers().replicas[0]
        assert (numbers.num_requests, numbers.num_samples) == (1, 5)
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

    async def generate(self, prompts: Any, sampling: Any, seeds: Any, *, told: Told | None = None) -> list[Generation]:
        if any(prompt[0] == 13 for prompt in prompts):
            self.calls.append([prompt[0] for prompt in prompts])
            raise self.error
        return await super().generate(prompts, sampling, seeds, told=told)


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

    async def score(self, tokens: Any, prompt_lengths: Any, *, top_k: int, temperature: float) -> list[Scores]:
        if any(int(sequence[0]) == 1003 for sequence in tokens):
            raise EngineRejected("sequence longer than the model")
        return await super().score(tokens, prompt_lengths, top_k=top_k, temperature=temperature)


@pytest.mark.parametrize("stops", [True, False])
def test_every_caller_decides_for_itself_what_a_failure_means(stops: bool) -> None:
    tokens, _ = samples(*[4] * 6)
    engine = Picky()
    router = make_router([engine], max_tokens_per_request=100, max_inflight_tokens=100)

    async def one(positions: Sequence[int], stop_at_failure: bool) -> Any:
        mine = [tokens[i] for i in positions]
        return await router.score(mine, [1] * len(mine), top_k=2, temperature=2.0, stop_at_failure=stop_at_failure)

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


def test_a_replica_never_runs_dry_and_gets_few_requests() -> None:
    """Heavy-tailed responses to 400 callers, on an engine of 32 sequences."""
    engine = Teller()
    router = make_rollout([engine], max_sequences=32)
    seconds = [random.Random(i).paretovariate(1.2) for i in range(400)]

    async def work() -> None:
        tasks = callers(router, *([(i, min(s, 20.0))] for i, s in enumerate(seconds)))
        await asyncio.sleep(0.5)
        while router._pool._waiters:
            assert 32 <= engine.running <= 36
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        await settle(router, [engine])

    run(work)
    assert engine.most_running == 36 and len(engine.calls) <= 400 / 4


def test_one_caller_keeps_a_replica_full_too() -> None:
    """Of 300 short prompts, which would fit into one request."""
    engine = Teller()
    router = make_rollout([engine], max_sequences=32)
    seconds = [min(random.Random(i).paretovariate(1.2), 20.0) for i in range(300)]

    async def work() -> None:
        task = asyncio.create_task(generate(router, list(enumerate(seconds))))
        await asyncio.sleep(0.5)
        while router._pool._waiters:
            assert 32 <= engine.running <= 36
            await asyncio.sleep(0.01)
        await task
        await settle(router, [engine])

    run(work)
    assert max(map(len, engine.calls)) == 4 and len(engine.calls) <= 80


def test_long_responses_do_not_take_the_room_of_the_whole_group() -> None:
    """256 sequences at a time with 16k tokens each, where the old bound by the longest response left 7."""
    engine = Teller()
    sampling = SamplingParams(max_new_tokens=16_384)
    router = Router(
        "rollout",
        [Replica(name="rollout.0", engine=engine, limits=EngineLimits(max_sequences=256, max_running_tokens=400_000))],
        RoutingConfig(),
        kind="rollout",
    )
    router.weight_version = 0

    async def work() -> None:
        tasks = [
            asyncio.create_task(router.generate([(i, 5.0, *[1] * 198)] * 4, sampling, [0] * 4))  # type: ignore[list-item]
            for i in range(100)
        ]
        await asyncio.sleep(1)
        assert engine.running == 288
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settle(router, [engine])

    run(work)


class HandingBack(Teller):
    """Hands every response back: 11's before its first token."""

    def _draw(self, prompt: Sequence[int], sampling: SamplingParams, seed: int) -> Generation:
        whole = super()._draw(prompt, sampling, seed)
        count = 0 if prompt[0] == 11 else 2
        cut = {name: getattr(whole, name)[:count] for name in ("tokens", "logprobs", "token_versions")}
        return Generation(**cut, finish_reason="handed_back")


def test_responses_that_are_handed_back_pass_as_they_are() -> None:
    router = make_rollout([HandingBack()])

    async def work() -> None:
        drawn = await router.generate([(11, 1.0), (12, 1.0)], SAMPLING, [0, 0])  # type: ignore[list-item]
        assert [(len(given.tokens), given.finish_reason) for given in drawn] == [(0, "handed_back"), (2, "handed_back")]

    run(work)


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


def test_checks_beside_a_step_travel_by_themselves() -> None:
    engine = Teller()
    router = make_rollout([engine])

    async def check() -> None:
        with apart():
            await generate(router, [(9, 1.0)])

    async def work() -> None:
        await asyncio.gather(*callers(router, [(1, 1.0)]), check(), *callers(router, [(2, 1.0)]))
        assert router.take_numbers().replicas[0].num_samples == 2
        await settle(router, [engine])

    run(work)
    assert sorted(engine.calls) == [[1, 2], [9]]


TROUBLE = {
    "dead": DEAD,
    "busy": EngineBusy("full", retry_after_s=0.2),
    "slow": 0.7,
    "hang": 1e6,
    "bug": EngineRejected("too long"),
    "ok": None,
}
EVENTS = st.lists(st.sampled_from(["dead", "busy", "slow", "hang", "ok", "ok"]), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    plans=st.lists(EVENTS, min_size=1, max_size=3),
    calls=st.lists(
        st.tuples(
            st.floats(0, 3),  # when it comes
            st.integers(1, 4),  # its samples
            st.sampled_from([None, None, 0.0, 0.5, 2.0]),  # when it is cancelled, if it is
            st.booleans(),  # greedy, another kind of work
        ),
        min_size=1,
        max_size=30,
    ),
    draw=st.randoms(use_true_random=False),
    tells=st.booleans(),
)
def test_whatever_happens_every_caller_gets_its_own_answers_once(
    plans: list[list[str]], calls: list[tuple[float, int, float | None, bool]], draw: random.Random, tells: bool
) -> None:
    """One replica is well. Callers come, are joined, fail and go: nothing is lost, doubled, mixed up or left behind."""
    engines = [Teller(0)]
    for number, plan in enumerate(plans, start=1):
        engines.append(Teller(number, lambda call, plan=plan: TROUBLE[plan[call % len(plan)]]))  # type: ignore[misc]
    shown = engines if tells else [Silent(engine) for engine in engines]
    router = make_rollout(shown, max_sequences=8, max_tokens_per_request=40, max_attempts=1000)
    heard: list[list[int]] = [[] for _ in calls]
    numbers = iter(range(1, 1000))
    prompts = [[(next(numbers), min(draw.expovariate(1.0), 5.0)) for _ in range(count)] for _, count, _, _ in calls]

    async def one(number: int) -> int:
        start, count, cancelled, greedy = calls[number]
        sampling = SamplingParams(max_new_tokens=5, temperature=0.0 if greedy else 1.0)
        await asyncio.sleep(start)
        task = asyncio.create_task(
            generate(router, prompts[number], sampling, told=lambda i, given: heard[number].append(i))
        )
        if cancelled is not None:
            await asyncio.sleep(cancelled)
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, list) or (isinstance(outcome, asyncio.CancelledError) and cancelled is not None)
        assert len(set(heard[number])) == len(heard[number])
        assert not isinstance(outcome, list) or sorted(heard[number]) == list(range(count))
        return len(heard[number])

    async def work() -> None:
        delivered = await asyncio.gather(*map(one, range(len(calls))))
        await asyncio.sleep(40)  # requests whose callers have gone end at their deadline at the latest
        assert all(member.in_flight == NO_ROOM for member in router._pool.members)
        assert sum(replica.num_samples for replica in router.take_numbers().replicas) == sum(delivered)
        await settle(router, engines)

    run(work)


class Silent:
    """An engine that does not tell before the end."""

    def __init__(self, engine: Teller) -> None:
        self.engine = engine
        self.weight_version = 0

    async def generate(self, prompts: Any, sampling: Any, seeds: Any, *, told: Told | None = None) -> list[Generation]:
        return await self.engine.generate(prompts, sampling, seeds)


@settings(max_examples=40, deadline=None)
@given(
    plans=st.lists(EVENTS, min_size=1, max_size=3),
    calls=st.lists(
        st.tuples(st.floats(0, 2), st.lists(st.integers(2, 45), min_size=1, max_size=6), st.booleans()), max_size=20
    ),
)
def test_whatever_happens_every_sequence_is_scored_for_its_caller(
    plans: list[list[str]], calls: list[tuple[float, list[int], bool]]
) -> None:
    engines = [StandIn(0)]
    for number, plan in enumerate(plans, start=1):
        engines.append(StandIn(number, lambda call, plan=plan: TROUBLE[plan[call % len(plan)]]))  # type: ignore[misc]
    router = make_router(engines, max_attempts=1000, breaker_reset_s=1.0)

    async def one(start: float, lengths: list[int], is_cancelled: bool) -> int:
        tokens, starts = samples(*lengths)
        tokens = [sequence + round(1000 * start) for sequence in tokens]
        await asyncio.sleep(start)
        task = asyncio.create_task(score(router, tokens, starts))
        if is_cancelled:
            await asyncio.sleep(0.3)
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, asyncio.CancelledError) and is_cancelled:
            return 0
        check_scores(tokens, outcome)  # type: ignore[arg-type]
        return len(lengths)

    async def work() -> None:
        answered = await asyncio.gather(*(one(*call) for call in calls))
        assert all(member.in_flight == NO_ROOM for member in router._pool.members)
        counted = sum(replica.num_samples for replica in router.take_numbers().replicas)
        assert sum(answered) <= counted <= sum(len(lengths) for _, lengths, _ in calls)
        await settle(router, engines)

    run(work)
    assert all(engine.most_tokens <= 80 for engine in engines)
