"""``mopd bench pipeline``: a run's own controller, ledger, routers, workers and data plane, on one event loop as in a
run's orchestrator, around stages that sleep.

::

    one step  each stage by itself, given one step's samples at a time: bounds a synchronous run
    nominal   the stages' times by arithmetic, with every replica always busy: bounds an asynchronous run
    runs      the controller with units of a whole step (the sum of the stages), and prompt by prompt at every staleness
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mopd.base.metrics import StepMetrics
from mopd.base.tasks import Stop
from mopd.base.types import DomainSums, MicroBatchPlan
from mopd.bench import stand_ins
from mopd.bench.harness import BenchReport, Comparison, Goals, Others, at_most, say
from mopd.bench.processes import family_busy_s
from mopd.bench.stand_ins import SHARES, Lengths, Scenario, make_recipe, make_stream
from mopd.config.schema import Recipe
from mopd.data.packing import PackingRules
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import EngineLimits, SamplingParams
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.engines.wire.weights import StagedWeights, stage_updates
from mopd.orchestrator.controller import Controller
from mopd.orchestrator.ledger import Ledger
from mopd.orchestrator.rewards import RewardWorker
from mopd.orchestrator.rollout import RolloutWorker, derive_seed
from mopd.orchestrator.teachers import TeacherGroup, TeacherWorker
from mopd.orchestrator.weights.sync import GroupWeightSync
from mopd.rewards.domains import build_rewards

MOST_OF_BOUND = 1.10
"""Largest allowed step, relative to what bounds it."""
MOST_BYTES = 1024.0
"""Largest allowed number of bytes of a sample that trainer ranks are sent: its share of the plan, without tensors."""
MOST_DEVIATION = 1.0
"""Largest allowed difference, in prompts, between a domain's part of a batch and its share."""
STEPS, QUICK_STEPS = 6, 3
WARM_UP, QUICK_WARM_UP = 5, 3
QUICK_FACTOR = 0.2
COLUMNS = {
    "step s": "mean_step_s:.3f", "bound s": "bound_s:.3f", "x bound": "ratio:.3f", "mix": "mix_deviation:.1f",
    "refused": "refused:d", "ages, %": "percent:", "bytes": "bytes_per_sample:.0f",
}  # fmt: skip

TIMES: dict[str, Any] = {
    "rollout_s": 0.8, "teacher_s": 0.3, "train_s": 0.4, "stage_s": 0.05, "send_s": 0.1, "swap_s": 0.01
}  # fmt: skip
EVEN: dict[str, Any] = {"lengths": Lengths(mean=64), "max_response_length": 512}
HEAVY: dict[str, Any] = {"lengths": Lengths(mean=64, sigma=1.0), "max_response_length": 512}
SLOW_TRAINER: dict[str, Any] = {**TIMES, "rollout_s": 0.4, "teacher_s": 0.15, "train_s": 0.9}
SCENARIOS = (
    Scenario(name="constant", **EVEN, **TIMES),
    Scenario(name="heavy_tailed", **HEAVY, **TIMES),
    Scenario(name="slow_domain", slow_domain="chat", **EVEN, **TIMES),
    Scenario(name="slow_trainer", staleness=(1, 4), most_age=2.0, **HEAVY, **SLOW_TRAINER),
)

DoneT = TypeVar("DoneT")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure and print. Return the exit code."""
    report = BenchReport(benchmark="pipeline", arguments=arguments, as_json=args.json, device=torch.device("cpu"))
    others, scenarios = Others(family_busy_s), list(SCENARIOS)
    steps, warm_up = (QUICK_STEPS, QUICK_WARM_UP) if args.quick else (STEPS, WARM_UP)
    if args.quick:
        heavy = replace(SCENARIOS[1].scaled(QUICK_FACTOR), num_prompts=32)
        scenarios = [replace(heavy, staleness=heavy.staleness[-1:])]
    for scenario in scenarios:
        for part, goals in measure_scenario(scenario, steps=steps, warm_up=warm_up):
            report.add(part, goals)
    report.others_cores = others.cores()
    return report.finish()


class SwappedWeights(GroupWeightSync):
    """Way of weights to stand-in engines, which have none: each stands still as one that takes weights does."""

    async def send(self, staged: StagedWeights) -> None:
        """Return when the engines draw with that version."""
        for engine in self.targets.engines.values():
            await engine.load_weights(staged.weight_version)
        self.targets.router.set_weight_version(staged.weight_version)


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What a controller directs: a run's own workers, routers and storage around the stand-ins."""

    rollout: RolloutWorker
    teachers: TeacherWorker
    rewards: RewardWorker
    plane: LocalDataPlane
    sync: SwappedWeights


