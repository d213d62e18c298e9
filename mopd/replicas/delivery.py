"""Samples on their way to a replica and back: each is its caller's as soon as its answer is there and has been checked.

::

    callers' parts ──Pool: room──> Request ──ask──> replica ──told, one by one──> part ──all there──> its caller
                                      │
                                      └── failure: what was not told goes back to its callers, who ask again
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from mopd.config.groups import RoutingConfig
from mopd.engines.concurrency import cancel
from mopd.engines.interface import (
    CorruptAnswer,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    EngineUnreachable,
    StaleWeights,
)
from mopd.replicas.members import Member, Room, Want
from mopd.replicas.pool import Pool
from mopd.replicas.work import Work

R = TypeVar("R")
MIN_RETRY_AFTER_S = 0.01
"""A replica with a full queue is left alone at least this long, whatever it says."""


@dataclass(kw_only=True, eq=False)
class Call(Generic[R]):
    """What one caller asks."""

    work: Work[Any, Any, R]
    items: Sequence[Any]
    told: Callable[[int, R], None] | None = None
    """Called with the position of an item and its result as soon as that is there."""
    answers: dict[int, R] = field(default_factory=dict)
    """By position."""


@dataclass(kw_only=True, eq=False)
class Part(Want, Generic[R]):
    """Some samples of one call that travel together, and what has happened to them so far."""

    call: Call[R]
    missing: dict[int, Room]
    """Positions that have no answer yet, in order."""
    request: Request[R] | None = None
    """On which it is under way."""
    came_back: asyncio.Future[Exception | None] = field(init=False)
    """Of ``request``: done when nothing is missing, or with the reason why something is."""
    was_joined: bool = False
    """Its last request had other callers' samples too."""
    last_error: Exception | None = None
    turned_away_since: float | None = None
    """When it first met a full queue since its last real attempt."""
    num_failures: int = 0
    """Attempts in ``failed_on`` that reached a replica."""
    unreachable_since: float | None = None
    """When it first found nobody since the last attempt that reached a replica."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """The caller's."""

    def waits_for(self, request: Request[R]) -> bool:
        """Its caller has not gone and misses something of this request. A caller that is cancelled has gone from that
        moment on, before it can say so."""
        return self.request is request and not self.came_back.done()

    def is_stale(self, error: Exception) -> bool:
        """The replica lacks weights that will be sent to it. Where weights are fixed, other ones are a failure."""
        return isinstance(error, StaleWeights) and self.version is not None

    def note(self, error: Exception, member: str, now: float) -> None:
        """Its request on ``member`` failed. Whatever may be its own fault is asked for alone from now on."""
        self.last_error = error
        if isinstance(error, EngineBusy):
            if self.turned_away_since is None:
                self.turned_away_since = now
        elif not self.is_stale(error):
            self.key = None
            if isinstance(error, EngineUnavailable) or not self.was_joined:
                self.failed_on.append(member)
                self.turned_away_since = None
                if not isinstance(error, EngineUnreachable):
                    self.num_failures, self.unreachable_since = self.num_failures + 1, None
                elif self.unreachable_since is None:
                    self.unreachable_since = now

    def is_given_up(self, now: float, *, max_attempts: int, patience_s: float) -> bool:
        """Enough attempts have failed, and where the last one found nobody, for long enough."""
        if self.unreachable_since is None:
            return self.num_failures >= max_attempts
        return len(self.failed_on) >= max_attempts and now - self.unreachable_since >= patience_s


