"""The simulated clock, and how evenly the router shares work on it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mopd.config.groups import RoutingConfig
from mopd.engines.interface import Scores
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from tests.fixtures.token_clock import run_on_token_clock

TOKENS_PER_S = 10_000.0
MOST = 1.15
"""Largest allowed time until the last replica is done, relative to the ideal."""


class TokenClockEngine:
    """Scores one request after the other, in a time by its tokens."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self.done_at = 0.0

    async def score(
        self, tokens: Sequence[Tensor], prompt_lengths: Sequence[int], *, top_k: int, **_: Any
    ) -> list[Scores]:
        async with self._turn:
            await asyncio.sleep(sum(map(len, tokens)) / TOKENS_PER_S)
        self.done_at = asyncio.get_running_loop().time()
        return [
            Scores(
                ids=torch.arange(top_k, dtype=torch.int32).expand(len(sequence) - start, top_k),
                logprobs=torch.full((len(sequence) - start, top_k), -20.0),
                token_logprobs=torch.full((len(sequence) - start,), -20.0),
            )
            for sequence, start in zip(tokens, prompt_lengths, strict=True)
        ]


def ideal_s(lengths: Sequence[int], num_replicas: int) -> float:
    """No schedule is shorter."""
    return max(sum(lengths) / num_replicas, max(lengths)) / TOKENS_PER_S


def routed_s(lengths: Sequence[int], num_replicas: int) -> float:
    """Time until the last replica is done, with the router itself."""

    async def work() -> float:
        engines = [TokenClockEngine() for _ in range(num_replicas)]
        replicas = [Replica(name=str(i), engine=engine) for i, engine in enumerate(engines)]
        router = Router("simulated", replicas, RoutingConfig(), kind="teacher")
        tokens = [torch.zeros(length, dtype=torch.int32) for length in lengths]
        await router.score(tokens, [1] * len(tokens), top_k=1, temperature=1.0)
        return max(engine.done_at for engine in engines)

    return run_on_token_clock(work())


def test_skewed_lengths_end_within_the_goal_where_counting_does_not() -> None:
    """Log-normal lengths: the longest 5 % of the samples hold a third of the tokens. The figures of docs/server.md."""
    generator, routed, counted = np.random.default_rng(0), [], []
    for _ in range(25):
        lengths = np.clip(generator.lognormal(6.5, 1.2, 256), 2, 32_768).astype(int).tolist()
        dealt_s = max(sum(lengths[replica::4]) for replica in range(4)) / TOKENS_PER_S  # in turn, as they come
        routed.append(routed_s(lengths, 4) / ideal_s(lengths, 4))
        counted.append(dealt_s / ideal_s(lengths, 4))
    assert 1 <= statistics.median(routed) <= max(routed) == pytest.approx(1.0004, abs=5e-5)
    assert max(routed) <= MOST < statistics.median(counted) and max(counted) == pytest.approx(1.52, abs=5e-3)


@pytest.mark.parametrize("num_replicas", [1, 3, 4, 8])
def test_no_bad_case_among_shapes_of_batches(num_replicas: int) -> None:
    batches = {
        "one giant": [20_000] + [100] * 400,
        "giants last": [100] * 400 + [5_000] * num_replicas,
        "equal": [1_000] * (5 * num_replicas),
        "two sizes": [9_000] * 3 + [1_000] * 60,
    }
    for name, lengths in batches.items():
        relative = routed_s(lengths, num_replicas) / ideal_s(lengths, num_replicas)
        assert 0.999 <= relative <= MOST, name
