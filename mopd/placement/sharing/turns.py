"""Turns on GPUs that student and rollout share: the order of both memories, and nothing else of them.

::

    student's turn ── the rollout has work, the student none ──> student lends ──> rollout takes ──> rollout's turn
        ▲                                                                                                  │
        └── student restores <── rollout gives back <── the student has work, or a step is drawn; rollout idle ──┘

One side has the memory, or, in the middle of a change, none. A side that works is never interrupted: what it works on
has deadlines of its own. Work that comes to the side whose turn it is joins at once, also where the other side waits:
in synchronous training neither has work for ever. A change that fails leaves the memory's owner unknown: from then on
every waiter gets its error, which ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, Protocol

from mopd.engines.concurrency import CANCEL_GRACE_S, cancel

Side = Literal["student", "rollout"]


class MemoryHolder(Protocol):
    """One side. Neither method is called while the other one runs, nor twice in a row."""

    async def give_back(self) -> None:
        """Returns when the memory is free for the other side."""
        ...

    async def take(self) -> None:
        """Returns when work can begin; the other side has given back."""
        ...


class GpuTurns:
    """The two sides of a run. The student has the memory first. Used on one event loop."""

    def __init__(self, student: MemoryHolder, rollout: MemoryHolder) -> None:
        self._sides: dict[Side, MemoryHolder] = {"student": student, "rollout": rollout}
        self._holder: Side | None = "student"
        self._num_working = 0
        """Blocks of the holder."""
        self._waiting: dict[Side, list[asyncio.Future[None]]] = {"student": [], "rollout": []}
        self._expected: Side | None = None
        self._change: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._seconds: dict[Side, float] = {"student": 0.0, "rollout": 0.0}
        """Seconds of changes to a side since ``take_numbers``."""

    @asynccontextmanager
    async def held(self, side: Side) -> AsyncIterator[None]:
        """Hold the memory for a side; several such blocks of one side may overlap. Raises what a change raised."""
        await self.begin(side)
        try:
            yield
        finally:
            self.end()

    async def begin(self, side: Side) -> None:
        """The beginning of a ``held`` block; ``end`` is to follow, unless it raises."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[side].append(turn)
        self._go_on()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting[side] = [other for other in self._waiting[side] if other is not turn]
                self._go_on()  # who waits may be another one now
            elif turn.exception() is None:  # it came at the last moment
                self.end()
            raise

    def end(self) -> None:
        """The end of a block of the side whose turn it is."""
        self._num_working -= 1
        self._go_on()

    def expect(self, side: Side) -> None:
        """The side will have work soon: it gets the memory as soon as the other one is idle, and loses it again if the
        other one has work first."""
        self._expected = side
        self._go_on()

    def take_numbers(self) -> dict[str, float]:
        """Seconds that the memory changed hands since the last call."""
        found = {f"timing/to_{side}_s": seconds for side, seconds in self._seconds.items()}
        self._seconds = {"student": 0.0, "rollout": 0.0}
        return found

    async def close(self) -> None:
        """Give no more turns; a change that is under way is given up."""
        if self._change is not None:
            await cancel([self._change], grace_s=CANCEL_GRACE_S)

    def _go_on(self) -> None:
        """Let in the holder's work, or begin the change to the other side. Call after every state change."""
        if self._failure is not None:
            for side in self._waiting:
                self._let_in(side, self._failure)
            return
        if self._change is not None or self._holder is None:
            return
        self._let_in(self._holder)
        other: Side = "rollout" if self._holder == "student" else "student"
        if self._num_working == 0 and (self._waiting[other] or self._expected == other):
            self._change = asyncio.get_running_loop().create_task(self._hand_over(self._holder, other))

    def _let_in(self, side: Side, failure: Exception | None = None) -> None:
        turns, self._waiting[side] = self._waiting[side], []
        for turn in turns:
            if turn.done():
                continue
            if failure is not None:
                turn.set_exception(failure)
                continue
            self._expected = None
            self._num_working += 1
            turn.set_result(None)

    async def _hand_over(self, giver: Side, taker: Side) -> None:
        self._holder, self._expected = None, None
        started = self._now()
        try:
            await self._sides[giver].give_back()
            await self._sides[taker].take()
            self._holder = taker
        except Exception as error:  # is raised in all that wait, and in all that come
            self._failure = error
        finally:
            self._change = None
            self._seconds[taker] += self._now() - started
        self._go_on()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
