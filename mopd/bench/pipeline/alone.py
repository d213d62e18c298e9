"""What a run is held against: each stage of a scenario by itself, measured, and by arithmetic."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mopd.bench.pipeline.beside import PipelineWorkers, with_workers
from mopd.bench.pipeline.plan import (
    PROMPT_LENGTH,
    ROLLOUT_REPLICAS,
    SHARES,
    TEACHER_REPLICAS,
    Scenario,
    make_recipe,
)
from mopd.bench.pipeline.runs import SleepingStudent, make_stream
from mopd.rollout.worker import derive_seed

ItemT = TypeVar("ItemT")
DoneT = TypeVar("DoneT")


@dataclass(frozen=True, kw_only=True)
class Alone:
    """Seconds that each stage needs for one step's samples with nothing else running.

    ``*_s`` is the stage at its capacity, the rate at which it works when it never lacks work: twice a step's samples
    are always given to it, and the seconds from the first step's worth that is finished to the last one's, before
    there is less to do, are divided by the number of steps. ``*_step_s`` is one step by itself, from when all of its
    samples are given to the stage to the last one's end, the mean over steps: a synchronous step has no others to fill
    the time in which the longest response ends.
    """

    rollout_s: float
    teachers_s: float
    """Seconds of the slowest teacher, which bounds them."""
    rollout_step_s: float
    teachers_step_s: float
    trainer_s: float
    """Forward, backward, optimizer, and handing the weights over."""
    sync_s: float
    """Until the rollout uses the weights that the student has handed over."""

    @property
    def slowest(self) -> str:
        """Name of the stage that bounds an asynchronous step."""
        return max(self.of_stages, key=self.of_stages.__getitem__)

    @property
    def of_stages(self) -> dict[str, float]:
        """Seconds at capacity of those that work side by side when nothing waits."""
        return {"rollout": self.rollout_s, "teachers": self.teachers_s, "trainer": self.trainer_s, "sync": self.sync_s}

    @property
    def slowest_s(self) -> float:
        return self.of_stages[self.slowest]

    @property
    def streamed_s(self) -> float:
        """max(rollout, teachers) + trainer + sync: a synchronous step in which teachers work while the rollout does."""
        return max(self.rollout_step_s, self.teachers_step_s) + self.trainer_s + self.sync_s


@dataclass(frozen=True, kw_only=True)
class Nominal:
    """Seconds of a step by arithmetic: the stages' own times and the lengths that are drawn, with all replicas busy all
    the time. It holds nothing of ours: what routers and workers cost shows beside it, also where
    ``measure_alone`` pays for them too."""

    rollout_s: float
    teachers_s: float
    """Seconds of the slowest teacher, which bounds them."""
    trainer_s: float
    sync_s: float

    def bound_s(self, max_staleness: int) -> float:
        """The slowest stage, or in a synchronous run max(rollout, teachers) + trainer + sync."""
        if max_staleness:
            return max(self.rollout_s, self.teachers_s, self.trainer_s, self.sync_s)
        return max(self.rollout_s, self.teachers_s) + self.trainer_s + self.sync_s


def nominal_times(scenario: Scenario, *, steps: int, warm_up: int) -> Nominal:
    """The means of the same steps that ``measure_alone`` measures."""
    recipe = make_recipe(scenario, max_staleness=0, steps=1)
    stream = make_stream(recipe.seed)
    stream.next(warm_up * scenario.num_prompts)
    drawn = 0
    scored: Counter[str] = Counter()
    for prompt in stream.next(steps * scenario.num_prompts):
        for number in range(scenario.samples_per_prompt):
            seed = derive_seed(recipe.seed, prompt.sample_id * scenario.samples_per_prompt + number)
            length = scenario.lengths.draw(seed, scenario.max_response_length)
            drawn += length
            scored[prompt.domain] += PROMPT_LENGTH + length
    at_a_time = ROLLOUT_REPLICAS * scenario.max_sequences
    return Nominal(
        rollout_s=drawn * scenario.s_per_drawn_token / at_a_time / steps + scenario.swap_s,
        teachers_s=max(
            tokens * scenario.s_per_scored_token(domain) / TEACHER_REPLICAS / steps for domain, tokens in scored.items()
        ),
        trainer_s=scenario.train_s + scenario.stage_s,
        sync_s=scenario.send_s + scenario.swap_s,
    )


def measure_alone(scenario: Scenario, *, steps: int, warm_up: int = 2) -> Alone:
    """Each stage by itself, over the same stretch of the stream as the runs: ``steps`` after the first ``warm_up``."""
    recipe = make_recipe(scenario, max_staleness=0, steps=1)
    per_step = scenario.num_prompts

    async def work(workers: PipelineWorkers) -> Alone:
        rollout, teachers, stream = workers.rollout, workers.teachers, make_stream(recipe.seed)
        stream.next(warm_up * per_step)
        by_step: dict[str, list[float]] = {"rollout": [], "teachers": []}
        for _ in range(steps):
            began = time.perf_counter()
            units = await asyncio.gather(*(rollout.generate([prompt]) for prompt in stream.next(per_step)))
            by_step["rollout"].append(time.perf_counter() - began)
            began = time.perf_counter()
            await asyncio.gather(*(teachers.score(unit) for unit in units))
            by_step["teachers"].append(time.perf_counter() - began)
            await workers.plane.discard([sample.sample_id for unit in units for sample in unit])
        prompts = make_stream(recipe.seed).next((warm_up + steps + 2) * per_step)[warm_up * per_step :]
        rollout_s, units = await _at_capacity(prompts, lambda prompt: rollout.generate([prompt]), per_step)
        scored = await asyncio.gather(
            *(
                _at_capacity(
                    [unit for unit in units if unit[0].domain == domain], teachers.score, round(share * per_step)
                )
                for domain, share in SHARES.items()
            )
        )
        student = SleepingStudent(scenario, workers)
        began = time.perf_counter()
        await asyncio.sleep(scenario.train_s)
        await student.stage(0)
        staged = time.perf_counter()
        await student.send()
        return Alone(
            rollout_s=rollout_s,
            teachers_s=max(seconds for seconds, _ in scored),
            rollout_step_s=sum(by_step["rollout"]) / steps,
            teachers_step_s=sum(by_step["teachers"]) / steps,
            trainer_s=staged - began,
            sync_s=time.perf_counter() - staged,
        )

    return with_workers(recipe, scenario, work)


async def _at_capacity(
    items: Sequence[ItemT], do: Callable[[ItemT], Awaitable[DoneT]], per_step: int
) -> tuple[float, list[DoneT]]:
    """Seconds of a step's worth of ``items`` when two steps' worth are always under way; what ``do`` returned."""
    results: list[DoneT] = []
    ended: list[float] = []
    left = iter(items)

    async def one_after_another() -> None:
        for item in left:
            results.append(await do(item))
            ended.append(time.perf_counter())

    await asyncio.gather(*(one_after_another() for _ in range(2 * per_step)))
    last = len(items) - 2 * per_step  # from then on there are fewer
    return (ended[last - 1] - ended[0]) / (last - 1) * per_step, results
