"""Trouble: every sample is answered once or its failure is named. Simulated clock, 100 tokens a second."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mopd.engines.interface import EngineBusy, EngineUnavailable, EngineUnreachable, Scores
from mopd.engines.replicas.interface import LIMITS, SampleFailed
from mopd.engines.replicas.router import MAX_BACKOFF_S, Router
from tests.unit.engines.replicas.stand_in import Plan, StandIn, check_scores, make_router, run, samples, score

DEAD = EngineUnavailable("connection refused")


def always(trouble: Exception | float) -> Plan:
    return lambda call: trouble


def first(count: int, trouble: Exception | float) -> Plan:
    return lambda call: trouble if call < count else None


def numbers_of(router: Router) -> dict[str, Any]:
    taken = router.take_numbers()
    return {replica.name: replica for replica in taken.replicas} | {"group": taken}


async def failure_of(router: Router, *lengths: int) -> tuple[SampleFailed, float]:
    tokens, starts = samples(*lengths)
    with pytest.raises(SampleFailed) as caught:
        await score(router, tokens, starts)
    return caught.value, asyncio.get_running_loop().time()


def test_pauses_double_and_attempts_are_counted() -> None:
    engine = StandIn(0, always(DEAD))
    error, ended = run(lambda: failure_of(make_router([engine], max_attempts=4, breaker_failures=9), 5))
    assert len(engine.calls) == 4
    assert ended == pytest.approx(0.5 + 1 + 2, abs=0.01)
    assert str(error) == (
        "teacher 'math' could not answer for 1 samples: 4 attempts on math.0, math.0, math.0, math.0; "
        "last error: connection refused"
    )
    assert error.positions == (0,) and error.last_error is DEAD


def away_until(end_s: float, trouble: Exception) -> Plan:
    return lambda call: trouble if asyncio.get_running_loop().time() < end_s else None


@pytest.mark.parametrize("num_callers", [1, 40])
def test_a_server_that_is_away_for_a_while_is_waited_for(num_callers: int, caplog: pytest.LogCaptureFixture) -> None:
    """45 s, as long as it takes to start a server again: with the limits of a real run, for one caller or many."""
    engine = StandIn(0, away_until(45.0, EngineUnreachable("ConnectError")))
    limits = {name: getattr(LIMITS, name) for name in ("max_attempts", "backoff_s", "breaker_failures")}
    router = make_router([engine], request_timeout_s=60.0, breaker_reset_s=LIMITS.breaker_reset_s, **limits)
    tokens, starts = samples(5)

    async def work() -> float:
        for scores in await asyncio.gather(*(score(router, tokens, starts) for _ in range(num_callers))):
            check_scores(tokens, scores)
        return asyncio.get_running_loop().time()

    assert run(work) < 45 + LIMITS.breaker_reset_s + MAX_BACKOFF_S
    assert [record.message for record in caplog.records] == [
        "math.0 is left alone and asked again from time to time: ConnectError",
        "math.0 answers again",
    ]


def test_a_server_that_stays_away_ends_the_wait_and_is_named() -> None:
    engine = StandIn(0, always(EngineUnreachable("ConnectError")))
    engine.url = "http://user:secret@10.0.0.3:8000"  # type: ignore[attr-defined]
    error, ended = run(lambda: failure_of(make_router([engine], request_timeout_s=200.0), 5))
    assert 200 <= ended < 200 + MAX_BACKOFF_S
    assert len(engine.calls) > 8
    assert str(error) == (
        f"teacher 'math' could not answer for 1 samples: {len(engine.calls)} attempts on "
        "math.0 (http://…@10.0.0.3:8000); last error: ConnectError"
    )


def test_a_fault_of_the_request_is_no_absence() -> None:
    """A server that takes requests and fails at them gets the attempts that it always got, also between absences."""
    plan = {0: EngineUnreachable("HTTP 503"), 3: EngineUnreachable("HTTP 503")}
    engine = StandIn(0, lambda call: plan.get(call, DEAD))
    error, ended = run(lambda: failure_of(make_router([engine], request_timeout_s=600.0, breaker_failures=9), 5))
    assert len(engine.calls) == 3 + len(plan) and ended < 30
    assert error.last_error is DEAD


def test_a_retry_goes_to_another_replica_even_a_busier_one() -> None:
    engines = [StandIn(0), StandIn(1, first(1, DEAD))]
    router = make_router(engines, max_inflight_tokens=1000)
    tokens, starts = samples(5, 300)

    async def work() -> None:
        long = asyncio.create_task(score(router, tokens[1:], starts[1:]))
        await asyncio.sleep(0.1)
        check_scores(tokens[:1], await score(router, tokens[:1], starts[:1]))
        assert not long.done()
        await long

    run(work)
    assert [engine.calls for engine in engines] == [[[1001], [1000]], [[1000]]]


def test_the_deadline_is_named() -> None:
    error, _ = run(lambda: failure_of(make_router([StandIn(0, always(99.0))], max_attempts=1), 5))
    assert "last error: math.0: no answer within 10 s (routing.request_timeout_s)" in str(error)


def test_a_breaker_closes_again_after_one_trial() -> None:
    engine = StandIn(0, first(3, DEAD))
    router = make_router([engine], max_attempts=9)
    tokens, starts = samples(40, 40, 40)

    async def work() -> dict[str, Any]:
        check_scores(tokens, await score(router, tokens, starts))
        return numbers_of(router)

    numbers = run(work)
    assert numbers["math.0"].state == "closed" and numbers["math.0"].failures == 3
    assert len(engine.calls) == 6


def test_a_cancelled_trial_does_not_lock_the_breaker() -> None:
    plan = {0: DEAD, 1: 3.0}
    router = make_router([StandIn(0, plan.get)], max_attempts=1, breaker_failures=1)
    tokens, starts = samples(10)

    async def work() -> None:
        await failure_of(router, 10)
        trial = asyncio.create_task(score(router, tokens, starts))
        await asyncio.sleep(6)  # open for 5 s, then on trial
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)
        check_scores(tokens, await score(router, tokens, starts))

    run(work)


def test_a_full_queue_is_waited_for_and_costs_no_attempt() -> None:
    engine = StandIn(0, first(7, EngineBusy("queue full", retry_after_s=1.0)))
    router = make_router([engine], max_attempts=1)
    tokens, starts = samples(5)

    async def work() -> dict[str, Any]:
        await asyncio.sleep(100)
        check_scores(tokens, await score(router, tokens, starts))
        assert asyncio.get_running_loop().time() == pytest.approx(107.05, abs=0.05)
        return numbers_of(router)

    numbers = run(work)
    assert (numbers["math.0"].busy_answers, numbers["math.0"].failures, numbers["group"].retries) == (7, 0, 7)
    assert numbers["math.0"].state == "closed"


def test_a_queue_that_stays_full_has_a_deadline() -> None:
    router = make_router([StandIn(0, always(EngineBusy("queue full", retry_after_s=0.0)))])
    error, ended = run(lambda: failure_of(router, 5))
    assert str(error).endswith("last error: queue full") and ended == pytest.approx(10, abs=0.1)


class Forgetful(StandIn):
    """Leaves out the last sample of its first request."""

    async def score(self, *args: Any, **kwargs: Any) -> list[Scores]:
        scores = await super().score(*args, **kwargs)
        return scores[:-1] if len(self.calls) == 1 else scores


def test_an_answer_with_a_sample_missing_is_not_used() -> None:
    tokens, starts = samples(5, 6, 7)
    engine = Forgetful()
    router = make_router([engine])

    async def work() -> None:
        check_scores(tokens, await score(router, tokens, starts))

    run(work)
    assert len(engine.calls) == 2 and router._pool.members[0].counters.numbers.failures == 1


def test_a_wrong_call_is_raised_as_it_is_and_leaves_nothing_behind() -> None:
    tokens, starts = samples(*[20] * 12)
    engines = [StandIn(0, first(1, ZeroDivisionError("a bug"))), StandIn(1)]
    router = make_router(engines)

    async def work() -> None:
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await score(router, tokens, starts)
        assert asyncio.get_running_loop().time() < 0.01  # at once
        check_scores(tokens, await score(router, tokens, starts))  # no room was lost

    run(work)
    assert all(engine.tokens_now == 0 for engine in engines)
