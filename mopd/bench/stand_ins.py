"""Parts of the runs of ``mopd bench pipeline``: engines that sleep as long as the work would take and answer with
tensors of the right shapes, response lengths, prompts, and the recipe that a controller gets.

What differs between responses differs by their seeds alone: a stage alone and a whole run have the same lengths.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from mopd.config.data import DataConfig
from mopd.config.groups import TeacherConfig
from mopd.config.losses import Loss, MismatchCorrectionConfig, PolicyGradientConfig, TopKLossConfig
from mopd.config.output import CheckpointConfig
from mopd.config.rewards import ExactMatchConfig
from mopd.config.rollout import RolloutConfig
from mopd.config.schedule import PreflightConfig, ScheduleConfig
from mopd.config.schema import Recipe
from mopd.config.student import StudentConfig
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data.stream import PromptStream
from mopd.engines.concurrency import all_or_none
from mopd.engines.interface import Generation, ResponseCallback, Scores, ToDraw, ToScore

VOCAB_SIZE = 1024
LOGPROB = -20.0
"""Log-prob of every token: up to a million of them have less than the whole mass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Response lengths: log-normal around ``mean``, or all ``mean`` where ``sigma`` is 0."""

    mean: int
    sigma: float = 0.0

    def draw(self, seed: int, most: int) -> int:
        """Draw the length of the response with this seed, 1 to ``most``."""
        if not self.sigma:
            return min(self.mean, most)
        normal = np.random.default_rng(seed).standard_normal()
        length = self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)
        return int(min(max(round(length), 1), most))


class SleepingGenerator:
    """Engine that draws ``max_sequences`` responses at a time, each in its own time, and reports each as it ends
    (continuous batching). New weights stop it for ``swap_s``; running responses then go on under them."""

    def __init__(self, lengths: Lengths, *, max_sequences: int, s_per_token: float, swap_s: float) -> None:
        self._lengths, self._s_per_token, self._swap_s = lengths, s_per_token, swap_s
        self._turns = asyncio.Semaphore(max_sequences)
        self._free_at = [-math.inf] * max_sequences
        """Heap of the times at which free slots were due to become free. The next response begins then, not when this
        process noticed: a server has its own processor. So in ``SleepingScorer``."""
        self._works = asyncio.Event()
        self._works.set()
        self._stopped_s = 0.0
        self._swapped_at = -math.inf
        self.weight_version = -1

    async def load_weights(self, weight_version: int) -> None:
        """Stand still as an engine that takes weights does; there are none."""
        self._works.clear()
        await asyncio.sleep(self._swap_s)
        self._stopped_s += self._swap_s
        self.weight_version, self._swapped_at = weight_version, asyncio.get_running_loop().time()
        self._works.set()

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        came_at = asyncio.get_running_loop().time()

        async def one(i: int, seed: int) -> Generation:
            async with self._turns:
                response = await self._respond(came_at, self._lengths.draw(seed, asked.sampling.max_new_tokens))
            if on_response is not None:
                on_response(i, response)
            return response

        return await all_or_none(one(i, seed) for i, seed in enumerate(asked.seeds))

    async def _respond(self, came_at: float, length: int) -> Generation:
        await self._works.wait()
        loop = asyncio.get_running_loop()
        version, stopped_s = self.weight_version, self._stopped_s
        begun = max(heapq.heappop(self._free_at), came_at)
        due = begun + length * self._s_per_token
        try:
            while (left_s := due + self._stopped_s - stopped_s - loop.time()) > 0:
                await asyncio.sleep(left_s)
                await self._works.wait()
        finally:
            heapq.heappush(self._free_at, due + self._stopped_s - stopped_s)
        old = length if self.weight_version == version else self._drawn_before_swap(begun, length)
        versions = torch.full((length,), self.weight_version, dtype=torch.int32)
        versions[:old] = version
        tokens, logprobs = torch.full((length,), VOCAB_SIZE - 1), torch.full((length,), LOGPROB)
        return Generation(tokens=tokens, logprobs=logprobs, token_versions=versions, finish_reason="stop")

    def _drawn_before_swap(self, begun: float, length: int) -> int:
        if not self._s_per_token:
            return length
        return max(0, min(length, int((self._swapped_at - self._swap_s - begun) / self._s_per_token)))


class SleepingScorer:
    """Engine that scores one request after the other, in a time that grows with its tokens (a prefill)."""

    def __init__(self, *, s_per_token: float) -> None:
        self._s_per_token = s_per_token
        self._turn = asyncio.Lock()
        self._free_at = 0.0

    async def score(self, asked: ToScore) -> list[Scores]:
        loop = asyncio.get_running_loop()
        came_at = loop.time()
        async with self._turn:
            self._free_at = max(self._free_at, came_at) + self._s_per_token * sum(map(len, asked.tokens))
            await asyncio.sleep(max(0.0, self._free_at - loop.time()))
        return [
            Scores(
                ids=torch.arange(asked.top_k, dtype=torch.int32).expand(len(sequence) - start, asked.top_k),
                logprobs=torch.full((len(sequence) - start, asked.top_k), LOGPROB),
                token_logprobs=torch.full((len(sequence) - start,), LOGPROB),
            )
            for sequence, start in zip(asked.tokens, asked.prompt_lengths, strict=True)
        ]


SHARES = {"chat": 0.2, "code": 0.3, "math": 0.5}
"""Domains of the stream; each has a teacher of its own, of the same name."""
PROMPT_LENGTH = 32
ROLLOUT_REPLICAS = 2
TEACHER_REPLICAS = 2
WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Seconds that each stage takes for a step's samples at its capacity, and what the samples are like."""

    name: str
    lengths: Lengths
    max_response_length: int
    top_k: int = 16
    num_prompts: int = 64
    """Number of prompts of a step."""
    samples_per_prompt: int = 2
    max_sequences: int = 8
    """Responses that one rollout replica works on at a time."""
    rollout_s: float = 0.0
    teacher_s: float = 0.0
    """Time of each teacher, shared by its replicas."""
    slow_domain: str | None = None
    slow_factor: float = 4.0
    """How many times as long as the others its teacher takes."""
    train_s: float = 0.0
    """Time of forward, backward and optimizer."""
    stage_s: float = 0.0
    """Time in which the student hands its weights over."""
    send_s: float = 0.0
    """Time in which they travel, while everything else goes on."""
    swap_s: float = 0.0
    """Time in which a rollout replica stands still."""
    staleness: tuple[int, ...] = (1, 2)
    """Values of ``max_staleness`` to run, beside 0."""
    most_age: float | None = None
    """Goal of the samples' mean age in optimizer steps, at any staleness; ``None`` where the rollout decides it."""

    @property
    def num_samples(self) -> int:
        """Number of samples of a step."""
        return self.num_prompts * self.samples_per_prompt

    @property
    def s_per_drawn_token(self) -> float:
        """Seconds of a token of one of the responses that a rollout replica draws at a time."""
        at_a_time = ROLLOUT_REPLICAS * self.max_sequences
        return self.rollout_s * at_a_time / (self.num_samples * self.lengths.mean)

    def s_per_scored_token(self, domain: str) -> float:
        """Seconds of a token on one replica of the domain's teacher."""
        tokens = self.num_samples * SHARES[domain] * (PROMPT_LENGTH + self.lengths.mean)
        seconds = self.teacher_s * (self.slow_factor if domain == self.slow_domain else 1.0)
        return seconds * TEACHER_REPLICAS / tokens

    def scaled(self, factor: float) -> Scenario:
        """Return the scenario with all times multiplied by ``factor``."""
        return replace(self, **{name: factor * value for name, value in asdict(self).items() if name.endswith("_s")})


