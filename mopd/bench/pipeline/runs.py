"""Runs of the controller itself, with a student that sleeps: what it was given, and how long its steps took."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopd.bench.pipeline.beside import PipelineWorkers, make_dataset, with_workers
from mopd.bench.pipeline.plan import SHARES, Scenario, make_recipe
from mopd.bench.pipeline.weights import make_weights
from mopd.controller import Controller
from mopd.data.packing import PackingRules
from mopd.data.stream import PromptStream
from mopd.ledger import Ledger
from mopd.metrics import StepMetrics
from mopd.tasks import Stop
from mopd.types import DomainSums, MicroBatchPlan
from mopd.wire.weights import StagedWeights, stage_updates


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the controller."""

    max_staleness: int
    prompts_per_step: int
    unit: int
    """Prompts that went through rollout and teachers together."""
    step_s: tuple[float, ...]
    """From one optimizer step to the next, those left out before the pipeline is full and after it runs dry."""
    num_samples: int
    """Trained on, all steps together; each once."""
    mix_deviation: float
    """Largest difference between a domain's prompts in a batch and its share of the stream."""
    refused: int
    """Samples that were drawn again."""
    staleness: Mapping[int, float]
    """Share of the samples of these steps that were so many versions old."""
    two_versions: float
    """Share of the samples that more than one version of the weights has drawn."""
    bytes_per_sample: float
    """Of the plans that trainer ranks are sent."""
    weight_bytes: int
    """Bytes of real weights that were handed over."""
    controller_s: float
    """Processor seconds of controller and workers, for all of the run."""
    total_s: float

    @property
    def mean_step_s(self) -> float:
        return sum(self.step_s) / len(self.step_s)

    @property
    def mean_age(self) -> float:
        """Optimizer steps."""
        return sum(age * share for age, share in self.staleness.items())

    @property
    def prompts_per_s(self) -> float:
        """Of the steps in ``step_s``."""
        return self.prompts_per_step / self.mean_step_s


