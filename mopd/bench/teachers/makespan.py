"""How long replicas need for samples of very different lengths: the router's sharing beside sharing by count.

It runs on a simulated clock for asyncio, with engines whose work takes time by tokens: the router's own code and
no waiting. The loop's time stands still while anything can run and jumps to the next timer when nothing can, so a run
is exact and repeatable.
"""

from __future__ import annotations

import asyncio
import selectors
import statistics
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mopd.config.groups import RoutingConfig
from mopd.engines.interface import Images, Scores
from mopd.replicas.interface import Replica
from mopd.replicas.router import Router

T = TypeVar("T")

NUM_REPLICAS = 4
NUM_SAMPLES = 256
NUM_BATCHES = 25
TOKENS_PER_S = 10_000.0
MAX_LENGTH = 32_768
GOAL = 1.15
"""Largest allowed makespan, relative to the ideal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Makespan:
    """Time until the last replica is done, relative to the ideal, over several batches.

    The ideal of a batch is an equal share of its tokens for every replica, or its longest sample if that is more.
    """

    token_aware_median: float
    token_aware_worst: float
    count_based_median: float
    """Samples dealt out in turn, in the order in which they came."""
    count_based_worst: float
    num_replicas: int = NUM_REPLICAS
    num_samples: int = NUM_SAMPLES
    num_batches: int = NUM_BATCHES
    goal: float = GOAL

    @property
    def is_met(self) -> bool:
        return self.token_aware_worst <= self.goal


def measure_makespan(seed: int = 0) -> Makespan:
    """Log-normal lengths (sigma 1.2: the longest 5 % of the samples hold a third of the tokens)."""
    generator = np.random.default_rng(seed)
    aware, counted = [], []
    for _ in range(NUM_BATCHES):
        lengths = np.clip(generator.lognormal(6.5, 1.2, NUM_SAMPLES), 2, MAX_LENGTH).astype(int).tolist()
        aware.append(token_aware_s(lengths, NUM_REPLICAS) / ideal_s(lengths, NUM_REPLICAS))
        counted.append(count_based_s(lengths, NUM_REPLICAS) / ideal_s(lengths, NUM_REPLICAS))
    return Makespan(
        token_aware_median=statistics.median(aware),
        token_aware_worst=max(aware),
        count_based_median=statistics.median(counted),
        count_based_worst=max(counted),
    )


def ideal_s(lengths: Sequence[int], num_replicas: int) -> float:
    """No schedule is shorter."""
    return max(sum(lengths) / num_replicas, max(lengths)) / TOKENS_PER_S


def count_based_s(lengths: Sequence[int], num_replicas: int) -> float:
    """Sample i goes to replica i modulo the number of replicas."""
    return max(sum(lengths[replica::num_replicas]) for replica in range(num_replicas)) / TOKENS_PER_S


def token_aware_s(lengths: Sequence[int], num_replicas: int) -> float:
    """The router itself, on simulated replicas that do one request after the other."""

    async def work() -> float:
        engines = [TokenClockEngine(TOKENS_PER_S) for _ in range(num_replicas)]
        replicas = [Replica(name=str(i), engine=engine) for i, engine in enumerate(engines)]
        router = Router("simulated", replicas, RoutingConfig(), kind="teacher")
        tokens = [torch.zeros(length, dtype=torch.int32) for length in lengths]
        await router.score(tokens, [1] * len(tokens), top_k=1, temperature=1.0)
        return max(engine.done_at for engine in engines)

    return run_on_token_clock(work())


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for ``timeout`` it moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits for something that never happens")
        if not ready and timeout is not None:
            self.now += max(timeout, 0.0)
        return ready


class TokenClockLoop(asyncio.SelectorEventLoop):
    """Event loop in simulated seconds, from 0. No sockets, threads or child processes: they live in real time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Simulated seconds."""
        return self._jumping.now


def run_on_token_clock(work: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, in simulated time."""
    with asyncio.Runner(loop_factory=TokenClockLoop) as runner:
        return runner.run(work)


class TokenClockEngine:
    """Scores one request after the other at ``tokens_per_s``; the scores are the same everywhere."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._turn = asyncio.Lock()
        self.done_at = 0.0
        """When its last request ended."""

    async def score(
        self,
        tokens: Sequence[Tensor],
        prompt_lengths: Sequence[int],
        *,
        top_k: int,
        temperature: float,
        images: Images = None,
    ) -> list[Scores]:
        """See ``Scorer.score``."""
        async with self._turn:
            await asyncio.sleep(sum(map(len, tokens)) / self._tokens_per_s)
        self.done_at = asyncio.get_running_loop().time()
        return [
            Scores(
                ids=torch.arange(top_k, dtype=torch.int32).expand(len(sequence) - start, top_k),
                logprobs=torch.full((len(sequence) - start, top_k), -20.0),
                token_logprobs=torch.full((len(sequence) - start,), -20.0),
            )
            for sequence, start in zip(tokens, prompt_lengths, strict=True)
        ]
