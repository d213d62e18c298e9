"""A simulated clock for asyncio, and engines whose work takes time by tokens: the router's own code, no waiting.

The loop's time stands still while anything can run and jumps to the next timer when nothing can, so a run is exact and
repeatable.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mopd.engines.interface import Scores

T = TypeVar("T")


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
    loop = TokenClockLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()


class TokenClockEngine:
    """Scores one request after the other at ``tokens_per_s``; the scores are the same everywhere."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._turn = asyncio.Lock()
        self.done_at = 0.0
        """When its last request ended."""

    async def score(
        self, tokens: Sequence[Tensor], prompt_lengths: Sequence[int], *, top_k: int, temperature: float
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
