"""Engines that sleep as long as the work would take, and answer with tensors of the right shapes.

What differs between responses differs by their seeds alone: a stage alone and a whole run have the same lengths.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mopd.engines.concurrency import all_or_none
from mopd.engines.interface import Generation, Images, SamplingParams, Scores, Told

VOCAB_SIZE = 1024
LOGPROB = -20.0
"""Of every token: up to a million of them have less than the whole mass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Response lengths: log-normal around ``mean``, or all ``mean`` where ``sigma`` is 0."""

    mean: int
    sigma: float = 0.0

    def draw(self, seed: int, most: int) -> int:
        """Of the response with this seed, 1 to ``most``."""
        if not self.sigma:
            return min(self.mean, most)
        normal = np.random.default_rng(seed).standard_normal()
        length = self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)
        return int(min(max(round(length), 1), most))


class SleepingGenerator:
    """Draws ``max_sequences`` responses at a time, each in its own time, and tells of each as it ends (continuous
    batching). New weights stop it for ``swap_s``; running responses then go on under them."""

    def __init__(self, lengths: Lengths, *, max_sequences: int, s_per_token: float, swap_s: float) -> None:
        self._lengths, self._s_per_token, self._swap_s = lengths, s_per_token, swap_s
        self._turns = asyncio.Semaphore(max_sequences)
        self._free_at = [-math.inf] * max_sequences
        """A heap of when each place that is free was due to become so. The next response begins then, not when this
        process noticed: a server has its own processor. So in ``SleepingScorer``."""
        self._works = asyncio.Event()
        self._works.set()
        self._stopped_s = 0.0
        self._swapped_at = -math.inf
        self.weight_version = -1

    async def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], weight_version: int, *, kept: Set[str] = frozenset()
    ) -> None:
        """See ``TakesWeights``; there are none."""
        self._works.clear()
        await asyncio.sleep(self._swap_s)
        self._stopped_s += self._swap_s
        self.weight_version, self._swapped_at = weight_version, asyncio.get_running_loop().time()
        self._works.set()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        *,
        told: Told | None = None,
        images: Images = None,
    ) -> list[Generation]:
        """See ``Generator.generate``."""

        came_at = asyncio.get_running_loop().time()

        async def one(i: int, seed: int) -> Generation:
            async with self._turns:
                response = await self._respond(came_at, self._lengths.draw(seed, sampling.max_new_tokens))
            if told is not None:
                told(i, response)
            return response

        return await all_or_none(one(i, seed) for i, seed in enumerate(seeds))

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
        return Generation(
            tokens=torch.full((length,), VOCAB_SIZE - 1),
            logprobs=torch.full((length,), LOGPROB),
            token_versions=versions,
            finish_reason="stop",
        )

    def _drawn_before_swap(self, begun: float, length: int) -> int:
        if not self._s_per_token:
            return length
        return max(0, min(length, int((self._swapped_at - self._swap_s - begun) / self._s_per_token)))


class SleepingScorer:
    """Scores one request after the other, in a time that grows with its tokens (a prefill)."""

    def __init__(self, *, s_per_token: float) -> None:
        self._s_per_token = s_per_token
        self._turn = asyncio.Lock()
        self._free_at = 0.0

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
        loop = asyncio.get_running_loop()
        came_at = loop.time()
        async with self._turn:
            self._free_at = max(self._free_at, came_at) + self._s_per_token * sum(map(len, tokens))
            await asyncio.sleep(max(0.0, self._free_at - loop.time()))
        return [
            Scores(
                ids=torch.arange(top_k, dtype=torch.int32).expand(len(sequence) - start, top_k),
                logprobs=torch.full((len(sequence) - start, top_k), LOGPROB),
                token_logprobs=torch.full((len(sequence) - start,), LOGPROB),
            )
            for sequence, start in zip(tokens, prompt_lengths, strict=True)
        ]
