"""Intervals against published values, normal theory, and cases whose answer is known."""

from __future__ import annotations

import math
import random

import pytest

from mopd.report.intervals import difference_interval, mean_interval, recovery_interval

RNG = random.Random(0)
SPREAD = [RNG.gauss(0.5, 0.2) for _ in range(400)]
LOWER = [score - 0.01 for score in SPREAD]


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [(0, 10, 0.0, 0.2775), (8, 10, 0.4902, 0.9433), (10, 10, 0.7225, 1.0), (1, 2, 0.0945, 0.9055)],
)
def test_shares_have_wilsons_interval(right: int, of: int, low: float, high: float) -> None:
    found = mean_interval([1.0] * right + [0.0] * (of - right))
    assert found == pytest.approx((low, high), abs=5e-5)


def test_the_bootstrap_of_a_mean_agrees_with_normal_theory() -> None:
    found = mean_interval(SPREAD)
    mean = sum(SPREAD) / len(SPREAD)
    half = 1.96 * math.sqrt(sum((score - mean) ** 2 for score in SPREAD)) / len(SPREAD)
    assert found is not None
    assert (mean - found[0], found[1] - mean) == pytest.approx((half, half), rel=0.1)
    assert mean_interval(SPREAD) == found and mean_interval([]) is None


BEFORE, TEACHER = [0.0] * 50 + [1.0] * 50, [1.0] * 90 + [0.0] * 10


@pytest.mark.parametrize(
    ("domains", "expected"),
    [
        ([(BEFORE, TEACHER, TEACHER)], (1.0, 1.0)),
        ([(BEFORE, BEFORE, TEACHER)], (0.0, 0.0)),
        ([(BEFORE, TEACHER, TEACHER), (BEFORE, BEFORE, TEACHER)], (0.5, 0.5)),
        ([(BEFORE, TEACHER, TEACHER), (BEFORE, BEFORE, [])], None),
        ([([0.0, 1.0] * 50, TEACHER, [0.0, 1.0] * 49 + [1.0, 1.0])], None),  # a lead of one prompt of 100
        ([], None),
    ],
    ids=["all", "nothing", "half", "no scores", "no lead", "no domain"],
)
def test_recovery_is_resampled_with_its_prompts(domains: list, expected: tuple[float, float] | None) -> None:
    found = recovery_interval(domains)
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("is_paired", "is_noise"), [(True, False), (False, True)])
def test_prompts_that_both_answered_leave_their_difficulty_out(is_paired: bool, is_noise: bool) -> None:
    low, high = difference_interval([(LOWER, SPREAD), (LOWER, SPREAD)], is_paired=is_paired) or (0.0, 0.0)
    assert (low <= 0 <= high) == is_noise
    if is_paired:
        assert (low, high) == pytest.approx((-0.01, -0.01))


def test_an_absent_score_gives_no_interval() -> None:
    assert difference_interval([(SPREAD, SPREAD), ([], SPREAD)], is_paired=False) is None
