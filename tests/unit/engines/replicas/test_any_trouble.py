"""Many callers, and whatever can happen to them and to replicas: nothing is lost, doubled, mixed up or left behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.base.metrics import apart, is_counted
from mopd.engines.interface import (
    EngineBusy,
    EngineUnavailable,
    Generation,
    ResponseCallback,
    SamplingParams,
    ToDraw,
)
from mopd.engines.replicas.members import NO_ROOM
from tests.unit.engines.replicas.stand_in import (
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


class Held(Teller):
    """Tells and ends when the test does so."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[ResponseCallback, list[Generation], asyncio.Future[None]]] = []
        self.are_counted: list[bool] = []

    async def generate(self, asked: ToDraw, *, on_response: Any = None) -> list[Generation]:
        self.are_counted.append(is_counted())
        drawn = [self._draw(*one, asked.sampling) for one in zip(asked.prompts, asked.seeds, strict=True)]
        self.requests.append((on_response, drawn, asyncio.get_running_loop().create_future()))
        await self.requests[-1][2]
        return drawn


@pytest.mark.parametrize("num_ticks", range(4))
def test_an_answer_in_the_moment_of_a_cancellation_harms_nobody(num_ticks: int) -> None:
    """Between the caller's end and the word of it that reaches the request."""
    engine = Held()
    router = make_rollout([engine])

    async def work() -> None:
        gone, stays = callers(router, [(1, 1.0)], [(2, 1.0)])
        await asyncio.sleep(1)
        ((on_response, drawn, end),) = engine.requests
        gone.cancel()
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        on_response(0, drawn[0])
        on_response(1, drawn[1])
        await stays
        end.set_result(None)
        assert (await asyncio.gather(gone, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        await asyncio.sleep(0.1)
        numbers = router.take_numbers()
        assert (numbers.retries, numbers.replicas[0].failures) == (0, 0)
        await settle(router, [engine])

    run(work)


def test_an_engine_that_cancels_itself_does_not_leave_its_callers_waiting() -> None:
    engine = Held()
    router = make_rollout([engine])

    async def work() -> None:
        tasks = callers(router, [(1, 1.0)], [(2, 1.0)])
        await asyncio.sleep(1)
        engine.requests[0][2].cancel()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2
        await settle(router, [engine])

    run(work)


def test_a_request_is_its_own_callers_whoever_made_the_room() -> None:
    """A check ends, and a step's request goes out: its bytes are the step's."""
    engine = Held()
    router = make_rollout([engine], max_sequences=1)

    async def check() -> None:
        with apart():
            await asyncio.gather(*(generate(router, [(i, 1.0)]) for i in (8, 9)))

    async def work() -> None:
        beside = asyncio.create_task(check())
        await asyncio.sleep(1)
        step = asyncio.create_task(generate(router, [(1, 1.0)]))
        await asyncio.sleep(1)
        assert engine.are_counted == [False]
        with apart():
            for on_response, drawn, end in engine.requests:
                for i, one in enumerate(drawn):
                    on_response(i, one)
                end.set_result(None)
        await asyncio.sleep(1)
        assert engine.are_counted == [False, True]
        engine.requests[1][2].set_result(None)
        await asyncio.gather(beside, step)
        await settle(router, [engine])

    run(work)


class Silent(Teller):
    """Does not tell before the end."""

    async def generate(self, *args: Any, on_response: Any = None, **kwargs: Any) -> list[Generation]:
        return await super().generate(*args, **kwargs)


TROUBLE = {"dead": DEAD, "busy": EngineBusy("full", retry_after_s=0.2), "slow": 0.7, "hang": 1e6, "ok": None}
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
    kind = Teller if tells else Silent
    engines = [kind(0)]
    for number, plan in enumerate(plans, start=1):
        engines.append(kind(number, lambda call, plan=plan: TROUBLE[plan[call % len(plan)]]))  # type: ignore[misc]
    router = make_rollout(engines, max_sequences=8, max_tokens_per_request=40, max_attempts=1000)
    heard: list[list[int]] = [[] for _ in calls]
    numbers = iter(range(1, 1000))
    prompts = [[(next(numbers), min(draw.expovariate(1.0), 5.0)) for _ in range(count)] for _, count, _, _ in calls]

    async def one(number: int) -> int:
        start, count, cancelled, greedy = calls[number]
        sampling = SamplingParams(max_new_tokens=5, temperature=0.0 if greedy else 1.0)
        await asyncio.sleep(start)
        task = asyncio.create_task(
            generate(router, prompts[number], sampling, on_response=lambda i, given: heard[number].append(i))
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
