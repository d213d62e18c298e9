"""Groups that take turns on a pool of GPUs: the one that works is awake; the least recently used sleep first.

::

    kept_awake(math) ── awake, and its turn is not over ──────────────────────────> work ──> idle, still awake
                     └─ no ─> in line: who has waited longest is next, when groups that are idle can make room
                              └─> they sleep, least recently used first ─> math wakes, its turn begins

A group stays awake until it is idle, as changing back and forth moves the models' weights each time. In an endless
stream it never would be: after ``TURN_S`` it gets no new work while others wait in line, sees through what it has, and
sleeps. A group for which no other waits goes on for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

ROUNDING = 1e-6
TURN_S = 30.0
"""Shortest turn of a group that has work all the time. Sleeping and waking moves a model of tens of GB over PCIe, some
seconds: a tenth of such a turn; and all others wait for as long."""


@dataclass(slots=True)
class Sharer:
    """A group that shares the pool, and its state."""

    key: str
    share: float
    sleep: Callable[[], Awaitable[None]]
    wake: Callable[[], Awaitable[None]]
    is_awake: bool = False
    num_working: int = 0
    last_used: int = -1
    woke_at: float = 0.0
    waiting: dict[asyncio.Future[None], None] = field(default_factory=dict)
    waits_since: int = 0


class SharedPool:
    """Memory 1.0 that groups take shares of while they are awake. Used on one event loop."""

    def __init__(self, name: str = "", *, turn_s: float = TURN_S) -> None:
        """``name`` stands in the log of changes, which is kept where there is one."""
        self.name, self._turn_s = name, turn_s
        self._sharers: dict[str, Sharer] = {}
        self._expected: str | None = None
        self._change: asyncio.Task[None] | None = None
        self._num_events = 0

    def add(
        self, key: str, *, share: float, sleep: Callable[[], Awaitable[None]], wake: Callable[[], Awaitable[None]]
    ) -> None:
        """One more group. ``share`` is the part of each GPU's memory that it takes awake, in (0, 1].

        ``wake`` is called for a group that is not awake and has work (for its first work too, with nothing to wake
        yet), ``sleep`` when another group needs the room.
        """
        self._sharers[key] = Sharer(key=key, share=share, sleep=sleep, wake=wake)

    @asynccontextmanager
    async def kept_awake(self, key: str) -> AsyncIterator[None]:
        """The group is awake within; several such blocks of one group may overlap.

        Has no deadline of its own: blocks end with requests, which have theirs. An error of ``wake``, or of another
        group's ``sleep``, is raised to all that wait for it.
        """
        await self.begin(key)
        try:
            yield
        finally:
            self.end(key)

    async def begin(self, key: str) -> None:
        """Begin a ``kept_awake`` block; ``end`` is to follow, unless it raises."""
        sharer = self._sharers[key]
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not sharer.waiting:
            sharer.waits_since = self._next_event()
        sharer.waiting[turn] = None
        self._go_on()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                sharer.waiting.pop(turn, None)
                self._go_on()  # the line may be another one now
            elif turn.exception() is None:  # it came at the last moment
                self.end(key)
            raise

    def end(self, key: str) -> None:
        """End a block of a group that is awake."""
        sharer = self._sharers[key]
        sharer.num_working -= 1
        sharer.last_used = self._next_event()
        self._go_on()

    def expect(self, key: str) -> None:
        """The group will have work soon: it wakes as soon as the others are idle, and sleeps again if another one has
        work first."""
        self._expected = key
        self._go_on()

    def _go_on(self) -> None:
        """Let in all groups that may work, and wake the next in line when there can be room. Call after every
        change."""
        line = [
            sharer
            for sharer in self._sharers.values()
            if (sharer.waiting or sharer.key == self._expected) and not sharer.is_awake
        ]
        for sharer in self._sharers.values():
            if sharer.is_awake and (not line or asyncio.get_running_loop().time() - sharer.woke_at < self._turn_s):
                self._let_in(sharer)
        if line and self._change is None:
            first = min(line, key=lambda sharer: sharer.waits_since)
            working = sum(sharer.share for sharer in self._awake() if sharer.num_working)
            if working + first.share <= 1 + ROUNDING:
                # who sleeps is settled now: work that comes before the task's first step would find them awake
                change = self._make_room_and_wake(first, self._tire(first))
                self._change, self._expected = asyncio.get_running_loop().create_task(change), None

    def _let_in(self, sharer: Sharer) -> None:
        turns, sharer.waiting = sharer.waiting, {}
        for turn in turns:
            if not turn.done():
                self._expected = None
                sharer.num_working += 1
                sharer.last_used = self._next_event()
                turn.set_result(None)

    def _tire(self, sharer: Sharer) -> list[Sharer]:
        """Choose idle groups that leave room for ``sharer``, the least recently used first. They get no more work."""
        taken, tired = sum(other.share for other in self._awake()), []
        for other in self._awake():
            if other.num_working == 0 and taken + sharer.share > 1 + ROUNDING:
                taken -= other.share
                other.is_awake = False
                tired.append(other)
        return tired

    async def _make_room_and_wake(self, sharer: Sharer, tired: list[Sharer]) -> None:
        try:
            while tired:
                if self.name:
                    logger.info("pool %s: %s sleeps, %s wakes", self.name, tired[0].key, sharer.key)
                await tired[0].sleep()
                tired.pop(0)
            await sharer.wake()
            sharer.is_awake, sharer.woke_at = True, asyncio.get_running_loop().time()
            self._let_in(sharer)
        except Exception as error:
            self._fail(sharer, tired, error)
        finally:
            self._change = None
        self._go_on()

    def _fail(self, sharer: Sharer, tired: Sequence[Sharer], error: Exception) -> None:
        """Undo a change to ``sharer`` that failed before the ``tired`` slept."""
        for other in tired:
            other.is_awake = True
        self._refuse(sharer, error)

    def _refuse(self, sharer: Sharer, error: Exception) -> None:
        turns, sharer.waiting = sharer.waiting, {}
        for turn in turns:
            if not turn.done():
                turn.set_exception(error)

    def _awake(self) -> list[Sharer]:
        """Return the groups that hold memory now, the least recently used first."""
        return sorted((s for s in self._sharers.values() if s.is_awake), key=lambda s: s.last_used)

    def _next_event(self) -> int:
        self._num_events += 1
        return self._num_events