def make_recipe(scenario: Scenario, *, max_staleness: int, steps: int) -> Recipe:
    """Make a recipe whose loss needs a reward of every response, where a prompt has several of them."""
    loss: Loss = TopKLossConfig(top_k=scenario.top_k)
    if scenario.samples_per_prompt > 1:
        correction = MismatchCorrectionConfig(type="tis")
        rewarded: dict[str, Any] = {"type": "policy_gradient", "task_reward_weight": 1.0, "correction": correction}
        loss = PolicyGradientConfig(top_k=scenario.top_k, **rewarded)
    longest = PROMPT_LENGTH + scenario.max_response_length
    teachers = {name: TeacherConfig(model="none", domains=(name,), replicas=TEACHER_REPLICAS) for name in SHARES}
    return Recipe(
        run_dir="unused",
        student=StudentConfig(model="none", max_tokens_per_micro_batch=2 * longest),
        teachers=teachers,
        data=DataConfig(train=("none.jsonl",)),
        rewards={"default": ExactMatchConfig(type="exact_match")},
        rollout=RolloutConfig(
            replicas=ROLLOUT_REPLICAS,
            samples_per_prompt=scenario.samples_per_prompt,
            max_response_length=scenario.max_response_length,
            on_new_weights="continue" if max_staleness else "finish",
        ),
        loss=loss,
        schedule=ScheduleConfig(
            steps=steps, prompts_per_step=scenario.num_prompts, max_staleness=max_staleness, wait_timeout_s=WAIT_S
        ),
        checkpoint=CheckpointConfig(keep_best=False),
        preflight=PreflightConfig(require_better_teacher=False),
    )


ROWS_PER_DOMAIN = 64


def make_dataset() -> PromptDataset:
    """Make as many prompts of each domain; their ground truth is no response's, so every answer is wrong."""
    tokens = tuple(range(PROMPT_LENGTH))
    return PromptDataset(
        [
            PromptRow(domain=domain, text="", tokens=tokens, ground_truth="none", extra_info=None, place="")
            for domain in SHARES
            for _ in range(ROWS_PER_DOMAIN)
        ]
    )


def make_stream(seed: int) -> PromptStream:
    """Stream prompts in the mix of ``SHARES``."""
    return PromptStream(make_dataset().rows_by_domain, SHARES, seed)
