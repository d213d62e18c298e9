"""Commands to the trainer ranks: one at a time, executed by all of them, one answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

from mopd.launch.link import RankLink

Answer = tuple[Any, list[bytes]]
"""A value, and frames beside it."""


class Ranks:
    """Sends commands over the link and awaits the answers; belongs to one event loop. Also implements ``MemoryHolder``
    for GPUs that the student shares with the rollout.

    A command has no deadline here, as what it waits for has its own, on the ranks: rank 0's error ends the run, and its
    end closes the link.
    """

    def __init__(self, link: RankLink) -> None:
        self._link = link
        self.turn = asyncio.Lock()
        """Held around commands that belong together."""
        self._order = asyncio.Lock()
        self._answer: asyncio.Future[Answer] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way: set[asyncio.Task[Answer]] = set()
        self.num_calls = 0

    async def run(self) -> None:
        """Take answers from a thread of their own until rank 0 is gone.

        Raises:
            LinkEnded: rank 0 has ended.
        """
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), name="rank 0", daemon=True).start()
        await self._ended

    async def ask(self, name: str, **kwargs: Any) -> Any:
        """Have every rank execute a command (``mopd.launch.ranks.Rank``); rank 0's value."""
        return (await self.ask_for_frames(name, **kwargs))[0]

    async def ask_for_frames(self, name: str, **kwargs: Any) -> Answer:
        """Have every rank execute a command; return rank 0's value, and the frames beside it.

        Commands are executed to their end, one after another, also where a caller has gone away.
        """
        task = asyncio.ensure_future(self._ask(name, kwargs))
        self._under_way.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def give_back(self) -> None:
        """Lend the student's memory (``StudentWorker.lend``)."""
        async with self.turn:
            await self.ask("lend")

    async def take(self) -> None:
        """Have the student take its memory again (``StudentWorker.restore``)."""
        async with self.turn:
            await self.ask("restore")

    async def settle(self) -> None:
        """Return when the ranks have executed all commands that they were sent."""
        while self._under_way:
            await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _ask(self, name: str, kwargs: dict[str, Any]) -> Answer:
        async with self._order:
            if self._ended.done():
                self._ended.result()
            self.num_calls += 1
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self._answer = answer
            await asyncio.to_thread(self._link.send, {"call": name, "kwargs": kwargs})
            return await answer  # which may be there by now

    def _forget(self, task: asyncio.Task[Answer]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it where the caller has gone away

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read answers, in the thread of their own."""
        frames: list[bytes] = []
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it every wait
            try:
                while True:
                    head, own = self._link.receive()
                    frames += own
                    if "more" not in head:
                        loop.call_soon_threadsafe(self._settle, head["value"], frames)
                        frames = []
            except BaseException as error:
                loop.call_soon_threadsafe(self._end, error)

    def _settle(self, value: Any, frames: list[bytes]) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None, "an answer without a command"
        if not answer.done():
            answer.set_result((value, frames))

    def _end(self, error: BaseException) -> None:
        for waiting in (self._answer, self._ended):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # retrieved, so that asyncio does not log it
