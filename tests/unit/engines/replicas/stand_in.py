"""An engine whose answers tell which sample and which replica they belong to, and that fails as it is told.

Runs on the simulated clock of ``tests.fixtures.token_clock``: 1 s is 100 tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mopd.config.groups import RoutingConfig
from mopd.engines.interface import (
    EngineLimits,
    Generation,
    ResponseCallback,
    SamplingParams,
    Scores,
    ToDraw,
    ToScore,
)
from mopd.engines.replicas.interface import Replica, RouterLimits
from mopd.engines.replicas.router import Router
from tests.fixtures.token_clock import run_on_token_clock

TOKENS_PER_S = 100.0
SAMPLING = SamplingParams(max_new_tokens=5)
Plan = Callable[[int], Exception | float | None]
"""Number of a call (from 0) -> error that it ends with, seconds that it takes besides, or nothing."""


class StandIn:
    """Scores and generates; ``plan`` says what goes wrong at which call."""

    def __init__(self, number: int = 0, plan: Plan = lambda call: None, *, tokens_per_s: float = TOKENS_PER_S) -> None:
        self.number, self.plan, self.tokens_per_s = number, plan, tokens_per_s
        self.weight_version = 0
        self.calls: list[list[int]] = []
        """First token of each sample, call by call."""
        self.answered: list[int] = []
        """First tokens of samples whose answers were handed out."""
        self.tokens_now = self.most_tokens = 0
        self.bytes_sent = self.bytes_received = 0

    async def score(self, asked: ToScore) -> list[Scores]:
        top_k = asked.top_k
        firsts = [int(sequence[0]) for sequence in asked.tokens]
        await self._work(firsts, sum(map(len, asked.tokens)))
        return [
            Scores(
                ids=(sequence[start:, None] + torch.arange(1, 1 + top_k)).int(),
                logprobs=torch.full((len(sequence) - start, top_k), -20.0 - self.number),
                token_logprobs=-100.0 - sequence[start:] * asked.temperature,
            )
            for sequence, start in zip(asked.tokens, asked.prompt_lengths, strict=True)
        ]

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        prompts, sampling = asked.prompts, asked.sampling
        await self._work([prompt[0] for prompt in prompts], sum(map(len, prompts)) + sampling.max_new_tokens)
        return [
            Generation(
                tokens=torch.full((sampling.max_new_tokens,), prompt[0] + seed),
                logprobs=torch.full((sampling.max_new_tokens,), -float(self.weight_version)),
                finish_reason="length",
                token_versions=torch.full((sampling.max_new_tokens,), self.weight_version, dtype=torch.int32),
            )
            for prompt, seed in zip(prompts, asked.seeds, strict=True)
        ]

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        assert [name for name, _ in weights] == ["w"]
        self.weight_version = weight_version

    async def _work(self, firsts: list[int], num_tokens: int) -> None:
        call = len(self.calls)
        self.calls.append(firsts)
        self.tokens_now += num_tokens
        self.most_tokens = max(self.most_tokens, self.tokens_now)
        self.bytes_sent += num_tokens
        try:
            trouble = self.plan(call)
            if isinstance(trouble, Exception):
                await asyncio.sleep(0.001)
                raise trouble
            await asyncio.sleep(num_tokens / self.tokens_per_s + (trouble or 0.0))
            self.bytes_received += 10 * num_tokens
            self.answered += firsts
        finally:
            self.tokens_now -= num_tokens


def samples(*lengths: int) -> tuple[list[Tensor], list[int]]:
    """Sequences that begin with their own position + 1000, prompts of one token."""
    tokens = [
        torch.cat([torch.tensor([1000 + i]), torch.arange(1, length) + 10 * i]) for i, length in enumerate(lengths)
    ]
    return tokens, [1] * len(lengths)


def make_router(engines: Sequence[Any], *, kind: Any = "teacher", **routing: Any) -> Router:
    """Replicas ``math.0``, ``math.1``, … of a teacher ``math`` with short deadlines."""
    keys = {"max_tokens_per_request": 40, "max_inflight_tokens": 80, "request_timeout_s": 10.0}
    limits = {"max_attempts": 3, "backoff_s": 0.5, "breaker_failures": 3, "breaker_reset_s": 5.0}
    replicas = [Replica(name=f"math.{i}", engine=engine) for i, engine in enumerate(engines)]
    return Router(
        "math",
        replicas,
        RoutingConfig(**{name: routing.get(name, value) for name, value in keys.items()}),
        kind=kind,
        limits=RouterLimits(**{name: routing.get(name, value) for name, value in limits.items()}),
    )


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    """``work()`` on the simulated clock; nothing may be left over."""

    async def watched() -> Any:
        result = await work()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return run_on_token_clock(watched())


async def score(router: Router, tokens: Sequence[Tensor], starts: Sequence[int]) -> list[Scores]:
    return cast("list[Scores]", await router.score(ToScore(tokens, starts, top_k=2, temperature=2.0)))


def check_scores(tokens: Sequence[Tensor], scores: Sequence[Scores]) -> None:
    """Each sample has its own answer, in its own place."""
    assert len(scores) == len(tokens)
    for sequence, given in zip(tokens, scores, strict=True):
        assert torch.equal(given.token_logprobs, -100.0 - sequence[1:] * 2.0)
        assert given.ids.shape == (len(sequence) - 1, 2)


class Teller(StandIn):
    """Draws responses side by side and tells each one when it is complete: that of a prompt takes as many seconds as
    its second token says. A call that goes wrong does so when half of its responses have been told."""

    def __init__(self, number: int = 0, plan: Plan = lambda call: None) -> None:
        super().__init__(number, plan)
        self.running = self.most_running = 0
        self.told: list[int] = []
        """First tokens of prompts whose responses were told."""

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        prompts = asked.prompts
        trouble = self.plan(len(self.calls))
        late_s = trouble if isinstance(trouble, float) else 0.0
        self.calls.append([prompt[0] for prompt in prompts])
        drawn = [self._draw(*one, asked.sampling) for one in zip(prompts, asked.seeds, strict=True)]
        begun = asyncio.get_running_loop().time()
        self.running += len(prompts)
        self.most_running = max(self.most_running, self.running)
        left = len(prompts)
        try:
            for i in sorted(range(len(prompts)), key=lambda i: prompts[i][1]):
                if isinstance(trouble, Exception) and 2 * left <= len(prompts):
                    raise trouble
                now = asyncio.get_running_loop().time()
                await asyncio.sleep(max(0.001, begun + prompts[i][1] + late_s - now))
                left -= 1
                self.running -= 1
                self.told.append(prompts[i][0])
                if on_response is not None:
                    on_response(i, drawn[i])
        finally:
            self.running -= left
        return drawn

    def _draw(self, prompt: Sequence[int], seed: int, sampling: SamplingParams) -> Generation:
        return Generation(
            tokens=torch.full((sampling.max_new_tokens,), prompt[0] + seed),
            logprobs=torch.full((sampling.max_new_tokens,), -float(sampling.temperature)),
            finish_reason="length",
            token_versions=torch.full((sampling.max_new_tokens,), self.weight_version, dtype=torch.int32),
        )


Prompt = tuple[int, float]
"""Who it is, and the seconds that its response takes: see ``Teller``."""


def make_rollout(
    engines: Sequence[Any], *, max_sequences: int | None = None, max_tokens_per_request: int = 1000, **limits: Any
) -> Router:
    """Replicas of a rollout group with weights 0, which work on ``max_sequences`` at a time."""
    router = Router(
        "rollout",
        [
            Replica(name=f"rollout.{i}", engine=engine, limits=EngineLimits(max_sequences=max_sequences))
            for i, engine in enumerate(engines)
        ],
        RoutingConfig(max_tokens_per_request=max_tokens_per_request, max_inflight_tokens=10_000, request_timeout_s=30),
        kind="rollout",
        limits=RouterLimits(**{"breaker_reset_s": 1.0, **limits}),
    )
    router.weight_version = 0
    return router


async def generate(
    router: Router,
    prompts: Sequence[Prompt],
    sampling: SamplingParams = SAMPLING,
    on_response: ResponseCallback | None = None,
) -> list[Generation]:
    """One caller; its answers are its own."""
    seeds = [7 * who for who, _ in prompts]
    drawn = await router.generate(ToDraw(prompts, sampling, seeds), on_response=on_response)  # type: ignore[arg-type]
    assert [int(given.tokens[0]) for given in drawn] == [8 * who for who, _ in prompts]
    assert all(float(given.logprobs[0]) == -sampling.temperature for given in drawn)
    return drawn


def callers(router: Router, *calls: Sequence[Prompt]) -> list[asyncio.Task[list[Generation]]]:
    """One for each list of prompts, all at one moment."""
    return [asyncio.create_task(generate(router, prompts)) for prompts in calls]


async def settle(router: Router, engines: Sequence[Any]) -> None:
    """Nothing is left behind: no room, nobody who waits, no work."""
    await router.close()
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not router._pool._waiters and not router._requests
    assert all(engine.tokens_now == 0 and getattr(engine, "running", 0) == 0 for engine in engines)