class SleepingStudent:
    """Sleeps for each of its duties, and keeps who was trained on."""

    dp_size = 1
    packing = PackingRules(is_packed=True, max_tokens=1 << 20, micro_batch_size=None, square_cost=0.0)

    def __init__(self, scenario: Scenario, workers: PipelineWorkers) -> None:
        self._scenario, self._way = scenario, workers.sync
        self.plan_bytes = 0
        self._weights = make_weights(scenario.weights_mb)
        self._staged: StagedWeights | None = None
        self.weight_bytes = 0
        self._version = 0
        self.sample_ids: list[int] = []
        self.mixes: list[Counter[str]] = []
        """Prompts of each batch by domain."""
        self.num_of_two_versions = 0

    async def expect_step(self) -> None:
        """See ``Student.expect_step``."""

    async def forward_backward(self, plan: MicroBatchPlan, *, diagnostics: bool) -> dict[str, DomainSums]:
        """See ``Student.forward_backward``."""
        samples = [sample for rank in plan.micro_batches for batch in rank for sample in batch]
        self.plan_bytes += len(json.dumps(plan.to_json()))
        self.sample_ids += [sample.sample_id for sample in samples]
        of_domains = Counter(sample.domain for sample in samples)
        per_prompt = self._scenario.samples_per_prompt
        self.mixes.append(Counter({domain: of_domains[domain] // per_prompt for domain in SHARES}))
        self.num_of_two_versions += sum(sample.num_versions > 1 for sample in samples)
        await asyncio.sleep(self._scenario.train_s)
        return {
            domain: DomainSums(num_tokens=count, sums={"weighted_loss": 0.0}) for domain, count in of_domains.items()
        }

    async def optim_step(self) -> dict[str, float]:
        """See ``Student.optim_step``."""
        return {}

    async def stage(self, weight_version: int) -> None:
        """See ``Student.stage``."""
        await asyncio.sleep(self._scenario.stage_s)
        self._version = weight_version
        if self._weights:
            self._staged = await asyncio.to_thread(stage_updates, self._weights.items(), weight_version)

    async def send(self) -> None:
        """See ``Student.send``."""
        version, staged = self._version, self._staged
        await asyncio.sleep(self._scenario.send_s)
        if staged is None:
            await self._way.ask_for(version)
        else:
            self.weight_bytes += sum(map(len, staged.bodies))
            await self._way.send(staged)


class _Steps:
    """Implements ``Observer``: when each step was over."""

    def __init__(self, last: int) -> None:
        self._last = last
        self.times: list[float] = []
        self.values: list[Mapping[str, float]] = []

    def needs_weights(self, step: int) -> bool:
        return step == self._last

    async def log(self, metrics: StepMetrics) -> None:
        self.times.append(time.perf_counter())
        self.values.append(metrics.values)

    async def after_step(self, step: int, state: Mapping[str, Any]) -> None:
        pass

    async def on_stop(self, step: int, state: Mapping[str, Any]) -> None:
        """Nobody asks."""


def make_stream(seed: int) -> PromptStream:
    """Prompts in the mix of ``SHARES``."""
    return PromptStream(make_dataset().rows_by_domain, SHARES, seed)


def run_controller(scenario: Scenario, *, max_staleness: int, steps: int, warm_up: int = 2, unit: int = 1) -> Run:
    """``steps`` steps whose times count, between ``warm_up`` that fill the pipeline and those in which it runs dry."""
    num_steps = warm_up + steps + (max_staleness + 1 if max_staleness else 0)
    recipe = make_recipe(scenario, max_staleness=max_staleness, steps=num_steps)

    async def work(workers: PipelineWorkers) -> Run:
        student, observer = SleepingStudent(scenario, workers), _Steps(recipe.schedule.steps)
        used_s, began = time.process_time(), time.perf_counter()
        await Controller(
            recipe=recipe,
            prompts=make_stream(recipe.seed),
            rollout=workers.rollout,
            teachers=workers.teachers,
            rewards=workers.rewards if recipe.needs_task_advantage else None,
            student=student,
            plane=workers.plane,
            observer=observer,
            ledger=Ledger(
                prompts_per_step=scenario.num_prompts,
                max_staleness=max_staleness,
                step=0,
                on_new_weights=recipe.on_new_weights,
            ),
            stop=Stop(),
            unit=unit,
        ).run()
        num = len(student.sample_ids)
        if len(set(student.sample_ids)) != num:
            raise RuntimeError("a sample was trained on twice")
        times = observer.times[warm_up - 1 : warm_up + steps]
        return Run(
            max_staleness=max_staleness,
            prompts_per_step=scenario.num_prompts,
            unit=unit,
            step_s=tuple(b - a for a, b in itertools.pairwise(times)),
            num_samples=num,
            mix_deviation=mix_deviation(student.mixes, scenario.num_prompts),
            refused=round(sum(_total(values, "refused_samples/") for values in observer.values)),
            staleness=_staleness(observer.values[warm_up : warm_up + steps], max_staleness),
            two_versions=student.num_of_two_versions / num,
            bytes_per_sample=student.plan_bytes / num,
            weight_bytes=student.weight_bytes,
            controller_s=time.process_time() - used_s,
            total_s=time.perf_counter() - began,
        )

    return with_workers(recipe, scenario, work)


def mix_deviation(mixes: Sequence[Mapping[str, int]], num_prompts: int) -> float:
    """Of the batch that differs most from the stream's shares, in prompts of one domain."""
    return max(abs(mix[domain] - share * num_prompts) for mix in mixes for domain, share in SHARES.items())


def _total(values: Mapping[str, float], start: str) -> float:
    return sum(value for name, value in values.items() if name.startswith(start))


def _staleness(steps: Sequence[Mapping[str, float]], max_staleness: int) -> dict[int, float]:
    """Share of each age among the samples of all steps."""
    if not max_staleness:
        return {0: 1.0}
    totals: dict[int, float] = defaultdict(float)
    for values in steps:
        for age in range(max_staleness + 1):
            totals[age] += values[f"staleness_share/{age}"] / len(steps)
    return dict(totals)
