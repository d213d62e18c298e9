"""Asynchronous runs on a simulated clock: the real controller and ledger, with a rollout whose responses have
heavy-tailed lengths, a teacher and a student that take time. What was drawn, what was trained on, and how old it was.

``python -m tests.unit.orchestrator.async_world`` prints a table of every schedule in worlds that different
stages bound.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mopd.base.metrics import StepMetrics, StepTimer
from mopd.base.tasks import Stop
from mopd.base.types import Batch, DomainSums, FailedSample, MicroBatchPlan, Prompt, SampleMeta
from mopd.bench.stand_ins import SHARES, Lengths, Scenario, make_dataset, make_recipe, make_stream
from mopd.config.schedule import WarmUpConfig
from mopd.config.schema import AnswersConfig, Recipe  # type: ignore[attr-defined]
from mopd.data.packing import PackingRules
from mopd.data.stream import MixedStream
from mopd.orchestrator.controller import Controller
from mopd.orchestrator.ledger import Ledger
from mopd.orchestrator.rollout import derive_seed
from tests.fixtures.samples import meta_of
from tests.fixtures.token_clock import run_on_token_clock

TOKENS_PER_S = 1000


@dataclass(frozen=True, kw_only=True)
class World:
    """Seconds that everything takes."""

    max_staleness: int
    on_new_weights: Literal["finish", "continue"] = "finish"
    on_expiry: Literal["hold", "redraw"] = "hold"
    steps: int = 60
    warm_up: int = 0
    """First steps, which train on the teachers' answers."""
    sync_every_steps: int = 1
    prompts_per_step: int = 64
    samples_per_prompt: int = 1
    num_places: int = 64
    """Responses that are drawn at a time."""
    mean_s: float = 1.0
    sigma: float = 1.0
    """Deviation of the log-normal time of a response."""
    longest_s: float = 8.0
    train_s: float = 1.0
    score_s: float = 0.05
    send_s: float = 0.05
    discard_s: float = 0.0
    seed: int = 0
    on_policy_fraction: float | None = None
    """The other prompts are stored ones, which nobody draws."""

    def response_s(self, sample_id: int, attempt: int) -> float:
        """Time of one draw of a sample; every draw has its own."""
        generator = np.random.default_rng(derive_seed(self.seed, sample_id, f"{attempt}"))
        drawn = self.mean_s * np.exp(self.sigma * generator.standard_normal() - self.sigma**2 / 2)
        return float(min(drawn, self.longest_s))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Record of a run; lengths in seconds."""

    step_s: np.ndarray
    drawn: np.ndarray
    """Lengths of the first draws, in the stream's order: what the student would say."""
    trained: Sequence[np.ndarray]
    """Lengths by step."""
    ages: Sequence[np.ndarray]
    """Versions behind of each sample, as the bound counts them, by step."""
    answered: Sequence[float]
    """Share of each step's samples that are the teachers' answers."""
    num_scored: int
    waits_s: np.ndarray
    """Seconds from the end of each draw that was trained on until its slot was ready."""
    num_refused: int
    values: Sequence[Mapping[str, float]]
    """Metrics of each step."""

    def mean_step_s(self, warm_up: int = 10) -> float:
        return float(self.step_s[warm_up:].mean())

    def mean_age(self, warm_up: int = 10) -> float:
        return float(np.concatenate(self.ages[warm_up:]).mean())


@dataclass
class _Sampler:
    """Implements ``Rollout``."""

    world: World
    turns: asyncio.Semaphore
    version: int = 0
    drawn: dict[tuple[int, int], float] = field(default_factory=dict)
    """(sample id, attempt) -> length."""
    ended: dict[int, float] = field(default_factory=dict)
    """Sample id -> when its last draw ended."""

    async def generate(self, prompts: Sequence[Prompt], *, ended: Callable[[Prompt, int], None]) -> list[SampleMeta]:
        num = self.world.samples_per_prompt
        return list(
            await asyncio.gather(
                *(self._draw(prompt, prompt.sample_id * num + j, ended) for prompt in prompts for j in range(num))
            )
        )

    async def _draw(self, prompt: Prompt, sample_id: int, ended: Callable[[Prompt, int], None]) -> SampleMeta:
        seconds = self.world.response_s(sample_id, prompt.attempt)
        async with self.turns:
            began_with = self.version
            await asyncio.sleep(seconds)
            ended_with = self.version if self.world.on_new_weights == "continue" else began_with
        ended(prompt, ended_with)
        self.drawn[sample_id, prompt.attempt] = seconds
        self.ended[sample_id] = asyncio.get_running_loop().time()
        num_tokens = max(1, round(seconds * TOKENS_PER_S))
        span = ended_with - began_with
        more = {"response": num_tokens, "num_versions": span + 1, "version_span": span}
        return meta_of(sample_id, prompt.domain, began_with, **more)


