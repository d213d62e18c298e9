"""``mopd bench pipeline``: the controller, routers, workers and data plane of a run, with stages that sleep.

The slowest stage's time is what that stage alone needs for one step's samples at its capacity (``Alone``): measured, in
the same run, over the same samples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from mopd.bench.clock import Others
from mopd.bench.pipeline.measure import (
    GOAL,
    MAX_BYTES,
    MAX_DEVIATION,
    Rate,
    Result,
    Traffic,
    measure_rate,
    measure_scenario,
    measure_traffic,
)
from mopd.bench.pipeline.plan import SCENARIOS, Scenario
from mopd.bench.pipeline.runs import Run
from mopd.report.terminal import Terminal

STEPS, QUICK_STEPS = 6, 3
WARM_UP, QUICK_WARM_UP = 5, 3
QUICK_FACTOR = 0.2


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0 if every goal is met, else 1."""

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    others = Others()
    scenarios: Sequence[Scenario] = SCENARIOS
    if args.quick:
        scenarios = [replace(scenario.scaled(QUICK_FACTOR), num_prompts=32) for scenario in SCENARIOS[1:2]]
    results = [
        measure_scenario(
            scenario,
            steps=QUICK_STEPS if args.quick else STEPS,
            warm_up=QUICK_WARM_UP if args.quick else WARM_UP,
            staleness=scenario.staleness[-1:] if args.quick else scenario.staleness,
            progress=progress,
        )
        for scenario in scenarios
    ]
    cores = others.cores()
    progress("bytes through the controller, and prompts a second")
    traffic, rate = measure_traffic(), measure_rate(num_prompts=256 if args.quick else 1024)
    if args.json:
        print(json.dumps(report(results, traffic, rate, cores), indent=2))
    else:
        show(results, traffic, rate, cores)
    is_met = [*(result.is_met for result in results), *(row.is_met for row in traffic)]
    return 0 if all(is_met) else 1


def report(results: Sequence[Result], traffic: Sequence[Traffic], rate: Rate, cores: float | None) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "goals": {"ratio": GOAL, "bytes_per_sample": MAX_BYTES, "mix_deviation": MAX_DEVIATION, "refused": 0},
        "scenarios": [
            {
                "scenario": asdict(result.scenario),
                "alone": {
                    **asdict(result.alone),
                    "slowest": result.alone.slowest,
                    "slowest_s": result.alone.slowest_s,
                    "streamed_s": result.alone.streamed_s,
                },
                "nominal": asdict(result.nominal),
                "whole": _run(result.whole),
                "runs": [
                    {
                        **_run(run),
                        "bound_s": result.bound_s(run),
                        "ratio": result.ratio(run),
                        "nominal_ratio": result.nominal_ratio(run),
                    }
                    for run in result.runs
                ],
                "is_met": result.is_met,
            }
            for result in results
        ],
        "traffic": [{**asdict(row), "is_met": row.is_met} for row in traffic],
        "rate": asdict(rate),
        "others_cores": cores,
    }


def _run(run: Run) -> dict[str, Any]:
    return {**asdict(run), "mean_step_s": run.mean_step_s, "mean_age": run.mean_age}


def show(results: Sequence[Result], traffic: Sequence[Traffic], rate: Rate, cores: float | None) -> None:
    """The same as tables."""
    console = Terminal()
    console.print(_alone_table(results))
    console.print(_steps_table(results))
    bytes_table = Table("top-k", "tokens of a response", "its tensors", f"bytes of a sample (<= {MAX_BYTES:g})")
    for row in traffic:
        bytes_table.add_row(
            str(row.top_k),
            f"{row.response_tokens:,}",
            f"{row.tensor_bytes:,} bytes",
            f"{row.bytes_per_sample:.0f}",
        )
    console.print(bytes_table)
    texts = (
        "the slowest stage: seconds that it alone needs for a step's samples when it never lacks work; streamed: "
        "max(rollout, teachers), each for one step by itself, + trainer + sync; x nominal: the same by "
        "arithmetic, all replicas busy all the time (a goal where n is above 0)",
        f"stages that take no time: {rate.prompts_per_s:,.0f} prompts/s at {rate.prompts_per_step:,} a step; "
        f"{rate.controller_ms:.2f} ms of a processor per sample"
        + ("" if cores is None else f"; other processes kept {cores:.1f} cores busy while steps were timed"),
    )
    for text in texts:
        console.print(text, highlight=False)


def _alone_table(results: Sequence[Result]) -> Table:
    table = Table("alone, s", "rollout", "teachers", "trainer", "sync", "one step: rollout", "teachers")
    for result in results:
        alone = result.alone
        seconds = (*alone.of_stages.values(), alone.rollout_step_s, alone.teachers_step_s)
        table.add_row(result.scenario.name, *(f"{value:.3f}" for value in seconds))
    return table


def _steps_table(results: Sequence[Result]) -> Table:
    table = Table(
        "scenario", "n", "step, s", "bound, s", f"x (<= {GOAL})", "x nominal", "the sum, s", "mix", "refused", "ages, %"
    )
    for result in results:
        for run in result.runs:
            bound = result.alone.slowest if run.max_staleness else "streamed"
            table.add_row(
                result.scenario.name,
                str(run.max_staleness),
                f"{run.mean_step_s:.3f}",
                f"{result.bound_s(run):.3f} {bound}",
                f"{result.ratio(run):.3f}",
                f"{result.nominal_ratio(run):.3f}",
                f"{result.whole.mean_step_s:.3f}",
                f"{run.mix_deviation:.1f}",
                f"{100 * run.refused / run.num_samples:.1f} %",
                " ".join(f"{100 * share:.0f}" for share in run.staleness.values()),
            )
    return table
