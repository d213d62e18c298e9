"""The goals of the pipeline, and what is measured for each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mopd.bench.pipeline.alone import Alone, Nominal, measure_alone, nominal_times
from mopd.bench.pipeline.engines import Lengths
from mopd.bench.pipeline.plan import Scenario
from mopd.bench.pipeline.runs import Run, run_controller

GOAL = 1.10
"""Largest allowed step, relative to what bounds it: measured, and of an asynchronous run also nominal."""
MAX_BYTES = 1024.0
"""Of a sample, in and out of the controller's process, from prompt to gradient."""
MAX_DEVIATION = 1.0
"""Prompts of a domain that a batch may have more or less than its share."""
TOP_KS = (16, 512)
RESPONSES = (256, 8192)

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One scenario."""

    scenario: Scenario
    alone: Alone
    nominal: Nominal
    whole: Run
    """Units of a whole step, one stage after another: rollout + teachers + trainer + sync."""
    runs: tuple[Run, ...]
    """Prompt by prompt, by staleness from 0 on."""

    def bound_s(self, run: Run) -> float:
        """What the run's step is held against: the slowest stage, or for a synchronous one ``Alone.streamed_s``."""
        return self.alone.slowest_s if run.max_staleness else self.alone.streamed_s

    def ratio(self, run: Run) -> float:
        """The run's step over its bound."""
        return run.mean_step_s / self.bound_s(run)

    def nominal_ratio(self, run: Run) -> float:
        """The run's step over its nominal bound."""
        return run.mean_step_s / self.nominal.bound_s(run.max_staleness)

    @property
    def is_met(self) -> bool:
        """Every run is fast enough and small enough, in the stream's mix, trains on all that it draws, and on nothing
        older than it has to be."""
        return all(
            self.ratio(run) <= GOAL
            and (not run.max_staleness or self.nominal_ratio(run) <= GOAL)
            and run.bytes_per_sample <= MAX_BYTES
            and run.mix_deviation <= MAX_DEVIATION
            and run.refused == 0
            and run.mean_age <= (math.inf if self.scenario.most_age is None else self.scenario.most_age)
            for run in self.runs
        )


def measure_scenario(
    scenario: Scenario, *, steps: int, warm_up: int, staleness: Sequence[int], progress: Progress
) -> Result:
    """Each stage alone, the sum, and the controller at 0 and at each ``staleness``."""
    progress(f"{scenario.name}: each stage alone")
    alone = measure_alone(scenario, steps=steps, warm_up=warm_up)
    nominal = nominal_times(scenario, steps=steps, warm_up=warm_up)
    progress(f"{scenario.name}: one stage after another")
    whole = run_controller(scenario, max_staleness=0, steps=steps, warm_up=warm_up, unit=scenario.num_prompts)
    runs = []
    for max_staleness in (0, *staleness):
        progress(f"{scenario.name}: max_staleness {max_staleness}")
        # What the first batches admitted is in flight for n + 1 steps, and the pace looks at n + 2 before it changes.
        settling = warm_up if scenario.most_age is None else max(warm_up, 3 * (max_staleness + 1))
        runs.append(run_controller(scenario, max_staleness=max_staleness, steps=steps, warm_up=settling))
    return Result(scenario=scenario, alone=alone, nominal=nominal, whole=whole, runs=tuple(runs))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What trainer ranks are told of one sample of a size."""

    top_k: int
    response_tokens: int
    tensor_bytes: int
    """Of the sample's fields, which they read by themselves."""
    bytes_per_sample: float

    @property
    def is_met(self) -> bool:
        return self.bytes_per_sample <= MAX_BYTES


def measure_traffic(*, top_ks: Sequence[int] = TOP_KS, responses: Sequence[int] = RESPONSES) -> list[Traffic]:
    """One response a prompt, which is the most bytes and calls a sample."""
    found = []
    for top_k in top_ks:
        for response in responses:
            scenario = Scenario(
                name="traffic",
                lengths=Lengths(mean=response),
                max_response_length=response,
                top_k=top_k,
                num_prompts=4,
                samples_per_prompt=1,
            )
            run = run_controller(scenario, max_staleness=0, steps=1)
            found.append(
                Traffic(
                    top_k=top_k,
                    response_tokens=response,
                    tensor_bytes=response * (8 + 1 + 4 + 4 + 8 * top_k + 4),
                    bytes_per_sample=run.bytes_per_sample,
                )
            )
    return found


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How fast prompts pass when no stage takes any time."""

    prompts_per_step: int
    prompts_per_s: float
    controller_ms: float
    """Processor milliseconds of a sample: controller, workers, routers, checks of answers, storage, and the stand-ins
    themselves."""


def measure_rate(*, num_prompts: int, steps: int = 4) -> Rate:
    """Synchronous steps of short responses, one a prompt."""
    scenario = Scenario(
        name="rate",
        lengths=Lengths(mean=16),
        max_response_length=16,
        num_prompts=num_prompts,
        samples_per_prompt=1,
        max_sequences=256,
    )
    run = run_controller(scenario, max_staleness=0, steps=steps)
    return Rate(
        prompts_per_step=num_prompts,
        prompts_per_s=run.prompts_per_s,
        controller_ms=1000 * run.controller_s / run.num_samples,
    )