class Request(Generic[R]):
    """One request to one replica, under way from its making on, in a task of its own."""

    def __init__(self, member: Member, parts: Sequence[Part[R]], pool: Pool[Part[R]], routing: RoutingConfig) -> None:
        self._member, self._parts, self._pool, self._routing = member, parts, pool, routing
        self._places = [(part, position) for part in parts for position in part.missing]
        self._work = parts[0].call.work
        self._items = [part.call.items[position] for part, position in self._places]
        self._is_there = [False] * len(self._places)
        self._is_over = self._has_ended = False
        loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[EngineUnavailable] = loop.create_future()
        self._started = pool.now()
        for part in parts:
            part.request, part.came_back, part.was_joined = self, loop.create_future(), len(parts) > 1
        self.task = loop.create_task(self._run(), context=parts[0].context)

    @property
    def is_awaited(self) -> bool:
        """A caller still misses something of it."""
        return bool(self._waiting())

    def lose(self, member: Member, reason: str) -> None:
        """Ends as unavailable if it is with ``member``."""
        if self._member is member and not self._broken.done():
            self._broken.set_result(EngineUnavailable(f"{member.name} {reason}"))

    async def leave(self) -> None:
        """A caller has gone; with the last one the request ends. Returns when it has."""
        if not self.is_awaited:
            await cancel([self.task])
            self._abandon()  # it may not even have begun

    async def _run(self) -> None:
        error: Exception | None = None
        try:
            self._take_all(await self._ask())
        except EngineError as given:
            self._judge(given)
            error = given
        except BaseException as given:  # cancelled, or a wrong call: proves nothing about the replica
            self._abandon()
            if not isinstance(given, Exception):
                for part in self._waiting():
                    part.came_back.cancel()
                raise
            error = given
        finally:
            self._give_back()
        for part in self._waiting():
            assert error is not None
            part.note(error, self._member.name, self._pool.now())
            part.came_back.set_result(error)

    def _abandon(self) -> None:
        if not self._has_ended:
            self._member.breaker.abandoned(self._pool.now())
            self._give_back()

    def _give_back(self) -> None:
        """The replica's room that is still taken, once."""
        if not self._has_ended:
            self._has_ended = True
            for part in self._parts:
                if part.missing:
                    self._pool.ended(self._member, part)

    def _waiting(self) -> list[Part[R]]:
        return [part for part in self._parts if part.waits_for(self)]

    async def _ask(self) -> Sequence[R]:
        name, timeout_s = self._member.name, self._routing.request_timeout_s
        told = self._told if self._member.tells else None
        call = asyncio.ensure_future(self._work.ask(self._member.engine, self._items, told))
        try:
            ends: set[asyncio.Future[Any]] = {call, self._broken}
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                raise self._broken.result()
            if not call.done():
                raise EngineUnavailable(f"{name}: no answer within {timeout_s:g} s (routing.request_timeout_s)")
            results = call.result()
        finally:
            self._is_over = True
            await cancel([call])
        if len(results) != len(self._items):
            raise EngineUnavailable(f"{name}: {len(results)} answers for {len(self._items)} samples")
        return results

    def _told(self, index: int, result: R) -> None:
        """One answer before the others; see ``Generator.generate``."""
        if self._is_over or self._broken.done():
            return
        try:
            if not 0 <= index < len(self._items) or self._is_there[index]:
                raise ValueError(f"answer {index} of {len(self._items)} was told, or was told before")
            self._work.check([self._items[index]], [result])
        except ValueError as error:
            self._broken.set_result(CorruptAnswer(f"{self._member.name}: corrupt answer: {error}"))
            return
        self._use({index: result})

    def _take_all(self, results: Sequence[R]) -> None:
        """Those that were not told."""
        rest = {i: result for i, result in enumerate(results) if not self._is_there[i]}
        try:
            self._work.check([self._items[i] for i in rest], list(rest.values()))
        except ValueError as error:
            raise CorruptAnswer(f"{self._member.name}: corrupt answer: {error}") from error
        self._use(rest)
        if self._parts[0].is_counted:
            self._member.counters.numbers.num_requests += 1

    def _use(self, results: dict[int, R]) -> None:
        """Answers that came together and are good."""
        self._member.answered()
        awaited = [i for i in results if self._places[i][0].waits_for(self)]
        if awaited and self._parts[0].is_counted:
            self._member.counters.answered(
                num_samples=len(awaited),
                num_tokens=sum(self._work.count(self._items[i], results[i]) for i in awaited),
                latency_s=self._pool.now() - self._started,
            )
        for i, result in results.items():
            self._deliver(i, result)

    def _deliver(self, index: int, result: R) -> None:
        part, position = self._places[index]
        self._is_there[index] = True
        room = part.missing.pop(position)
        part.room -= room
        if part.missing:
            self._pool.freed(self._member, part, room)
        else:
            self._pool.ended(self._member, part)
        if not part.waits_for(self):
            return
        part.call.answers[position] = result
        if not part.missing:
            part.came_back.set_result(None)
        if part.call.told is not None:
            part.call.told(position, result)

    def _judge(self, error: EngineError) -> None:
        """What a failure says of the replica."""
        member, now = self._member, self._pool.now()
        is_stale = self._parts[0].is_stale(error)
        if isinstance(error, EngineUnavailable) and not is_stale:
            member.failed(now, error)
        else:
            member.answered()
        if isinstance(error, EngineBusy):
            member.counters.numbers.busy_answers += 1
            pause_s = min(error.retry_after_s, self._routing.request_timeout_s / 2)  # or waiting requests give up
            member.busy_until = now + max(pause_s, MIN_RETRY_AFTER_S)
        elif is_stale:
            member.counters.numbers.stale_answers += 1
            member.refused_version = min(part.version for part in self._parts if part.version is not None)
