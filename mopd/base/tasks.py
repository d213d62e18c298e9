"""Concurrent tasks whose first error ends them all, and waits that a request to stop ends."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_END_S = 10.0
"""Seconds for a thread to end that waits for nothing but messages."""


class Tasks:
    """A set of tasks that ends with the ``async with`` block: what still runs is cancelled and waited for.

    Example::

        async with Tasks() as tasks:
            tasks.start(produce())
            await tasks.unless_failed(consume())
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._failed: asyncio.Task[Any] | None = None
        self._failure = asyncio.Event()

    async def __aenter__(self) -> Tasks:
        return self

    async def __aexit__(self, *error: object) -> None:
        await _end(*self._running)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task. ``unless_failed`` raises its error."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._note)
        return task

    async def unless_failed(self, work: Awaitable[T]) -> T:
        """Await ``work``, or raise a task's error as soon as one has failed; ``work`` is then cancelled."""
        async with _until(work, self._failure) as task:
            if self._failed is not None:
                self._failed.result()
            return task.result()

    def _note(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None and self._failed is None:
            self._failed = task
            self._failure.set()


@asynccontextmanager
async def ended_on_error(end: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call ``end`` if the block fails. The block's error stays the one that is raised; an error of ``end`` is written
    to standard error, as what follows from it."""
    try:
        yield
    except BaseException:
        try:
            await end()
        except Exception:
            traceback.print_exc()
        raise


class StopRequested(Exception):
    """A request to end the run early; the message is the line for the user."""

    def __init__(self, by: str, line: str = "") -> None:
        super().__init__(line or f"stopped before a step was trained, as {by} asked")
        self.by = by


class Stop:
    """A request to stop, and waits that it ends. Belongs to one event loop; the interrupted work is cancelled."""

    def __init__(self, look: Callable[[], str | None] = lambda: None) -> None:
        """Start without a request. ``look`` returns who requests the end, or ``None``; the owner calls ``ask`` for
        requests that come inside waits."""
        self._look = look
        self._by: str | None = None
        self._asked = asyncio.Event()

    def ask(self, by: str) -> None:
        """Record a request of ``by``. Only the first one is reported."""
        if self._by is None:
            self._by = by
            self._asked.set()

    @property
    def is_asked(self) -> bool:
        """Whether the end was requested."""
        return self._by is not None

    def check(self) -> None:
        """Raise ``StopRequested`` if the end was requested so far."""
        by = self._by or self._look()
        if by is not None:
            self.ask(by)
            raise StopRequested(by)

    async def unless_stop_requested(self, work: Awaitable[T]) -> T:
        """Await ``work``, or raise ``StopRequested`` as soon as the end is requested. Work that is done by then
        counts."""
        async with _until(work, self._asked) as task:
            if not task.done():
                self.check()
            return task.result()


@asynccontextmanager
async def _until(work: Awaitable[T], event: asyncio.Event) -> AsyncIterator[asyncio.Future[T]]:
    """Wait until ``work`` is done or ``event`` is set, and cancel ``work`` at the end of the block."""
    task, other = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        yield task
    finally:
        await _end(task, other)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
