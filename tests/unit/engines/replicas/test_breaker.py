"""The breaker's states, on a clock of our own."""

from __future__ import annotations

from mopd.engines.replicas.members import Breaker, BreakerState


def broken(*, at: float = 0.0) -> Breaker:
    breaker = Breaker(failures=3, reset_s=10)
    for _ in range(3):
        assert breaker.takes_work(at)
        breaker.sent()
        breaker.failed(at)
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(failures=3, reset_s=10)
    for _ in range(5):
        breaker.failed(0)
        breaker.failed(0)
        breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED and breaker.next_trial_at is None
    assert broken().state is BreakerState.OPEN


def test_an_open_breaker_lets_one_trial_through_when_its_time_is_up() -> None:
    breaker = broken(at=100)
    assert breaker.next_trial_at == 110
    assert not breaker.takes_work(109.9)
    assert breaker.takes_work(110)
    breaker.sent()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.takes_work(1000)


def test_the_trial_decides() -> None:
    good, bad = broken(), broken()
    for breaker in (good, bad):
        breaker.sent()
    good.succeeded()
    assert good.state is BreakerState.CLOSED and good.takes_work(10)
    good.failed(10)
    assert good.takes_work(10)  # the count began anew
    bad.failed(12)
    assert bad.state is BreakerState.OPEN and bad.next_trial_at == 22


def test_a_cancelled_trial_proves_nothing() -> None:
    breaker = broken()
    breaker.sent()
    breaker.abandoned(11)
    assert breaker.state is BreakerState.OPEN and breaker.takes_work(11)
    closed = Breaker(failures=1, reset_s=10)
    closed.abandoned(0)
    assert closed.state is BreakerState.CLOSED


def test_an_answer_closes_it_even_when_it_is_late() -> None:
    breaker = broken()
    breaker.succeeded()
    assert breaker.takes_work(0)
