"""Turns on GPUs that student and rollout share: a pool of two, each of which takes all of it.

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
import math
from collections.abc import Sequence
from typing import Protocol

from mopd.engines.concurrency import cancel
from mopd.placement.sharing.pool import SharedPool, Sharer


class MemoryHolder(Protocol):
    """One side. Neither method is called while the other one runs, nor twice in a row."""

    async def give_back(self) -> None:
        """Returns when the memory is free for the other side."""
        ...

    async def take(self) -> None:
        """Returns when work can begin; the other side has given back."""
        ...


class GpuTurns(SharedPool):
    """The two sides of a run. The student has the memory first."""

    def __init__(self, student: MemoryHolder, rollout: MemoryHolder) -> None:
        super().__init__(turn_s=math.inf)
        self.add("student", share=1.0, sleep=student.give_back, wake=student.take)
        self.add("rollout", share=1.0, sleep=rollout.give_back, wake=rollout.take)
        self._sharers["student"].is_awake = True
        self._failure: Exception | None = None
        self._seconds = dict.fromkeys(self._sharers, 0.0)
        """Seconds of changes to a side since ``take_numbers``."""

    async def begin(self, key: str) -> None:
        """Begin a ``kept_awake`` block. Raises what a change raised, this one or one before."""
        if self._failure is not None:
            raise self._failure
        await super().begin(key)

    def _go_on(self) -> None:
        if self._failure is None:
            super()._go_on()

    def take_numbers(self) -> dict[str, float]:
        """Seconds that the memory changed hands since the last call."""
        found = {f"timing/to_{side}_s": seconds for side, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self._sharers, 0.0)
        return found

    async def close(self) -> None:
        """Give no more turns; a change that is under way is given up."""
        if self._change is not None:
            await cancel([self._change])

    async def _make_room_and_wake(self, sharer: Sharer, tired: list[Sharer]) -> None:
        started = asyncio.get_running_loop().time()
        try:
            await super()._make_room_and_wake(sharer, tired)
        finally:
            self._seconds[sharer.key] += asyncio.get_running_loop().time() - started

    def _fail(self, sharer: Sharer, tired: Sequence[Sharer], error: Exception) -> None:
        """Leave the memory without an owner: nobody knows what the change has left."""
        self._failure = error
        for side in self._sharers.values():
            self._refuse(side, error)
