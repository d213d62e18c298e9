"""The replicas of one group as one engine: each sample is done by some replica, or its caller gets the reason.

::

    samples ──cut──> parts ──Pool: room, least load, joined with other callers'──> replica ──> answers, in order
                        ▲                                                            │
                        └──────── another replica, after a pause <── failure ────────┘   a sample has one answer

A part is given up (``SampleFailed``) after ``max_attempts`` failed attempts, when a replica refuses it as such, or when
the group stands still. A full queue or stale weights are no failures of a part: it waits for another replica. A server
that takes no requests for a while is waited for, ``request_timeout_s`` long.

Every answer is checked here, wherever its engine runs. Works on one event loop, with that loop's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from mopd.base.types import UserError
from mopd.config.groups import RoutingConfig
from mopd.engines.concurrency import all_or_none, cancel
from mopd.engines.interface import (
    EngineBusy,
    EngineLimits,
    EngineRejected,
    EngineUnavailable,
    Generation,
    Generator,
    ResponseCallback,
    Scorer,
    Scores,
    ToDraw,
    ToScore,
)
from mopd.engines.replicas.delivery import Call, Part, Request
from mopd.engines.replicas.interface import LIMITS, NO_LIMITS, Kind, NoReplica, Replica, RouterLimits, SampleFailed
from mopd.engines.replicas.members import NO_ROOM, Member
from mopd.engines.replicas.pool import Pool
from mopd.engines.replicas.statistics import GroupNumbers

logger = logging.getLogger(__name__)

R = TypeVar("R")
MAX_BACKOFF_S = 30.0
"""Longest pause between attempts, in seconds."""
MAX_DOUBLINGS = 30
"""Doublings of the pause: more do not fit into a float, and any pause reaches ``MAX_BACKOFF_S`` long before."""


class Router:
    """One group's replicas behind the interface of a ``Generator`` and, but for failed samples, a ``Scorer``. Replicas
    may leave and return while requests are in progress."""

    def __init__(
        self,
        name: str,
        replicas: Sequence[Replica],
        routing: RoutingConfig,
        *,
        kind: Kind,
        limits: RouterLimits = LIMITS,
    ) -> None:
        """Start with ``replicas``, at least one. ``name`` is the teacher's or the rollout group's name."""
        self.name, self.kind = name, kind
        self.label = f"{kind} {name!r}"
        self._routing, self._limits = routing, limits
        self._pool = Pool[Part[Any]](routing, limits, replicas, self._send)
        self._requests: set[Request[Any]] = set()
        self._orders = itertools.count()
        self._retries = 0
        self._num_planned = len(replicas)
        self.weight_version = -1
        """Oldest version that may answer, of groups whose weights come from the student (``set_weight_version``)."""
        self.around_calls: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Entered around each call, whose deadlines are those of its attempts and of restarts."""
        self.vocab_size: int | None = None
        """Answers with an id of this size or larger are corrupt; ``None``: unknown."""

    async def score(self, asked: ToScore, *, stop_at_failure: bool = True) -> list[Scores | SampleFailed]:
        """Score the response part of each sequence. The first ``SampleFailed`` is raised; with ``stop_at_failure``
        false it is returned in the place of that sample's scores, and the others go on."""
        call = Call[Scores](asked=asked, vocab_size=self.vocab_size)
        return await self._run(call, stop_at_failure=stop_at_failure)

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        """Draw one response per prompt, with the weights of ``weight_version`` or newer ones. The first
        ``SampleFailed`` is raised."""
        call = Call[Generation](asked=asked, vocab_size=self.vocab_size, on_response=on_response)
        return cast("list[Generation]", await self._run(call, stop_at_failure=True))

    def set_weight_version(self, weight_version: int) -> None:
        """Require these weights, which the replicas have been given, and forget which replicas were stale before."""
        self.weight_version = weight_version
        for member in self._pool.members:
            member.refused_version = None
        self._pool.look_again()

    @property
    def request_timeout_s(self) -> float:
        """Seconds that a request may take (``routing.request_timeout_s``)."""
        return self._routing.request_timeout_s

    @property
    def needs_weights(self) -> tuple[str, ...]:
        """Names of replicas that do not serve ``weight_version``; they get no work until it has been pushed to them."""
        return self.lacking(self.weight_version)

    def lacking(self, version: int) -> tuple[str, ...]:
        """Return the names of replicas with weights older than ``version``, except those that are being restarted."""
        return tuple(m.name for m in self._pool.members if m.suspended is None and not m.serves(version))

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All replicas that are not gone, suspended ones included."""
        return tuple(Replica(name=m.name, engine=m.engine) for m in self._pool.members)

    def suspend(self, name: str, *, reason: str, timeout_s: float, is_dead: bool = False) -> None:
        """Give no work to a replica that is being restarted. Requests wait up to ``timeout_s`` seconds for its
        ``replace``, or for another replica.

        If it ``is_dead``, its requests fail now; otherwise they fail or end by themselves. ``KeyError`` if there is no
        such replica.
        """
        member = self._pool.member(name)
        member.suspended, member.suspended_until = reason, self._pool.now() + timeout_s
        if is_dead:
            for request in self._requests:
                request.lose(member, reason)
        self._pool.look_again()

    def add(self, replica: Replica) -> None:
        """Add a replica. ``ValueError`` if one has its name."""
        if replica.name in {member.name for member in self._pool.members}:
            raise ValueError(f"{self.label}: two replicas have one name: {replica.name}")
        self._pool.add(replica)
        self._num_planned = max(self._num_planned, len(self._pool.members))

    def fail(self, error: UserError) -> None:
        """Fail waiting and later requests with ``error``; requests in progress may end."""
        self._pool.fail(error)

    def replace(self, name: str, engine: Scorer | Generator, limits: EngineLimits = NO_LIMITS) -> None:
        """Resume work on a restarted replica, its breaker closed. ``KeyError`` if there is no such replica."""
        self._pool.member(name)
        self._pool.add(Replica(name=name, engine=engine, limits=limits))

    def remove(self, name: str, *, reason: str) -> None:
        """Remove a replica for good. After the last one, waiting and later requests fail at once with ``reason``."""
        self._pool.remove(name, reason)

    def give_up(self, name: str, *, reason: str) -> None:
        """Remove a replica that failed, and say so."""
        logger.error("%s is given up: %s", name, reason)
        self.remove(name, reason=reason)

    async def close(self) -> None:
        """Fail what waits and end requests that no caller waits for any more. The owner of the engines closes them."""
        self._pool.close()
        await cancel([request.task for request in self._requests if not request.is_awaited])

    def take_numbers(self) -> GroupNumbers:
        """Return the numbers since the last call and reset them."""
        numbers = self._pool.take(self._wanted_version, kind=self.kind, name=self.name, retries=self._retries)
        self._retries = 0
        return numbers

    @property
    def _wanted_version(self) -> int | None:
        return self.weight_version if self.kind == "rollout" or self.weight_version >= 0 else None

    async def _run(self, call: Call[R], *, stop_at_failure: bool) -> list[R | SampleFailed]:
        """Cut the call into parts, see each through, return the results in order. No part outlives the call."""
        version, number = self._wanted_version, next(self._orders)
        rooms = [call.room(i) for i in range(len(call.asked))]
        failures: dict[int, SampleFailed] = {}

        async def see(positions: Sequence[int], order: tuple[int, ...]) -> None:
            missing = {i: rooms[i] for i in positions}
            part = Part(
                order=order,
                room=sum(missing.values(), NO_ROOM),
                version=version,
                key=call.asked.kind,
                caller=call,
                call=call,
                missing=missing,
            )
            failure = await self._see_through(part)
            if failure is None:
                return
            left = list(part.missing)
            if isinstance(failure.last_error, EngineRejected) and len(left) > 1:
                # One sample may have spoilt the request of all: each gets its own.
                await all_or_none(see([i], (*order, i)) for i in left)
            elif stop_at_failure:
                raise failure
            else:
                failures.update(dict.fromkeys(left, failure))

        most = min(self._routing.max_tokens_per_request, self._routing.max_inflight_tokens)
        parts = cut([room.load for room in rooms], max_tokens=most, num_replicas=self._num_planned)
        size = self._pool.max_sequences
        if size is not None and rooms and rooms[0].sequences:
            # no part asks for more responses than wait at a replica, so that it can follow at once what ends there
            parts = [part[i : i + size] for part in parts for i in range(0, len(part), size)]
        with self.around_calls():
            await all_or_none(see(positions, (number, i)) for i, positions in enumerate(parts))
        return [failures[i] if i in failures else call.answers[i] for i in range(len(rooms))]

    async def _see_through(self, part: Part[R]) -> SampleFailed | None:
        """Ask until nothing is missing, or return why something is. Errors of a wrong call (no ``EngineError``) are
        raised."""
        while True:
            try:
                error = await self._attempt(part)
            except NoReplica as none:
                met = none if part.last_error is None else NoReplica(f"{part.last_error}; then {none}")
                return self._failure(part, met)
            if error is None:
                return None
            if isinstance(error, EngineBusy):
                if self._pool.now() - (part.turned_away_since or 0.0) >= self._routing.request_timeout_s:
                    return self._failure(part, error)
            elif isinstance(error, EngineUnavailable):
                if not part.is_stale(error):  # a stale one gets no such request again before it has the weights
                    patience_s = self._routing.request_timeout_s
                    now, most = self._pool.now(), self._limits.max_attempts
                    if part.is_given_up(now, max_attempts=most, patience_s=patience_s):
                        return self._failure(part, error)
                    pause_s = self._limits.backoff_s * 2 ** min(len(part.failed_on) - 1, MAX_DOUBLINGS)
                    await asyncio.sleep(min(pause_s, MAX_BACKOFF_S))
            elif not part.was_joined:  # else each of its parts is asked for alone: only one may be at fault
                if isinstance(error, EngineRejected):
                    return self._failure(part, error)
                raise error
            self._retries += 1

    async def _attempt(self, part: Part[R]) -> Exception | None:
        """Make one request with this part on it; return ``None`` when nothing is missing any more, else the error."""
        try:
            await self._pool.acquire(part)
            return await part.came_back
        finally:
            request, part.request = part.request, None
            if request is not None and part.missing:
                await request.leave()

    def _send(self, member: Member, parts: Sequence[Part[Any]]) -> None:
        """Make one request of ``parts`` to ``member``; the pool's ``send``."""
        request = Request(member, parts, self._pool, self._routing)
        self._requests.add(request)
        request.task.add_done_callback(lambda task: self._requests.discard(request))

    def _failure(self, part: Part[R], error: BaseException) -> SampleFailed:
        labels = {member.name: member.label for member in self._pool.members}
        attempts = [labels.get(name, name) for name in part.failed_on]
        return SampleFailed(self.label, tuple(part.missing), attempts=attempts, last_error=error)


def cut(tokens: Sequence[int], *, max_tokens: int, num_replicas: int) -> list[list[int]]:
    """Return the positions of ``tokens`` in requests of at most ``max_tokens`` (a longer sample is a request of its
    own).

    Long samples come first, since a long one that starts last keeps the other replicas waiting; equals keep their
    order. With several replicas no request holds more than half of a replica's fair share of what is left, so the last
    requests are small and even out the finish (guided self-scheduling, Polychronopoulos and Kuck 1987). The cut depends
    on its arguments alone: equal batches are computed equally, however fast the replicas are.

    Example: ``cut([3, 9, 4, 1], max_tokens=10, num_replicas=1)`` is ``[[1], [2, 0, 3]]``.
    """
    requests: list[list[int]] = []
    left = sum(tokens)
    room = 0
    for position in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        if not requests or tokens[position] > room:
            requests.append([])
            room = max_tokens if num_replicas == 1 else min(max_tokens, left // (2 * num_replicas))
        requests[-1].append(position)
        room -= tokens[position]
        left -= tokens[position]
    return requests
