"""``mopd bench pipeline``: a real controller with short stages; what is counted is right, whatever the times are."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mopd.bench.pipeline.alone import Alone, Nominal, nominal_times
from mopd.bench.pipeline.command import report, show
from mopd.bench.pipeline.engines import Lengths
from mopd.bench.pipeline.measure import MAX_BYTES, Rate, Result, measure_scenario, measure_traffic
from mopd.bench.pipeline.plan import SHARES, Scenario
from mopd.bench.pipeline.runs import Run, mix_deviation, run_controller

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
)
STEPS = 2


def test_a_scenario_from_prompts_to_tables(capsys: pytest.CaptureFixture[str]) -> None:
    result = measure_scenario(SHORT, steps=STEPS, warm_up=3, staleness=(2,), progress=print)
    synchronous, streaming = result.runs
    assert (result.whole.unit, synchronous.unit, streaming.unit) == (SHORT.num_prompts, 1, 1)
    # Three steps fill the pipeline, and in as many it runs dry.
    assert [run.num_samples for run in result.runs] == [5 * SHORT.num_samples, 8 * SHORT.num_samples]
    assert [len(run.step_s) for run in result.runs] == [STEPS, STEPS]
    for run in (result.whole, *result.runs):
        assert run.mix_deviation <= 1
        assert 50 < run.bytes_per_sample <= MAX_BYTES
        assert sum(run.staleness.values()) == pytest.approx(1)
    assert synchronous.staleness == {0: 1.0} and synchronous.refused == 0 == synchronous.two_versions
    assert list(streaming.staleness) == [0, 1, 2] and streaming.staleness[0] < 1
    # No stage is faster than it sleeps, and the teachers are as slow as the slow one.
    assert result.alone.rollout_s > 0 and result.alone.teachers_step_s > SHORT.teacher_s
    assert result.alone.trainer_s >= SHORT.train_s + SHORT.stage_s
    capsys.readouterr()
    rate = Rate(prompts_per_step=1, prompts_per_s=1.0, controller_ms=1.0)
    show([result], [], rate, None)
    assert "short" in capsys.readouterr().out
    told = json.loads(json.dumps(report([result], [], rate, None)))
    assert told["scenarios"][0]["runs"][1]["num_samples"] == streaming.num_samples


def test_real_weights_are_handed_over() -> None:
    scenario = replace(SHORT, weights_mb=8, stage_s=0.0, send_s=0.0)
    run = run_controller(scenario, max_staleness=1, steps=2)
    num_updates = 2 + 2 + 2  # steps before, in between and after; each publishes
    assert run.weight_bytes > num_updates * 8e6
    assert run.bytes_per_sample <= MAX_BYTES
    assert run.mix_deviation <= 1 and run.refused == 0


def test_bytes_that_ranks_are_told_do_not_grow_with_tensors() -> None:
    small, large = measure_traffic(top_ks=(512,), responses=(16, 1024))
    assert large.tensor_bytes > 4_000_000
    assert 50 < small.bytes_per_sample <= large.bytes_per_sample < small.bytes_per_sample + 20 < MAX_BYTES


GOOD = Run(
    max_staleness=2,
    prompts_per_step=10,
    unit=1,
    step_s=(1.0, 1.1),
    num_samples=40,
    mix_deviation=1.0,
    refused=0,
    staleness={0: 1.0},
    two_versions=0.0,
    bytes_per_sample=1024.0,
    weight_bytes=0,
    controller_s=1.0,
    total_s=5.0,
)
ALONE = Alone(rollout_s=1.0, teachers_s=0.5, rollout_step_s=1.2, teachers_step_s=1.3, trainer_s=0.6, sync_s=0.1)


NOMINAL = Nominal(rollout_s=1.0, teachers_s=0.5, trainer_s=0.6, sync_s=0.1)
AGED = replace(SHORT, most_age=1.5)


@pytest.mark.parametrize(
    "change",
    [
        {"step_s": (1.0, 1.3)},
        {"bytes_per_sample": 1025.0},
        {"mix_deviation": 1.1},
        {"refused": 1},
        {"staleness": {1: 0.4, 2: 0.6}},
        {},
    ],
)
def test_each_goal_counts(change: dict[str, object]) -> None:
    whole = replace(GOOD, max_staleness=0, step_s=(2.4,))
    synchronous = replace(GOOD, max_staleness=0, step_s=(2.2,))  # of max(1.2, 1.3) + 0.6 + 0.1
    run = replace(GOOD, **change)  # type: ignore[arg-type]
    result = Result(scenario=AGED, alone=ALONE, nominal=NOMINAL, whole=whole, runs=(synchronous, run))
    assert result.ratio(synchronous) == pytest.approx(1.1) and ALONE.slowest == "rollout"
    assert result.nominal_ratio(run) == pytest.approx(run.mean_step_s / 1.0)
    assert result.is_met is (not change)


def test_machinery_that_is_slow_itself_is_held_against_nominal_times() -> None:
    """Stages that are measured through the same machinery would hide it."""
    slow = replace(GOOD, step_s=(1.5, 1.5))
    alone = replace(ALONE, rollout_s=1.5)
    whole = replace(GOOD, max_staleness=0, step_s=(2.4,))
    result = Result(scenario=SHORT, alone=alone, nominal=NOMINAL, whole=whole, runs=(slow,))
    assert result.ratio(slow) == 1.0 and not result.is_met


def test_nominal_times_are_those_of_the_scenario() -> None:
    even = replace(SHORT, lengths=Lengths(mean=16), num_prompts=20, samples_per_prompt=2)
    found = nominal_times(even, steps=3, warm_up=1)
    assert found.rollout_s == pytest.approx(even.rollout_s + even.swap_s)
    assert found.teachers_s == pytest.approx(even.slow_factor * even.teacher_s)
    assert (found.trainer_s, found.sync_s) == (even.train_s + even.stage_s, even.send_s + even.swap_s)
    assert found.bound_s(0) == pytest.approx(found.teachers_s + found.trainer_s + found.sync_s)


def test_the_mix_is_that_of_the_worst_batch() -> None:
    even = {domain: round(10 * share) for domain, share in SHARES.items()}
    assert mix_deviation([even, {"chat": 4, "code": 2, "math": 4}, even], 10) == 2


def test_lengths_depend_on_the_seed_alone() -> None:
    heavy = Lengths(mean=64, sigma=1.0)
    drawn = [heavy.draw(seed, 4096) for seed in range(2000)]
    assert drawn == [heavy.draw(seed, 4096) for seed in range(2000)]
    assert 55 < sum(drawn) / len(drawn) < 73 and max(drawn) > 500
    assert {Lengths(mean=64).draw(seed, 4096) for seed in range(20)} == {64}
    assert max(heavy.draw(seed, 100) for seed in range(2000)) == 100
