"""How long replicas need for samples of very different lengths: the router's sharing beside sharing by count."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mopd.bench.teachers.token_clock import TokenClockEngine, run_on_token_clock
from mopd.config.groups import RoutingConfig
from mopd.replicas.interface import Replica
from mopd.replicas.router import Router

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
