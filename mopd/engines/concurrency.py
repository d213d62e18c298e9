"""Many requests of one call at a time: bounded by tokens, and none left behind when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class TokenBudget:
    """Lets work through while its tokens together stay within ``max_tokens``, first come first served."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._used = 0
        self._turn = asyncio.Lock()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, num_tokens: int) -> AsyncIterator[None]:
        """Wait for room and keep it. This wait ends when earlier holders do: bound the work, not the wait.

        ``ValueError`` for more than ``max_tokens``, which would wait for ever.
        """
        if num_tokens > self.max_tokens:
            raise ValueError(f"{num_tokens} tokens exceed the budget of {self.max_tokens}")
        async with self._turn, self._changed:  # in turn: small work does not overtake large work for ever
            await self._changed.wait_for(lambda: self._used + num_tokens <= self.max_tokens)
            self._used += num_tokens
        try:
            yield
        finally:
            self._used -= num_tokens
            async with self._changed:
                self._changed.notify_all()


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first failure, or a cancellation from outside, ends the others before it is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
