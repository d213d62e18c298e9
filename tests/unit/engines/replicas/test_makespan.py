"""The simulated clock, and how evenly the router shares work on it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mopd.config.groups import RoutingConfig
from mopd.engines.interface import ToScore
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from tests.fixtures.token_clock import run_on_token_clock
from tests.unit.engines.replicas.stand_in import StandIn, make_router, run, samples, score

TOKENS_PER_S = 10_000.0
MOST = 1.15
"""Largest allowed time until the last replica is done, relative to the ideal."""


class OneByOne(StandIn):
    """Works on one request after the other."""

    def __init__(self) -> None:
        super().__init__(tokens_per_s=TOKENS_PER_S)
        self._turn = asyncio.Lock()
        self.done_at = 0.0

    async def _work(self, firsts: list[int], num_tokens: int) -> None:
        async with self._turn:
            await super()._work(firsts, num_tokens)
        self.done_at = asyncio.get_running_loop().time()


def ideal_s(lengths: Sequence[int], num_replicas: int) -> float:
    """No schedule is shorter."""
    return max(sum(lengths) / num_replicas, max(lengths)) / TOKENS_PER_S


def routed_s(lengths: Sequence[int], num_replicas: int) -> float:
    """Time until the last replica is done, with the router itself."""

    async def work() -> float:
        engines = [OneByOne() for _ in range(num_replicas)]
        replicas = [Replica(name=str(i), engine=engine) for i, engine in enumerate(engines)]
        router = Router("simulated", replicas, RoutingConfig(), kind="teacher")
        tokens = [torch.zeros(length, dtype=torch.int32) for length in lengths]
        await router.score(ToScore(tokens, [1] * len(tokens), top_k=1, temperature=1.0))
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


def test_the_replica_with_the_fewest_tokens_under_way_is_next() -> None:
    engines = [StandIn(i) for i in range(2)]
    router = make_router(engines, max_inflight_tokens=1000)
    tokens, starts = samples(60, 10, 10, 10)

    async def work() -> None:
        long = asyncio.create_task(score(router, tokens[:1], starts[:1]))
        await asyncio.sleep(0.01)
        for i in (1, 2, 3):
            await score(router, tokens[i : i + 1], starts[i : i + 1])
        await long

    run(work)
    assert [engine.calls for engine in engines] == [[[1000]], [[1001], [1002], [1003]]]