class _Stored:
    """Implements ``StoredWorker``."""

    async def load(self, prompts: Sequence[Prompt], weight_version: int) -> list[SampleMeta]:
        return [meta_of(prompt.sample_id, prompt.domain, weight_version) for prompt in prompts]


@dataclass
class _Answers:
    """Stands for ``AnswerWorker``; its responses take no time of the sampler's."""

    world: World
    given: set[int] = field(default_factory=set)

    async def generate(self, prompts: Sequence[Prompt], *, version: Callable[[], int]) -> list[SampleMeta]:
        num = self.world.samples_per_prompt
        sample_ids = [(prompt, prompt.sample_id * num + j) for prompt in prompts for j in range(num)]
        await asyncio.sleep(max(self.world.response_s(sample_id, 0) for _, sample_id in sample_ids))
        self.given |= {sample_id for _, sample_id in sample_ids}
        return [meta_of(sample_id, prompt.domain, version()) for prompt, sample_id in sample_ids]


@dataclass
class _Teacher:
    """Implements ``Teachers``."""

    world: World
    num_scored: int = 0

    async def score(self, samples: Sequence[SampleMeta], rows: Mapping[int, int]) -> list[FailedSample]:
        self.num_scored += len(samples)
        await asyncio.sleep(self.world.score_s)
        return []

    async def coverage(self, batch: Batch) -> dict[str, float]:
        return {}


@dataclass
class _Student:
    """Implements ``Student``."""

    world: World
    sampler: _Sampler
    answers: _Answers
    dp_size: int = 1
    packing: PackingRules = PackingRules(is_packed=True, max_tokens=1 << 20, micro_batch_size=None, square_cost=0.0)
    _version: int = 0
    trained: list[np.ndarray] = field(default_factory=list)
    ages: list[np.ndarray] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)

    async def expect_step(self) -> None:
        pass

    async def forward_backward(self, plan: MicroBatchPlan, *, diagnostics: bool) -> dict[str, DomainSums]:
        samples = [sample for rank in plan.micro_batches for batch in rank for sample in batch]
        self.ages.append(np.array([len(self.trained) - sample.newest_version for sample in samples]))
        self.trained.append(np.array([sample.response_length / TOKENS_PER_S for sample in samples]))
        self.answered.append(sum(sample.sample_id in self.answers.given for sample in samples) / len(samples))
        await asyncio.sleep(self.world.train_s)
        counts = Counter(sample.domain for sample in samples)
        return {name: DomainSums(num_tokens=count, sums={"weighted_loss": 0.0}) for name, count in counts.items()}

    async def optim_step(self) -> dict[str, float]:
        return {}

    async def refresh(self, step: int) -> None:
        pass

    async def stage(self, weight_version: int) -> None:
        self._version = weight_version

    async def send(self) -> None:
        version = self._version
        await asyncio.sleep(self.world.send_s)
        self.sampler.version = version


@dataclass
class _Plane:
    """Implements ``Plane``, for samples without fields."""

    ledger: Ledger
    discard_s: float
    ready_at: dict[int, float] = field(default_factory=dict)
    """Sample id -> seconds when its slot was ready."""

    async def claim(self, sample_ids: Sequence[int], fields: Sequence[str]) -> Batch:
        known = {sample.sample_id: sample for slot in self.ledger.slots for sample in slot.samples}
        ready = {sample.sample_id: slot.ready_at for slot in self.ledger.slots for sample in slot.samples}
        self.ready_at |= {sample_id: ready[sample_id] for sample_id in sample_ids}
        return Batch(samples=tuple(known[sample_id] for sample_id in sample_ids))

    async def release(self, batch: Batch) -> None:
        pass

    async def discard(self, sample_ids: Sequence[int]) -> None:
        await asyncio.sleep(self.discard_s)


@dataclass
class Records:
    """Implements ``Observer``."""

    times: list[float] = field(default_factory=list)
    values: list[Mapping[str, float]] = field(default_factory=list)

    def needs_weights(self, step: int) -> bool:
        return False

    async def log(self, metrics: StepMetrics) -> None:
        self.times.append(asyncio.get_running_loop().time())
        self.values.append(metrics.values)

    async def after_step(self, step: int, state: Mapping[str, Any]) -> None:
        pass

    async def on_stop(self, step: int, state: Mapping[str, Any]) -> None:
        raise AssertionError("no stop was requested")


