"""``mopd bench pipeline``: a real controller with short stages; what is counted is right, whatever the times are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mopd.bench.pipeline import (
    MOST_BYTES,
    StageSeconds,
    measure_scenario,
    mix_deviation,
    nominal_times,
    run_controller,
    runs_part,
)
from mopd.bench.stand_ins import SHARES, Lengths, Scenario

SHORT = Scenario(
    name="short",
    lengths=Lengths(mean=16, sigma=1.0),
    max_response_length=64,
    num_prompts=10,
    max_sequences=4,
    rollout_s=0.03,
    teacher_s=0.01,
    slow_domain="chat",
    train_s=0.02,
    stage_s=0.005,
    send_s=0.005,
    swap_s=0.001,
    staleness=(2,),
)
STEPS = 2


def test_a_scenario_from_prompts_to_goals(capsys: pytest.CaptureFixture[str]) -> None:
    (alone, _), (part, goals) = measure_scenario(SHORT, steps=STEPS, warm_up=3)
    whole, synchronous, streaming = part.rows
    assert (whole["unit"], synchronous["unit"], streaming["unit"]) == (SHORT.num_prompts, 1, 1)
    # Three steps fill the pipeline, and in as many it runs dry.
    assert [run["num_samples"] for run in part.rows] == [num * SHORT.num_samples for num in (5, 5, 8)]
    for run in part.rows:
        assert len(run["step_s"]) == STEPS and run["mix_deviation"] <= 1
        assert 50 < run["bytes_per_sample"] <= MOST_BYTES
        assert sum(run["ages"]) == pytest.approx(1)
    assert synchronous["ages"] == [1.0] and synchronous["refused"] == 0 == synchronous["two_versions"]
    assert len(streaming["ages"]) == 3 and streaming["ages"][0] < 1
    # No stage is faster than it sleeps, and the teachers are as slow as the slow one.
    single, nominal = alone.rows
    assert single["rollout"] > 0 and single["teachers"] > SHORT.teacher_s
    assert single["trainer"] >= SHORT.train_s + SHORT.stage_s == nominal["trainer"]
    assert {name.split("/")[0] for name in goals} == {"short"}
    part.show()
    assert "n = 2" in capsys.readouterr().out


def test_bytes_that_ranks_are_told_do_not_grow_with_tensors() -> None:
    """One response a prompt, which is the most bytes a sample."""
    small, large = (
        run_controller(
            Scenario(
                name="size",
                lengths=Lengths(mean=response),
                max_response_length=response,
                top_k=512,
                num_prompts=4,
                samples_per_prompt=1,
            ),
            max_staleness=0,
            steps=1,
        )["bytes_per_sample"]
        for response in (16, 1024)  # 4 MB of tensors
    )
    assert 50 < small <= large < small + 20 < MOST_BYTES


GOOD: dict[str, Any] = {
    "max_staleness": 2, "unit": 1, "mean_step_s": 1.05, "mix_deviation": 1.0, "refused": 0, "bytes_per_sample": 1024.0,
    "ages": [1.0], "mean_age": 1.5,
}  # fmt: skip
WHOLE = {**GOOD, "max_staleness": 0, "mean_step_s": 2.4, "unit": 10, "refused": 99}
SYNCHRONOUS = {**GOOD, "max_staleness": 0, "mean_step_s": 2.2}
NOMINAL = StageSeconds(rollout=1.0, teachers=0.5, trainer=0.6, sync=0.1)
SINGLE = StageSeconds(rollout=1.2, teachers=1.3, trainer=0.6, sync=0.1)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"mean_step_s": 1.15}, {"over_bound"}),
        ({"bytes_per_sample": 1025.0}, {"bytes_per_sample"}),
        ({"mix_deviation": 1.1}, {"mix_deviation"}),
        ({"refused": 1}, {"refused"}),
        ({"mean_age": 1.6}, {"mean_age"}),
        ({}, set()),
    ],
)
def test_each_goal_counts(change: dict[str, object], missed: set[str]) -> None:
    runs = [dict(WHOLE), dict(SYNCHRONOUS), {**GOOD, **change}]
    _, goals = runs_part(replace(SHORT, most_age=1.5), SINGLE, NOMINAL, runs)
    assert runs[1]["ratio"] == pytest.approx(2.2 / (1.3 + 0.6 + 0.1))  # of a synchronous step
    assert {name.split("/")[1] for name, goal in goals.items() if not goal["is_met"]} == missed


def test_nominal_times_are_those_of_the_scenario() -> None:
    even = replace(SHORT, lengths=Lengths(mean=16), num_prompts=20, samples_per_prompt=2)
    found = nominal_times(even, steps=3, warm_up=1)
    assert found.rollout == pytest.approx(even.rollout_s + even.swap_s)
    assert found.teachers == pytest.approx(even.slow_factor * even.teacher_s)
    assert (found.trainer, found.sync) == (even.train_s + even.stage_s, even.send_s + even.swap_s)
    assert found.streamed_s == pytest.approx(found.teachers + found.trainer + found.sync)


def test_the_mix_is_that_of_the_worst_batch() -> None:
    per_prompt = SHORT.samples_per_prompt
    even = {domain: per_prompt * round(10 * share) for domain, share in SHARES.items()}
    assert mix_deviation([even, {"chat": 8, "code": 4, "math": 8}, even], SHORT) == 2


def test_lengths_depend_on_the_seed_alone() -> None:
    heavy = Lengths(mean=64, sigma=1.0)
    drawn = [heavy.draw(seed, 4096) for seed in range(2000)]
    assert drawn == [heavy.draw(seed, 4096) for seed in range(2000)]
    assert 55 < sum(drawn) / len(drawn) < 73 and max(drawn) > 500
    assert {Lengths(mean=64).draw(seed, 4096) for seed in range(20)} == {64}
    assert max(heavy.draw(seed, 100) for seed in range(2000)) == 100
