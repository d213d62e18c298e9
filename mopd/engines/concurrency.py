"""Concurrent requests of one call: bounded by their tokens, and all of them ended when the call ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_GRACE_S = 5.0
"""Seconds that a cancelled task may take to end. An engine call that ignores its cancellation is abandoned."""


class TokenBudget:
    """A limit on the tokens of concurrent work, ``max_tokens``. Waiting work is admitted in order of arrival."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._used = 0
        self._turn = asyncio.Lock()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, num_tokens: int) -> AsyncIterator[None]:
        """Wait for room and hold it inside the context.

        The wait has no deadline of its own: it ends when earlier holders end, whose work must be bounded.
        ``ValueError`` for more than ``max_tokens``, which would wait for ever.
        """
        if num_tokens > self.max_tokens:
            raise ValueError(f"{num_tokens} tokens exceed the budget of {self.max_tokens}")
        async with self._turn, self._changed:  # in order of arrival: small work never overtakes large work for ever
            await self._changed.wait_for(lambda: self._used + num_tokens <= self.max_tokens)
            self._used += num_tokens
        try:
            yield
        finally:
            self._used -= num_tokens
            async with self._changed:
                self._changed.notify_all()


async def cancel(tasks: Sequence[asyncio.Future[Any]], *, grace_s: float = CANCEL_GRACE_S) -> None:
    """Cancel the tasks that are not done and wait up to ``grace_s`` for their end.

    Their errors are retrieved, so that asyncio does not log them as never retrieved.
    """
    for task in tasks:
        task.cancel()
    pending = [task for task in tasks if not task.done()]
    if pending:
        await asyncio.wait(pending, timeout=grace_s)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. The first error, or a cancellation from outside, ends the other coroutines before it
    is raised. The coroutines have deadlines of their own."""
    coroutines = [*work]
    if len(coroutines) == 1:  # as of most prompts: a task of its own would cost more than it does
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
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