def recipe_of(world: World) -> Recipe:
    """The benchmarks' recipe, with the world's schedule."""
    scenario = Scenario(
        name="async",
        lengths=Lengths(mean=10),
        max_response_length=100,
        num_prompts=world.prompts_per_step,
        samples_per_prompt=world.samples_per_prompt,
    )
    warm_up = WarmUpConfig(objective="sft_on_teacher", steps=world.warm_up) if world.warm_up else None
    recipe = make_recipe(scenario, max_staleness=world.max_staleness, steps=world.steps)
    return dataclasses.replace(
        recipe,
        rollout=dataclasses.replace(recipe.rollout, on_new_weights=world.on_new_weights),
        schedule=dataclasses.replace(recipe.schedule, warm_up=warm_up, sync_every_steps=world.sync_every_steps),
        answers=AnswersConfig(temperature=1.0),
    )


def run(world: World) -> Outcome:
    """Train ``world.steps`` steps in simulated time."""
    recipe = recipe_of(world)

    async def work() -> Outcome:
        clock = asyncio.get_running_loop().time
        ledger = Ledger(
            prompts_per_step=world.prompts_per_step,
            max_staleness=world.max_staleness,
            step=0,
            last_step=world.steps,
            warm_up=world.warm_up,
            on_expiry=world.on_expiry,
            on_new_weights=world.on_new_weights,
            clock=clock,
        )
        sampler = _Sampler(world, asyncio.Semaphore(world.num_places))
        answers, teacher = _Answers(world), _Teacher(world)
        student, records, plane = _Student(world, sampler, answers), Records(), _Plane(ledger, world.discard_s)
        stream, stored = make_stream(world.seed), None
        if world.on_policy_fraction is not None:
            rows = make_dataset().rows_by_domain
            fraction, domains = world.on_policy_fraction, ["math", "code", "math"]
            stream = MixedStream(rows, SHARES, world.seed, stored=domains, on_policy_fraction=fraction)
            stored = _Stored()
        controller = Controller(
            recipe=recipe,
            prompts=stream,
            stored=stored,
            rollout=sampler,
            answers=answers,
            teachers=teacher,
            rewards=None,
            student=student,
            plane=plane,
            observer=records,
            ledger=ledger,
            stop=Stop(),
            unit=1,
        )
        controller.timer = StepTimer(clock)
        await controller.run()
        return Outcome(
            step_s=np.diff(records.times),
            drawn=np.array([seconds for (_, attempt), seconds in sorted(sampler.drawn.items()) if attempt == 0]),
            trained=student.trained,
            ages=student.ages,
            answered=student.answered,
            num_scored=teacher.num_scored,
            waits_s=np.array([at - sampler.ended[i] for i, at in plane.ready_at.items() if i in sampler.ended]),
            num_refused=sum(ledger.state_dict()["refused"].values()),
            values=records.values,
        )

    return run_on_token_clock(work())


def ks_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Kolmogorov and Smirnov's distance of two samples: the largest difference of their distribution functions."""
    at = np.sort(np.concatenate([one, other]))
    shares = [np.searchsorted(np.sort(values), at, side="right") / len(values) for values in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def ks_noise(num_one: int, num_other: int) -> float:
    """The distance that two samples of one distribution exceed once in a thousand times (Smirnov 1948)."""
    return 1.95 * float(np.sqrt((num_one + num_other) / (num_one * num_other)))


def main() -> None:
    """Print the table of docs/pipeline.md."""
    worlds = {"balanced": {"train_s": 1.0, "num_places": 80}, "trainer": {"train_s": 3.0}, "rollout": {"train_s": 0.5}}
    print("bound by   n  on_expiry  on_new_weights  step, s  age   refused  longest 5 %, trained / drawn  KS / noise")
    for name, times in worlds.items():
        for max_staleness in (1, 2, 4):
            for on_expiry, on_new_weights in (("redraw", "finish"), ("hold", "finish"), ("hold", "continue")):
                world = World(
                    max_staleness=max_staleness, on_expiry=on_expiry, on_new_weights=on_new_weights, steps=150, **times
                )
                found = run(world)
                trained = np.concatenate(found.trained)
                top = [np.sort(values)[-len(values) // 20 :].mean() for values in (trained, found.drawn)]
                distance = ks_distance(trained, found.drawn) / ks_noise(len(trained), len(found.drawn))
                print(
                    f"{name:9}  {max_staleness}  {on_expiry:9}  {on_new_weights:14}  {found.mean_step_s():7.3f}  "
                    f"{found.mean_age():4.2f}  {100 * found.num_refused / len(trained):5.1f} %  "
                    f"{top[0]:5.2f} / {top[1]:5.2f}                {distance:5.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
