"""Groups that take turns on a pool of GPUs: the one that works is awake; the least recently used sleep first.

::

    kept_awake(math) ── awake? ──yes──────────────────────────────> work ──> idle, still awake
                     └─no─> wait until idle groups can make room ─> they sleep, least recently used first ─> math wakes

A group that works stays awake until it is idle: a step's samples are few enough to be seen through, and changing
back and forth between requests would move the models' weights each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

ROUNDING = 1e-6


@dataclass(slots=True)
class _Sharer:
    share: float
    sleep: Callable[[], Awaitable[None]]
    wake: Callable[[], Awaitable[None]]
    is_awake: bool = False
    num_working: int = 0
    last_used: int = -1


class SharedPool:
    """Memory 1.0 that groups take shares of while they are awake."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._sharers: dict[str, _Sharer] = {}
        self._changed = asyncio.Condition()
        self._num_uses = 0

    def add(
        self, key: str, *, share: float, sleep: Callable[[], Awaitable[None]], wake: Callable[[], Awaitable[None]]
    ) -> None:
        """One more group. ``share`` is the part of each GPU's memory that it takes awake, in (0, 1].

        ``wake`` is called for a group that is not awake and has work (for its first work too, with nothing to wake
        yet), ``sleep`` when another group needs the room.
        """
        self._sharers[key] = _Sharer(share=share, sleep=sleep, wake=wake)

    @property
    def awake(self) -> list[str]:
        """Groups that hold memory now, the least recently used first."""
        return sorted((k for k, s in self._sharers.items() if s.is_awake), key=lambda k: self._sharers[k].last_used)

    @asynccontextmanager
    async def kept_awake(self, key: str) -> AsyncIterator[None]:
        """The group is awake within; several such blocks of one group may overlap.

        Has no deadline of its own: blocks end with requests, which have theirs.
        """
        sharer = self._sharers[key]
        async with self._changed:
            await self._changed.wait_for(lambda: sharer.is_awake or self._can_make_room(key))
            if not sharer.is_awake:
                await self._make_room(key)
                await sharer.wake()
                sharer.is_awake = True
            sharer.num_working += 1
            self._touch(sharer)
        try:
            yield
        finally:
            await asyncio.shield(self._leave(sharer))

    async def _leave(self, sharer: _Sharer) -> None:
        async with self._changed:
            sharer.num_working -= 1
            self._touch(sharer)
            self._changed.notify_all()

    def _touch(self, sharer: _Sharer) -> None:
        self._num_uses += 1
        sharer.last_used = self._num_uses

    def _can_make_room(self, key: str) -> bool:
        working = sum(s.share for k, s in self._sharers.items() if k != key and s.is_awake and s.num_working)
        return working + self._sharers[key].share <= 1 + ROUNDING

    async def _make_room(self, key: str) -> None:
        for other in self.awake:
            taken = sum(self._sharers[k].share for k in self.awake)
            if taken + self._sharers[key].share <= 1 + ROUNDING:
                return
            if self._sharers[other].num_working == 0:
                logger.info("pool %s: %s sleeps, %s wakes", self.name, other, key)
                await self._sharers[other].sleep()
                self._sharers[other].is_awake = False
