"""The simulated clock, and how evenly the router shares work on it."""

from __future__ import annotations

import asyncio

import pytest

from mopd.bench.teachers.makespan import (
    TOKENS_PER_S,
    count_based_s,
    ideal_s,
    measure_makespan,
    run_on_token_clock,
    token_aware_s,
)


def test_simulated_hours_take_no_time_and_timers_fire_in_order() -> None:
    async def work() -> list[tuple[str, float]]:
        fired: list[tuple[str, float]] = []

        async def after(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(after("late", 7200), after("early", 0.001), after("between", 3600))
        return fired

    assert run_on_token_clock(work()) == [("early", 0.001), ("between", 3600), ("late", 7200)]


def test_a_wait_for_nothing_is_told_instead_of_hanging() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="every task waits for something that never happens"):
        run_on_token_clock(work())


def test_skewed_lengths_end_within_the_goal_where_counting_does_not() -> None:
    result = measure_makespan()
    assert result.is_met and 1 <= result.token_aware_median <= result.token_aware_worst <= 1.15
    assert result.count_based_median > 1.15 and result.count_based_worst > 1.4
    assert measure_makespan() == result  # exact and repeatable


@pytest.mark.parametrize("num_replicas", [1, 3, 4, 8])
def test_no_bad_case_among_shapes_of_batches(num_replicas: int) -> None:
    batches = {
        "one giant": [20_000] + [100] * 400,
        "giants last": [100] * 400 + [5_000] * num_replicas,
        "equal": [1_000] * (5 * num_replicas),
        "two sizes": [9_000] * 3 + [1_000] * 60,
    }
    for name, lengths in batches.items():
        relative = token_aware_s(lengths, num_replicas) / ideal_s(lengths, num_replicas)
        assert 0.999 <= relative <= 1.15, name


def test_ideal_and_counting_by_hand() -> None:
    assert ideal_s([4, 1, 1, 2], 2) * TOKENS_PER_S == pytest.approx(4)
    assert ideal_s([9, 1, 1, 2], 2) * TOKENS_PER_S == pytest.approx(9)
    assert count_based_s([4, 1, 3, 2], 2) * TOKENS_PER_S == pytest.approx(7)
