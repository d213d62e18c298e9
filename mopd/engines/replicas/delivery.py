"""Samples on their way to a replica and back. Each result goes to its caller as soon as it has arrived and been
checked.

::

    callers' parts ──Pool: room──> Request ──ask──> replica ──told, one by one──> part ──all there──> its caller
                                      │
                                      └── failure: samples without a result go back to their callers, who ask again

What is asked of one ``kind`` may travel in one request, of whatever calls.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from mopd.config.groups import RoutingConfig
from mopd.engines.checks import check_generations, check_scores
from mopd.engines.concurrency import cancel
from mopd.engines.interface import (
    CorruptAnswer,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    EngineUnreachable,
    Generation,
    StaleWeights,
    ToDraw,
    ToScore,
    joined,
)
from mopd.engines.replicas.members import Member, Room, WorkRequest
from mopd.engines.replicas.pool import Pool

R = TypeVar("R")
MIN_RETRY_AFTER_S = 0.01
"""Shortest pause, in seconds, for a replica with a full queue, whatever it says."""


@dataclass(kw_only=True, eq=False)
class Call(Generic[R]):
    """One caller's request for results."""

    asked: ToScore | ToDraw
    vocab_size: int | None
    """Answers with an id of this size or larger are corrupt; ``None``: unknown."""
    on_response: Callable[[int, R], None] | None = None
    """Called with the position of a sequence and its result as soon as that is there."""
    answers: dict[int, R] = field(default_factory=dict)
    """Results by position."""

    def room(self, place: int) -> Room:
        """Return the room of a sequence. A response's length is unknown before it ends: only its load counts with the
        most, and the engine makes room for it as it grows."""
        length = len(self.asked.sequences[place])
        if isinstance(self.asked, ToScore):
            return Room(length, 0, length)
        return Room(length, 1, length + self.asked.sampling.max_new_tokens)


@dataclass(kw_only=True, eq=False)
class Part(WorkRequest, Generic[R]):
    """Some samples of one call that travel together, and their state."""

    call: Call[R]
    missing: dict[int, Room]
    """Positions without a result yet, in order, and the room of each."""
    request: Request[R] | None = None
    """The request that carries it now."""
    came_back: asyncio.Future[Exception | None] = field(init=False)
    """Outcome of ``request``: ``None`` when nothing is missing, otherwise the error."""
    was_joined: bool = False
    """Whether its last request carried other callers' samples too."""
    last_error: Exception | None = None
    """Error of its last request."""
    turned_away_since: float | None = None
    """Time of its first full queue since its last real attempt."""
    num_failures: int = 0
    """Attempts in ``failed_on`` that reached a replica."""
    unreachable_since: float | None = None
    """Time of the first attempt that found no server, since the last one that reached a replica."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Context variables of the caller."""

    def waits_for(self, request: Request[R]) -> bool:
        """Return whether its caller still waits for something of this request. A cancelled caller counts as gone at
        once, before it runs again."""
        return self.request is request and not self.came_back.done()

    def is_stale(self, error: Exception) -> bool:
        """Return whether the replica lacks weights that will be sent to it. Other weights than fixed ones are a
        failure."""
        return isinstance(error, StaleWeights) and self.version is not None

    def note(self, error: Exception, member: str, now: float) -> None:
        """Record that its request on ``member`` failed. After an error that may be its own fault it travels alone."""
        self.last_error = error
        if isinstance(error, EngineBusy):
            if self.turned_away_since is None:
                self.turned_away_since = now
        elif not self.is_stale(error):
            self.key = None
            # a joint request's refusal may be another part's fault: it counts once this part was asked for alone
            if isinstance(error, EngineUnavailable) or not self.was_joined:
                self.failed_on.append(member)
                self.turned_away_since = None
                if not isinstance(error, EngineUnreachable):
                    self.num_failures, self.unreachable_since = self.num_failures + 1, None
                elif self.unreachable_since is None:
                    self.unreachable_since = now

    def is_given_up(self, now: float, *, max_attempts: int, patience_s: float) -> bool:
        """Return whether enough attempts have failed; if the last ones found no server, also for long enough."""
        if self.unreachable_since is None:
            return self.num_failures >= max_attempts
        return len(self.failed_on) >= max_attempts and now - self.unreachable_since >= patience_s


