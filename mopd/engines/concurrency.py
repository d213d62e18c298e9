"""Many requests of one call at a time: bounded by tokens, and none left behind, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_GRACE_S = 5.0
"""How long a cancelled task may take to end; an engine call that does not let itself be cancelled is left to itself."""


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


async def cancel(tasks: Sequence[asyncio.Future[Any]], *, grace_s: float = CANCEL_GRACE_S) -> None:
    """Cancel those that are not done, wait so long for their end, and take note of errors that nobody will ask for."""
    for task in tasks:
        task.cancel()
    pending = [task for task in tasks if not task.done()]
    if pending:
        await asyncio.wait(pending, timeout=grace_s)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first error, or a cancellation from outside, ends the others before it is raised. They
    have their own deadlines."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    finally:
        await cancel(tasks)
