"""Runs on a simulated clock: the real controller, ledger, routers, workers and local data plane, with engines and a
student that take time by tokens. Every way to share a few GPUs out among them can be tried.

``python -m tests.unit.planning.simulated`` tries all of them in twenty worlds, and prints what share of the best
split's throughput the suggested one has."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mopd.base.tasks import Stop
from mopd.bench.pipeline import SleepingStudent, SwappedWeights
from mopd.bench.stand_ins import (
    PROMPT_LENGTH,
    SHARES,
    VOCAB_SIZE,
    Lengths,
    Scenario,
    SleepingGenerator,
    SleepingScorer,
    make_dataset,
    make_recipe,
    make_stream,
)
from mopd.config.payloads import Asked
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import EngineLimits, SamplingParams
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.engines.wire.weights import stage_updates
from mopd.orchestrator.controller import Controller
from mopd.orchestrator.ledger import Ledger
from mopd.orchestrator.rollout import RolloutWorker
from mopd.orchestrator.teachers import TeacherWorker
from mopd.planning.balance import GroupLoad, TrainerLoad, ranked
from mopd.planning.stages import StageTime
from tests.fixtures.token_clock import run_on_token_clock
from tests.unit.orchestrator.async_world import Records
from tests.unit.orchestrator.groups import teacher_of

NUM_GPUS = 7
TRAINER_GPUS = (1, 2, 3)
SEQUENCES = 4
"""Sequences that a rollout replica draws at a time."""
WARM_UP, STEPS = 1, 2


@dataclass(frozen=True)
class World:
    """Speed of every stage, on one GPU each."""

    scenario: Scenario
    max_staleness: int
    train_s: float
    draw_s: float
    """Seconds of a token of each of the responses that a replica draws at a time."""
    score_s: Mapping[str, float]
    """Seconds of a token, by domain."""

    @property
    def length(self) -> int:
        return self.scenario.lengths.mean

    def loads(self) -> tuple[list[TrainerLoad], list[GroupLoad]]:
        """Return the loads as a plan of this world sees them."""
        samples, longest = self.scenario.num_samples, self.scenario.max_response_length

        def draw(replicas: int) -> StageTime:
            seconds = samples * self.length * self.draw_s / (replicas * SEQUENCES)
            alone = longest if self.scenario.lengths.sigma else self.length
            return StageTime(capacity_s=seconds, step_s=max(seconds, alone * self.draw_s), bound="operations")

        def score(domain: str, replicas: int) -> StageTime:
            seconds = samples * SHARES[domain] * (PROMPT_LENGTH + self.length) * self.score_s[domain] / replicas
            return StageTime(capacity_s=seconds, step_s=seconds, bound="operations")

        groups = [GroupLoad(name="rollout", gpus=1, time=draw)]
        groups += [
            GroupLoad(name=f"teachers/{domain}", gpus=1, time=lambda replicas, domain=domain: score(domain, replicas))
            for domain in SHARES
        ]
        trainers = [
            TrainerLoad(
                gpus=gpus, parts={"all": self.train_s / gpus}, sync=lambda replicas: (0.0, self.scenario.send_s)
            )
            for gpus in TRAINER_GPUS
        ]
        return trainers, groups


def draw_world(seed: int) -> World:
    """Stages whose work differs by up to eight times, each of the three kinds of schedules in turn."""
    generator = np.random.default_rng(seed)
    sigma = 0.0 if seed % 2 else 0.6
    scenario = Scenario(
        name=str(seed),
        lengths=Lengths(mean=32, sigma=sigma),
        max_response_length=96,
        num_prompts=16,
        samples_per_prompt=1,
        send_s=0.02,
    )
    work = np.exp(generator.uniform(np.log(0.5), np.log(4.0), size=2 + len(SHARES)))
    tokens = {domain: scenario.num_samples * share * (PROMPT_LENGTH + 32) for domain, share in SHARES.items()}
    return World(
        scenario=scenario,
        max_staleness=seed % 3,
        train_s=float(work[0]),
        draw_s=float(work[1]) * SEQUENCES / (scenario.num_samples * 32),
        score_s={domain: float(seconds) / tokens[domain] for domain, seconds in zip(SHARES, work[2:], strict=True)},
    )


def all_splits() -> Iterator[tuple[int, dict[str, int]]]:
    """GPUs of the trainer, and replicas of every group: everything that uses all GPUs."""
    names = ["rollout", *(f"teachers/{domain}" for domain in SHARES)]
    for gpus in TRAINER_GPUS:
        left = NUM_GPUS - gpus
        for counts in itertools.product(range(1, left + 1), repeat=len(names)):
            if sum(counts) == left:
                yield gpus, dict(zip(names, counts, strict=True))


def reached(seed: int) -> tuple[float, tuple[int, ...]]:
    """The suggested split's throughput over the best one's, and the suggestion. Where more GPUs would not help, some
    are left over: what runs is the split as it is suggested."""
    world = draw_world(seed)
    trainers, groups = world.loads()
    best, *_ = ranked(NUM_GPUS, trainers, groups, max_staleness=world.max_staleness)
    least = min(step_s(world, gpus, replicas) for gpus, replicas in all_splits())
    own = step_s(world, best.trainer.gpus, best.replicas)
    return least / own, (best.trainer.gpus, *best.replicas.values())


def step_s(world: World, gpus: int, replicas: Mapping[str, int]) -> float:
    """Simulated seconds of a step, the mean of ``STEPS`` behind ``WARM_UP``."""
    scenario = replace(world.scenario, train_s=world.train_s / gpus, stage_s=0.0)
    recipe = make_recipe(scenario, max_staleness=world.max_staleness, steps=WARM_UP + STEPS + world.max_staleness)

    async def work() -> Sequence[float]:
        plane, records, limits = LocalDataPlane(), Records(), EngineLimits(max_sequences=SEQUENCES)
        drawing = {"max_sequences": SEQUENCES, "s_per_token": world.draw_s, "swap_s": 0.0}
        engines = [SleepingGenerator(scenario.lengths, **drawing) for _ in range(replicas["rollout"])]
        members = [Replica(name=f"rollout.{i}", engine=engine, limits=limits) for i, engine in enumerate(engines)]
        rollout = Router("rollout", members, recipe.rollout.routing, kind="rollout")
        sync = SwappedWeights(rollout, on_running=recipe.on_new_weights)
        await sync.send(stage_updates([], 0))
        groups = {}
        for domain in SHARES:
            scorers = [SleepingScorer(s_per_token=world.score_s[domain]) for _ in range(replicas[f"teachers/{domain}"])]
            groups[domain] = teacher_of(domain, *scorers, vocab_size=VOCAB_SIZE)
        sampling = SamplingParams(max_new_tokens=recipe.rollout.max_response_length)
        await Controller(
            recipe=recipe,
            prompts=make_stream(recipe.seed),
            rollout=RolloutWorker(rollout, plane, make_dataset(), sampling=sampling, seed=recipe.seed),
            teachers=TeacherWorker(
                groups, recipe.assignment, plane, asked=dict.fromkeys(groups, Asked(own=1)), temperature=1.0
            ),
            rewards=None,
            student=SleepingStudent(scenario, sync),
            plane=plane,
            observer=records,
            ledger=Ledger(
                prompts_per_step=world.scenario.num_prompts,
                max_staleness=world.max_staleness,
                step=0,
                on_new_weights=recipe.on_new_weights,
                clock=asyncio.get_running_loop().time,
            ),
            stop=Stop(),
            unit=1,
        ).run()
        return records.times

    ends = run_on_token_clock(work())
    return (ends[WARM_UP + STEPS - 1] - ends[WARM_UP - 1]) / STEPS


if __name__ == "__main__":
    for number in range(20):
        share, split = reached(number)
        print(f"world {number}, max_staleness {number % 3}: {split} reaches {share:.3f}")
