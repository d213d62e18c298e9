"""One request on its way: attempts, pauses, a second copy for a slow one, and the verdict on each replica."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from mopd.config.groups import RoutingConfig
from mopd.engines.interface import (
    CorruptAnswer,
    EngineBusy,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    StaleWeights,
)
from mopd.metrics import is_counted
from mopd.replicas.interface import NoReplica, SampleFailed
from mopd.replicas.pool import Lease, Member, Pool, Want
from mopd.replicas.tasks import cancel

R = TypeVar("R")

MAX_BACKOFF_S = 30.0
"""The pause between attempts stops doubling here."""
MIN_RETRY_AFTER_S = 0.01
"""A replica with a full queue is left alone at least this long, whatever it says."""


class Request(Generic[R]):
    """Some samples that travel together, and what has happened to them so far."""

    def __init__(
        self,
        positions: Sequence[int],
        *,
        tokens: int,
        version: int | None,
        ask: Callable[[Any, Sequence[int]], Awaitable[Sequence[R]]],
        check: Callable[[Sequence[int], Sequence[R]], None],
        count: Callable[[Sequence[int], Sequence[R]], int],
    ) -> None:
        """
        Args:
            positions: places of the samples in the caller's request.
            tokens: room that they take on a replica.
            version: weight version that must answer; ``None`` where weights are fixed.
            ask: ``ask(engine, positions)`` sends them.
            check: ``check(positions, results)`` raises ``ValueError`` for results that cannot be right.
            count: ``count(positions, results)`` is the number of tokens that they turned out to have.
        """
        self.positions, self.tokens, self.version = tuple(positions), tokens, version
        self.ask, self.check, self.count = ask, check, count
        self.is_counted = is_counted()
        self.failed_on: list[str] = []
        self.last_error: BaseException | None = None
        self.turned_away_since: float | None = None
        """When it first met a full queue since its last real attempt."""


class Dispatcher:
    """Sends requests through a pool."""

    def __init__(self, label: str, pool: Pool, routing: RoutingConfig) -> None:
        """``label`` names the group in errors."""
        self._label, self._pool, self._routing = label, pool, routing
        self._orders = itertools.count()
        self.retries = self.hedges = self.hedges_won = 0

    async def see_through(self, request: Request[R]) -> list[R] | SampleFailed:
        """The results in order, or why there are none. Errors that are no ``EngineError`` (a wrong call) are raised."""
        order = next(self._orders)
        while True:
            want = Want(
                order=order,
                tokens=request.tokens,
                version=request.version,
                avoid=frozenset(request.failed_on),
                is_counted=request.is_counted,
            )
            try:
                lease = await self._pool.acquire(want)
            except NoReplica as error:
                met = error if request.last_error is None else NoReplica(f"{request.last_error}; then {error}")
                return self._failure(request, met)
            try:
                return list(await self._attempt(lease, request, want))
            except EngineRejected as error:
                return self._failure(request, error)
            except EngineBusy as error:
                if self._pool.now() - (request.turned_away_since or 0.0) >= self._routing.request_timeout_s:
                    return self._failure(request, error)
            except EngineUnavailable as error:
                if not _is_stale(request, error):  # a stale one gets no such request again before it has the weights
                    if len(request.failed_on) >= self._routing.max_attempts:
                        return self._failure(request, error)
                    pause_s = self._routing.backoff_s * 2 ** (len(request.failed_on) - 1)
                    await asyncio.sleep(min(pause_s, MAX_BACKOFF_S))
            self.retries += 1

    async def _attempt(self, lease: Lease, request: Request[R], want: Want) -> Sequence[R]:
        """The answer of the leased replica; if it is slow and hedging is on, the first answer of two replicas."""
        hedge_after_s = self._routing.hedge_after_s
        if hedge_after_s is None or len(self._pool.members) < 2:
            return await self._send(lease, request)
        first = asyncio.create_task(self._send(lease, request))
        tasks = [first]
        try:
            await asyncio.wait(tasks, timeout=hedge_after_s)
            if first.done():
                return first.result()
            # A new number: it waits behind all that have not been sent at all.
            elsewhere = replace(want, order=next(self._orders), exclude=lease.member.name)
            is_sent = asyncio.Event()
            second = asyncio.create_task(self._hedge(elsewhere, request, is_sent))
            tasks.append(second)
            while True:  # each of the two has its own deadline
                await asyncio.wait([t for t in tasks if not t.done()], return_when=asyncio.FIRST_COMPLETED)
                if _answered(first):
                    return first.result()
                if _answered(second):
                    self.hedges_won += 1
                    return second.result()
                if first.done() and (second.done() or not is_sent.is_set()):
                    return first.result()
        finally:
            await cancel(tasks)

    async def _hedge(self, want: Want, request: Request[R], is_sent: asyncio.Event) -> Sequence[R]:
        """A second copy of a request, as soon as another replica has room."""
        lease = await self._pool.acquire(want)
        self.hedges += 1
        is_sent.set()
        return await self._send(lease, request)

    async def _send(self, lease: Lease, request: Request[R]) -> Sequence[R]:
        """One copy of a request on one replica; the breaker and the counters learn what came of it."""
        member, started = lease.member, self._pool.now()
        try:
            results = await self._ask(member, request)
        except EngineError as error:
            self._judge(member, request, error)
            raise
        except BaseException:  # cancelled, or a wrong call: proves nothing about the replica
            member.breaker.abandoned(self._pool.now())
            raise
        else:
            member.breaker.succeeded()
            if request.is_counted:
                member.counters.answered(
                    num_samples=len(results),
                    num_tokens=request.count(request.positions, results),
                    latency_s=self._pool.now() - started,
                )
            return results
        finally:
            lease.end()

    async def _ask(self, member: Member, request: Request[R]) -> Sequence[R]:
        timeout_s = self._routing.request_timeout_s
        call = asyncio.ensure_future(request.ask(member.engine, request.positions))
        try:
            await asyncio.wait({call}, timeout=timeout_s)
            if not call.done():
                raise EngineUnavailable(f"{member.name}: no answer within {timeout_s:g} s (routing.request_timeout_s)")
            results = call.result()
        finally:
            await cancel([call])
        if len(results) != len(request.positions):
            raise EngineUnavailable(f"{member.name}: {len(results)} answers for {len(request.positions)} samples")
        try:
            request.check(request.positions, results)
        except ValueError as error:
            raise CorruptAnswer(f"{member.name}: corrupt answer: {error}") from error
        return results

    def _judge(self, member: Member, request: Request[R], error: EngineError) -> None:
        now = self._pool.now()
        is_stale = _is_stale(request, error)
        if isinstance(error, EngineUnavailable) and not is_stale:
            member.breaker.failed(now)
            member.counters.failures += 1
            request.failed_on.append(member.name)
            request.turned_away_since = None
        else:
            member.breaker.succeeded()  # it answered
        if isinstance(error, EngineBusy):
            member.counters.busy_answers += 1
            pause_s = min(error.retry_after_s, self._routing.request_timeout_s / 2)  # or waiting requests give up
            member.busy_until = now + max(pause_s, MIN_RETRY_AFTER_S)
            if request.turned_away_since is None:
                request.turned_away_since = now
        elif is_stale:
            member.counters.stale_answers += 1
            member.refused_version = request.version
        elif isinstance(error, EngineRejected):
            request.failed_on.append(member.name)
        request.last_error = error

    def _failure(self, request: Request[R], error: BaseException) -> SampleFailed:
        return SampleFailed(self._label, request.positions, attempts=request.failed_on, last_error=error)


def _is_stale(request: Request[Any], error: EngineError) -> bool:
    """The replica lacks weights that will be sent to it. Where weights are fixed, other ones are a failure."""
    return isinstance(error, StaleWeights) and request.version is not None


def _answered(task: asyncio.Task[Any]) -> bool:
    """Done without an error of the engine or the pool; any other error is a wrong call and is raised."""
    if not task.done():
        return False
    error = task.exception()
    if error is not None and not isinstance(error, (EngineError, NoReplica)):
        raise error
    return error is None
