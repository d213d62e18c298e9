"""The process beside the controller's, with a run's own workers, routers, storage and handlers around the stand-ins.

It is forked, so that the two event loops have a processor each, as in a run, and what moves between them goes through
the socket that a run's goes through.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
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
from mopd.producer.channel import Channel, PeerEnded
from mopd.producer.samples import SampleAnswers
from mopd.producer.weights import WeightAnswers
from mopd.replicas.interface import Replica
from mopd.replicas.router import Router
from mopd.rewards.domains import build_rewards
from mopd.rollout.rewards import RewardWorker
from mopd.rollout.worker import RolloutWorker
from mopd.tasks import Tasks
from mopd.teachers.worker import TeacherGroup, TeacherWorker

T = TypeVar("T")

ROWS_PER_DOMAIN = 64
END_S = 10.0


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


def with_process(recipe: Recipe, scenario: Scenario, work: Callable[[Channel], Coroutine[Any, Any, T]]) -> T:
    """``work`` with the way to a new process, which ends with it."""
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(recipe, scenario, theirs), daemon=True)
    process.start()  # before this process has an event loop
    theirs.close()
    ours.setblocking(False)

    async def with_channel() -> T:
        channel = Channel("the process beside", {})
        async with Tasks() as tasks:
            tasks.start(channel.run(ours))
            return await tasks.unless_failed(work(channel))

    try:
        return asyncio.run(with_channel())
    finally:
        ours.close()
        process.join(END_S)
        process.kill()
        process.join()


def _work(recipe: Recipe, scenario: Scenario, end: socket.socket) -> None:
    """The whole life of the process."""
    end.setblocking(False)
    torch.set_num_threads(1)
    asyncio.run(_serve(recipe, scenario, end))


async def _serve(recipe: Recipe, scenario: Scenario, end: socket.socket) -> None:
    plane = LocalDataPlane()
    rollout = _rollout_router(recipe, scenario)
    sync = UnpackedWeights(rollout, on_running=recipe.on_new_weights, slots=make_weights(scenario.weights_mb))
    dataset = make_dataset()
    answers = SampleAnswers(
        RolloutWorker(
            rollout,
            plane,
            dataset,
            sampling=SamplingParams(max_new_tokens=recipe.rollout.max_response_length),
            seed=recipe.seed,
            samples_per_prompt=recipe.rollout.samples_per_prompt,
        ),
        TeacherWorker(
            {domain: _teacher(recipe, scenario, domain) for domain in SHARES},
            recipe.assignment,
            plane,
            top_k=recipe.loss.top_k,
            temperature=recipe.loss.temperature,
        ),
        RewardWorker(dataset, _tokenizer(), build_rewards(recipe.rewards), plane),
        plane,
    )

    async def processor_s() -> float:
        return time.process_time()

    await sync.publish([], 0)
    handlers = {**answers.handlers, **WeightAnswers(lambda: sync).handlers, "processor_s": processor_s}
    channel = Channel("the controller", handlers)
    with suppress(PeerEnded):
        await channel.run(end)


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
