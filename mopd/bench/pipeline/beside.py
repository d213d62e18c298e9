"""A run's own workers, routers and storage around the stand-ins, on the event loop of their controller, as in the
orchestrator of a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mopd.bench.pipeline.engines import VOCAB_SIZE, SleepingGenerator, SleepingScorer
from mopd.bench.pipeline.plan import PROMPT_LENGTH, ROLLOUT_REPLICAS, SHARES, TEACHER_REPLICAS, Scenario
from mopd.bench.pipeline.weights import UnpackedWeights, make_weights
from mopd.config.schema import Recipe
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import EngineLimits, SamplingParams
from mopd.replicas.interface import Replica
from mopd.replicas.router import Router
from mopd.rewards.domains import build_rewards
from mopd.rollout.rewards import RewardWorker
from mopd.rollout.worker import RolloutWorker
from mopd.teachers.worker import TeacherGroup, TeacherWorker

T = TypeVar("T")

ROWS_PER_DOMAIN = 64


def make_dataset() -> PromptDataset:
    """As many prompts of each domain; they end like no response, so every answer is wrong."""
    return PromptDataset(
        [
            PromptRow(
                domain=domain,
                text="",
                tokens=tuple(range(PROMPT_LENGTH)),
                ground_truth="none",
                extra_info=None,
                place="",
            )
            for domain in SHARES
            for _ in range(ROWS_PER_DOMAIN)
        ]
    )


@dataclass(frozen=True, kw_only=True)
class PipelineWorkers:
    """What a controller orders."""

    rollout: RolloutWorker
    teachers: TeacherWorker
    rewards: RewardWorker
    plane: LocalDataPlane
    sync: UnpackedWeights


def with_workers(recipe: Recipe, scenario: Scenario, work: Callable[[PipelineWorkers], Coroutine[Any, Any, T]]) -> T:
    """``work`` with new workers, on an event loop of its own."""

    async def main() -> T:
        return await work(await _build(recipe, scenario))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return asyncio.run(main())
    finally:
        torch.set_num_threads(threads)


async def _build(recipe: Recipe, scenario: Scenario) -> PipelineWorkers:
    plane = LocalDataPlane()
    rollout = _rollout_router(recipe, scenario)
    sync = UnpackedWeights(rollout, on_running=recipe.on_new_weights, slots=make_weights(scenario.weights_mb))
    await sync.ask_for(0)
    dataset = make_dataset()
    return PipelineWorkers(
        rollout=RolloutWorker(
            rollout,
            plane,
            dataset,
            sampling=SamplingParams(max_new_tokens=recipe.rollout.max_response_length),
            seed=recipe.seed,
            samples_per_prompt=recipe.rollout.samples_per_prompt,
        ),
        teachers=TeacherWorker(
            {domain: _teacher(recipe, scenario, domain) for domain in SHARES},
            recipe.assignment,
            plane,
            top_k=recipe.loss.top_k,
            temperature=recipe.loss.temperature,
        ),
        rewards=RewardWorker(dataset, _tokenizer(), build_rewards(recipe.rewards), plane),
        plane=plane,
        sync=sync,
    )


def _rollout_router(recipe: Recipe, scenario: Scenario) -> Router:
    limits = EngineLimits(max_sequences=scenario.max_sequences)
    replicas = [
        Replica(
            name=f"rollout.{i}",
            engine=SleepingGenerator(
                scenario.lengths,
                max_sequences=scenario.max_sequences,
                s_per_token=scenario.s_per_drawn_token,
                swap_s=scenario.swap_s,
            ),
            limits=limits,
        )
        for i in range(ROLLOUT_REPLICAS)
    ]
    return Router("rollout", replicas, recipe.rollout.routing, kind="rollout")


def _teacher(recipe: Recipe, scenario: Scenario, domain: str) -> TeacherGroup:
    replicas = [
        Replica(name=f"{domain}.{i}", engine=SleepingScorer(s_per_token=scenario.s_per_scored_token(domain)))
        for i in range(TEACHER_REPLICAS)
    ]
    router = Router(domain, replicas, recipe.teachers[domain].routing, kind="teacher")
    return TeacherGroup(domain, router, vocab_size=VOCAB_SIZE)


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")))