def with_workers(recipe: Recipe, scenario: Scenario, work: Callable[[Workers], Awaitable[DoneT]]) -> DoneT:
    """Do ``work`` with new workers, on an event loop of its own and one thread."""

    async def main() -> DoneT:
        return await work(await make_workers(recipe, scenario))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return asyncio.run(main())
    finally:
        torch.set_num_threads(threads)


async def make_workers(recipe: Recipe, scenario: Scenario) -> Workers:
    """Build the workers; the engines draw as with the first weights."""
    plane, dataset = LocalDataPlane(), stand_ins.make_dataset()
    limits = EngineLimits(max_sequences=scenario.max_sequences)

    def replicas(name: str, engines: Sequence[Any]) -> list[Replica]:
        return [Replica(name=f"{name}.{i}", engine=engine, limits=limits) for i, engine in enumerate(engines)]

    def teacher(name: str) -> TeacherGroup:
        s_per_token = scenario.s_per_scored_token(name)
        engines = [stand_ins.SleepingScorer(s_per_token=s_per_token) for _ in range(stand_ins.TEACHER_REPLICAS)]
        router = Router(name, replicas(name, engines), recipe.teachers[name].routing, kind="teacher")
        return TeacherGroup(name, router, vocab_size=stand_ins.VOCAB_SIZE)

    generators = [
        stand_ins.SleepingGenerator(
            scenario.lengths,
            max_sequences=scenario.max_sequences,
            s_per_token=scenario.s_per_drawn_token,
            swap_s=scenario.swap_s,
        )
        for _ in range(stand_ins.ROLLOUT_REPLICAS)
    ]
    rollout = Router("rollout", replicas("rollout", generators), recipe.rollout.routing, kind="rollout")
    sync = SwappedWeights(rollout, on_running=recipe.on_new_weights)
    await sync.send(stage_updates([], 0))
    words = WordLevel({f"w{i}": i for i in range(stand_ins.VOCAB_SIZE)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    sampling = SamplingParams(max_new_tokens=scenario.max_response_length)
    options: dict[str, Any] = {"seed": recipe.seed, "samples_per_prompt": scenario.samples_per_prompt}
    groups = {name: teacher(name) for name in SHARES}
    return Workers(
        sync=sync,
        plane=plane,
        rollout=RolloutWorker(rollout, plane, dataset, sampling=sampling, **options),
        teachers=TeacherWorker(groups, recipe.assignment, plane, asked=recipe.asked, temperature=1.0),
        rewards=RewardWorker(dataset, tokenizer, build_rewards(recipe.rewards), plane),
    )


class SleepingStudent:
    """Student that sleeps as long as its work would take, and keeps the ids that it was trained on."""

    dp_size = 1
    packing = PackingRules(is_packed=True, max_tokens=1 << 20, micro_batch_size=None, square_cost=0.0)

    def __init__(self, scenario: Scenario, sync: SwappedWeights) -> None:
        self._scenario, self._sync = scenario, sync
        self._version = 0
        self.plan_bytes = self.num_of_two_versions = 0
        self.sample_ids: list[int] = []
        self.mixes: list[Counter[str]] = []
        """Numbers of samples of each batch, by domain."""

    async def expect_step(self) -> None:
        pass

    async def forward_backward(self, plan: MicroBatchPlan, *, diagnostics: bool) -> dict[str, DomainSums]:
        samples = [sample for rank in plan.micro_batches for batch in rank for sample in batch]
        self.plan_bytes += len(json.dumps(plan.to_json()))
        self.sample_ids += [sample.sample_id for sample in samples]
        self.mixes.append(Counter(sample.domain for sample in samples))
        self.num_of_two_versions += sum(sample.num_versions > 1 for sample in samples)
        await asyncio.sleep(self._scenario.train_s)
        sums = {"weighted_loss": 0.0}
        return {domain: DomainSums(num_tokens=count, sums=sums) for domain, count in self.mixes[-1].items()}

    async def optim_step(self) -> dict[str, float]:
        return {}

    async def refresh(self, step: int) -> None:
        pass

    async def stage(self, weight_version: int) -> None:
        await asyncio.sleep(self._scenario.stage_s)
        self._version = weight_version

    async def send(self) -> None:
        version = self._version  # the next one may be staged while this one travels
        await asyncio.sleep(self._scenario.send_s)
        await self._sync.send(stage_updates([], version))


class StepEnds:
    """Observer that keeps when each step ended, and its metrics."""

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
        raise AssertionError("no stop was requested")


def run_controller(
    scenario: Scenario, *, max_staleness: int, steps: int, warm_up: int = 2, unit: int = 1
) -> dict[str, Any]:
    """Run the controller for ``steps`` steps whose times count, between ``warm_up`` that fill the pipeline and those in
    which it runs dry.

    Returns:
        ``unit`` (prompts that go through rollout and teachers together) and ``max_staleness``, as given; ``step_s``
        (seconds from one optimizer step to the next) with its mean; ``num_samples`` trained on, each once;
        ``mix_deviation``; ``refused`` samples, which were drawn again; ``ages``: share of the samples of these steps
        that were so many versions old, and their mean; ``two_versions``: share of the samples that more than one
        version of the weights has drawn; ``bytes_per_sample`` of the plans that trainer ranks are sent.

    Raises:
        RuntimeError: a sample was trained on twice.
    """
    num_steps = warm_up + steps + (max_staleness + 1 if max_staleness else 0)
    recipe, num_prompts = make_recipe(scenario, max_staleness=max_staleness, steps=num_steps), scenario.num_prompts
    options: dict[str, Any] = {"max_staleness": max_staleness, "step": 0, "on_new_weights": recipe.on_new_weights}

    async def work(workers: Workers) -> dict[str, Any]:
        student, observer = SleepingStudent(scenario, workers.sync), StepEnds(num_steps)
        await Controller(
            recipe=recipe,
            prompts=make_stream(recipe.seed),
            rollout=workers.rollout,
            teachers=workers.teachers,
            rewards=workers.rewards if recipe.needs_task_advantage else None,
            student=student,
            plane=workers.plane,
            observer=observer,
            ledger=Ledger(prompts_per_step=num_prompts, **options),
            stop=Stop(),
            unit=unit,
        ).run()
        num = len(student.sample_ids)
        if len(set(student.sample_ids)) != num:
            raise RuntimeError("a sample was trained on twice")
        step_s = [b - a for a, b in itertools.pairwise(observer.times[warm_up - 1 : warm_up + steps])]
        refused = (value for values in observer.values for name, value in values.items() if "refused_samples/" in name)
        ages = _ages(observer.values[warm_up : warm_up + steps], max_staleness)
        return {
            "max_staleness": max_staleness, "unit": unit, "step_s": step_s, "mean_step_s": sum(step_s) / steps,
            "num_samples": num, "mix_deviation": mix_deviation(student.mixes, scenario), "refused": round(sum(refused)),
            "ages": ages, "mean_age": sum(age * share for age, share in enumerate(ages)),
            "two_versions": student.num_of_two_versions / num, "bytes_per_sample": student.plan_bytes / num,
        }  # fmt: skip

    return with_workers(recipe, scenario, work)


def mix_deviation(mixes: Sequence[Mapping[str, int]], scenario: Scenario) -> float:
    """Return the largest difference, in prompts of one domain, between a batch and the stream's shares."""
    per_prompt, num = scenario.samples_per_prompt, scenario.num_prompts
    return max(abs(mix[domain] // per_prompt - share * num) for mix in mixes for domain, share in SHARES.items())


def _ages(steps: Sequence[Mapping[str, float]], max_staleness: int) -> list[float]:
    """Return the share of each age among the samples of all steps."""
    if not max_staleness:
        return [1.0]
    return [sum(values[f"staleness_share/{age}"] for values in steps) / len(steps) for age in range(max_staleness + 1)]


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Seconds that each stage takes for one step's samples."""

    rollout: float
    teachers: float
    """The slowest teacher's, which bounds them."""
    trainer: float
    """Forward, backward, optimizer, and handing the weights over."""
    sync: float
    """Time until the rollout uses the weights that the student has handed over."""

    @property
    def slowest_s(self) -> float:
        """Bound of an asynchronous step: the stages work side by side."""
        return float(max(asdict(self).values()))

    @property
    def streamed_s(self) -> float:
        """Bound of a synchronous step, in which teachers work while the rollout does."""
        return max(self.rollout, self.teachers) + self.trainer + self.sync


def nominal_times(scenario: Scenario, *, steps: int, warm_up: int) -> StageSeconds:
    """Compute each stage's time for a step by arithmetic, over the steps that count in a run, from the lengths that are
    drawn, with all replicas always busy. Nothing is measured, so slow routers and workers cannot hide in the bound."""
    seed, per_prompt = make_recipe(scenario, max_staleness=0, steps=1).seed, scenario.samples_per_prompt
    stream = make_stream(seed)
    stream.next(warm_up * scenario.num_prompts)
    drawn, scored = 0, Counter[str]()
    for prompt in stream.next(steps * scenario.num_prompts):
        for number in range(per_prompt):
            own_seed = derive_seed(seed, prompt.sample_id * per_prompt + number)
            length = scenario.lengths.draw(own_seed, scenario.max_response_length)
            drawn += length
            scored[prompt.domain] += stand_ins.PROMPT_LENGTH + length
    at_a_time = stand_ins.ROLLOUT_REPLICAS * scenario.max_sequences
    teachers = (
        tokens * scenario.s_per_scored_token(domain) / stand_ins.TEACHER_REPLICAS for domain, tokens in scored.items()
    )
    return StageSeconds(
        rollout=drawn * scenario.s_per_drawn_token / at_a_time / steps + scenario.swap_s,
        teachers=max(teachers) / steps,
        trainer=scenario.train_s + scenario.stage_s,
        sync=scenario.send_s + scenario.swap_s,
    )


def measure_alone(scenario: Scenario, *, steps: int) -> StageSeconds:
    """Measure each stage by itself: mean seconds from when all of a step's samples are given to it to the last one's
    end. A synchronous step has no others to fill the time in which the longest response ends."""
    recipe, per_step = make_recipe(scenario, max_staleness=0, steps=1), scenario.num_prompts
    prompts = make_stream(recipe.seed).next(steps * per_step)

    async def work(workers: Workers) -> StageSeconds:
        rollout, teachers, drawn_s, scored_s = workers.rollout, workers.teachers, 0.0, 0.0
        for start in range(0, steps * per_step, per_step):
            began = time.perf_counter()
            units = await asyncio.gather(*(rollout.generate([prompt]) for prompt in prompts[start : start + per_step]))
            drawn = time.perf_counter()
            await asyncio.gather(*(teachers.score(unit) for unit in units))
            drawn_s, scored_s = drawn_s + drawn - began, scored_s + time.perf_counter() - drawn
        student = SleepingStudent(scenario, workers.sync)
        began = time.perf_counter()
        await asyncio.sleep(scenario.train_s)
        await student.stage(0)
        staged = time.perf_counter()
        await student.send()
        sync_s = time.perf_counter() - staged
        return StageSeconds(rollout=drawn_s / steps, teachers=scored_s / steps, trainer=staged - began, sync=sync_s)

    return with_workers(recipe, scenario, work)


def measure_scenario(scenario: Scenario, *, steps: int, warm_up: int) -> list[tuple[Comparison, Goals]]:
    """Measure each stage alone, the sum of the stages, and the controller at 0 and at each staleness of the
    scenario."""
    say(f"pipeline: {scenario.name}")
    single = measure_alone(scenario, steps=steps)
    nominal = nominal_times(scenario, steps=steps, warm_up=warm_up)
    runs = [run_controller(scenario, max_staleness=0, steps=steps, warm_up=warm_up, unit=scenario.num_prompts)]
    for max_staleness in (0, *scenario.staleness):
        say(f"pipeline: {scenario.name}, max_staleness {max_staleness}")
        # The pace of admission looks at 2 (n + 1) steps before it changes.
        settling = warm_up if scenario.most_age is None else max(warm_up, 3 * (max_staleness + 1))
        runs.append(run_controller(scenario, max_staleness=max_staleness, steps=steps, warm_up=settling))
    columns = {name: f"{name}:.3f" for name in asdict(nominal)}
    stages = [{"name": "one step", **asdict(single)}, {"name": "nominal", **asdict(nominal)}]
    alone = Comparison(title=f"{scenario.name}, s", columns=columns, rows=stages, facts={"scenario": asdict(scenario)})
    return [(alone, {}), runs_part(scenario, single, nominal, runs)]


def runs_part(
    scenario: Scenario, single: StageSeconds, nominal: StageSeconds, runs: Sequence[dict[str, Any]]
) -> tuple[Comparison, Goals]:
    """Hold the runs against their bounds; the first, the sum of the stages, has no goal."""
    for run in runs:
        bound_s = nominal.slowest_s if run["max_staleness"] else single.streamed_s
        run["name"] = f"n = {run['max_staleness']}" + (", whole steps" if run["unit"] > 1 else "")
        percent = " ".join(f"{100 * age:.0f}" for age in run["ages"])
        run |= {"bound_s": bound_s, "ratio": run["mean_step_s"] / bound_s, "percent": percent}
    bounds = {
        "ratio": MOST_OF_BOUND, "bytes_per_sample": MOST_BYTES, "mix_deviation": MOST_DEVIATION, "refused": 0,
        "mean_age": scenario.most_age,
    }  # fmt: skip
    goals = {
        f"{scenario.name}/{'over_bound' if figure == 'ratio' else figure}": at_most(
            max(run[figure] for run in runs[1:]), bound
        )
        for figure, bound in bounds.items()
        if bound is not None
    }
    remark = "bound: the slowest stage (n > 0), or max(rollout, teachers) of one step + trainer + sync (n = 0)"
    return Comparison(title=scenario.name, columns=COLUMNS, rows=runs, remarks=[remark]), goals