class Request(Generic[R]):
    """One request to one replica. Its task starts when it is made."""

    def __init__(self, member: Member, parts: Sequence[Part[R]], pool: Pool[Part[R]], routing: RoutingConfig) -> None:
        self._member, self._parts, self._pool, self._routing = member, parts, pool, routing
        self._places = [(part, position) for part in parts for position in part.missing]
        requests: list[Any] = [part.call.asked.at([*part.missing]) for part in parts]
        self._asked = joined(requests)
        self._vocab_size = parts[0].call.vocab_size
        self._is_there = [False] * len(self._places)
        self._is_over = self._has_ended = False
        loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[EngineUnavailable] = loop.create_future()
        self._started = pool.now()
        for part in parts:
            part.request, part.came_back, part.was_joined = self, loop.create_future(), len(parts) > 1
        self.task = parts[0].context.run(loop.create_task, self._run())

    @property
    def is_awaited(self) -> bool:
        """Whether a caller still waits for something of it."""
        return bool(self._waiting())

    def lose(self, member: Member, reason: str) -> None:
        """End it as unavailable if ``member`` is its replica."""
        if self._member is member and not self._broken.done():
            self._broken.set_result(EngineUnavailable(f"{member.name} {reason}"))

    async def leave(self) -> None:
        """End the request when its last caller has gone; return when it has ended."""
        if not self.is_awaited:
            await cancel([self.task])
            self._abandon()  # a task cancelled before its first step never runs its `finally`

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
        """Release the rest of the replica's room, once."""
        if not self._has_ended:
            self._has_ended = True
            for part in self._parts:
                if part.missing:
                    self._pool.ended(self._member, part)

    def _waiting(self) -> list[Part[R]]:
        return [part for part in self._parts if part.waits_for(self)]

    async def _ask(self) -> Sequence[R]:
        name, timeout_s = self._member.name, self._routing.request_timeout_s
        on_response = self._take if self._member.tells else None
        engine: Any = self._member.engine
        if isinstance(self._asked, ToScore):  # scorers answer for all at once
            call = asyncio.ensure_future(engine.score(self._asked))
        else:
            call = asyncio.ensure_future(engine.generate(self._asked, on_response=on_response))
        try:
            ends: set[asyncio.Future[Any]] = {call, self._broken}
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                raise self._broken.result()
            if not call.done():
                raise EngineUnavailable(f"{name}: no answer within {timeout_s:g} s (routing.request_timeout_s)")
            results: Sequence[R] = call.result()
        finally:
            # answers that are told from here on are dropped
            self._is_over = True
            await cancel([call])
        if len(results) != len(self._places):
            raise EngineUnavailable(f"{name}: {len(results)} answers for {len(self._places)} samples")
        return results

    def _take(self, index: int, result: R) -> None:
        """Take one answer before the others (``Generator.generate``); a corrupt one ends the request."""
        # an answer after the deadline or after a corrupt one is dropped: its room may be released already
        if self._is_over or self._broken.done():
            return
        try:
            if not 0 <= index < len(self._places) or self._is_there[index]:
                raise ValueError(f"answer {index} of {len(self._places)} was told, or was told before")
            self._check(self._asked.at([index]), [result])
        except ValueError as error:
            self._broken.set_result(CorruptAnswer(f"{self._member.name}: corrupt answer: {error}"))
            return
        self._use({index: result})

    def _take_all(self, results: Sequence[R]) -> None:
        """Take the answers that did not come one by one. ``CorruptAnswer`` if they cannot be right."""
        rest = {i: result for i, result in enumerate(results) if not self._is_there[i]}
        try:
            self._check(self._asked.at([*rest]), list(rest.values()))
        except ValueError as error:
            raise CorruptAnswer(f"{self._member.name}: corrupt answer: {error}") from error
        self._use(rest)

    def _check(self, asked: Any, results: Sequence[Any]) -> None:
        """Raise ``ValueError`` for results that cannot be right."""
        check = check_scores if isinstance(asked, ToScore) else check_generations
        check(results, asked, vocab_size=self._vocab_size)

    def _num_tokens(self, index: int, result: Any) -> int:
        """Return the tokens of a sequence, with a drawn response."""
        drawn = len(result.tokens) if isinstance(result, Generation) else 0
        return len(self._asked.sequences[index]) + drawn

    def _use(self, results: dict[int, R]) -> None:
        """Count checked answers that came together, and deliver them."""
        self._member.answered()
        awaited = [i for i in results if self._places[i][0].waits_for(self)]
        if awaited and self._parts[0].is_counted:
            self._member.counters.answered(
                num_samples=len(awaited),
                num_tokens=sum(self._num_tokens(i, results[i]) for i in awaited),
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
        if part.call.on_response is not None:
            part.call.on_response(position, result)

    def _judge(self, error: EngineError) -> None:
        """Update the replica's breaker, pause and counters after a failure."""
        member, now = self._member, self._pool.now()
        is_stale = self._parts[0].is_stale(error)
        if isinstance(error, EngineUnavailable) and not is_stale:
            member.failed(now, error)
        else:
            member.answered()
        if isinstance(error, EngineBusy):
            member.counters.numbers.busy_answers += 1
            pause_s = min(error.retry_after_s, self._routing.request_timeout_s / 2)  # or waiting parts are given up
            member.busy_until = now + max(pause_s, MIN_RETRY_AFTER_S)
        elif is_stale:
            member.counters.numbers.stale_answers += 1
            member.refused_version = min(part.version for part in self._parts if part.version is not None)
