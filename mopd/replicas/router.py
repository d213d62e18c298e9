"""The replicas of one group as one engine: each sample is seen through on some replica, or the caller learns why not.

::

    samples ──cut──> requests ──Pool: room, least tokens under way──> replica ──> answer ──> results in order
                        ▲                                                │
                        └── another replica, after a pause <── failure ──┘        a sample has one answer: the first

A request is given up (``SampleFailed``) after ``max_attempts`` failed attempts, when a replica refuses it as such, or
when the group stands still. A full queue or stale weights are no failures of a request: it waits for another replica.
Every answer is checked here, wherever its engine runs. Works on one event loop, with that loop's clock.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from mopd.config.groups import RoutingConfig
from mopd.engines.checks import check_generations, check_scores
from mopd.engines.concurrency import all_or_none, cancel
from mopd.engines.interface import (
    CorruptAnswer,
    EngineBusy,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    Generation,
    Generator,
    SamplingParams,
    Scorer,
    Scores,
    StaleWeights,
)
from mopd.replicas.interface import LIMITS, Kind, NoReplica, Replica, RouterLimits, SampleFailed
from mopd.replicas.pool import Member, Pool, Want
from mopd.replicas.statistics import GroupNumbers

R = TypeVar("R")
MAX_BACKOFF_S = 30.0
"""The pause between attempts stops doubling here."""
MIN_RETRY_AFTER_S = 0.01
"""A replica with a full queue is left alone at least this long, whatever it says."""


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """What is asked about a caller's samples, given by their positions in the caller's request."""

    ask: Callable[[Any, Sequence[int]], Awaitable[Sequence[R]]]
    """``ask(engine, positions)`` sends them."""
    check: Callable[[Sequence[int], Sequence[R]], None]
    """``check(positions, results)`` raises ``ValueError`` for results that cannot be right."""
    count: Callable[[Sequence[int], Sequence[R]], int]
    """``count(positions, results)``: tokens that they turned out to have."""


@dataclass(kw_only=True, eq=False)
class Request(Want, Generic[R]):
    """Some samples that travel together, and what has happened to them so far."""

    call: Call[R]
    positions: tuple[int, ...]
    last_error: BaseException | None = None
    turned_away_since: float | None = None
    """When it first met a full queue since its last real attempt."""


class Router:
    """Scores as a ``Scorer`` and implements ``Generator``. Replicas may end and return while requests are under way."""

    def __init__(
        self,
        name: str,
        replicas: Sequence[Replica],
        routing: RoutingConfig,
        *,
        kind: Kind,
        limits: RouterLimits = LIMITS,
    ) -> None:
        """``name`` is the teacher's or the rollout group's name.

        Raises:
            ValueError: no replica, a name given twice, or one engine in two replicas.
        """
        self.name, self.kind = name, kind
        self.label = f"{kind} {name!r}"
        if not replicas:
            raise ValueError(f"{self.label} has no replica: set replicas: 1 or more")
        names = [replica.name for replica in replicas]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.label}: two replicas have one name: {names}")
        if len({id(replica.engine) for replica in replicas}) != len(replicas):
            raise ValueError(f"{self.label}: two replicas are one engine; each needs its own")
        self._routing, self._limits = routing, limits
        self._pool = Pool(routing, limits, replicas)
        self._orders = itertools.count()
        self._retries = 0
        self._num_planned = len(replicas)
        self.weight_version = -1
        """Rollout groups: the version that ``generate`` asks for; replicas with another get no work. Set by
        ``set_weight_version``."""
        self.vocab_size: int | None = None
        """Answers with an id from here on are corrupt; ``None``: nobody has told."""

    async def score(
        self,
        tokens: Sequence[Tensor],
        prompt_lengths: Sequence[int],
        *,
        top_k: int,
        temperature: float,
        stop_at_failure: bool = True,
    ) -> list[Scores | SampleFailed]:
        """See ``Scorer.score``. The first ``SampleFailed`` ends it; with ``stop_at_failure`` false a sample that cannot
        be scored is answered with its error, and the others go on."""
        if len(tokens) != len(prompt_lengths):
            raise ValueError(f"{len(tokens)} sequences but {len(prompt_lengths)} prompt lengths")
        lengths = [len(sequence) for sequence in tokens]

        async def ask(engine: Scorer, positions: Sequence[int]) -> list[Scores]:
            starts = [prompt_lengths[i] for i in positions]
            return await engine.score([tokens[i] for i in positions], starts, top_k=top_k, temperature=temperature)

        def check(positions: Sequence[int], results: Sequence[Scores]) -> None:
            check_scores(
                results,
                [tokens[i] for i in positions],
                [prompt_lengths[i] for i in positions],
                top_k=top_k,
                vocab_size=self.vocab_size,
            )

        def count(positions: Sequence[int], results: Sequence[Scores]) -> int:
            return sum(lengths[i] for i in positions)

        return await self._run(lengths, Call(ask, check, count), stop_at_failure=stop_at_failure)

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Generation]:
        """See ``Generator.generate``, with the weights of ``weight_version``. The first ``SampleFailed`` ends it."""
        if len(prompts) != len(seeds):
            raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds")

        async def ask(engine: Generator, positions: Sequence[int]) -> list[Generation]:
            return await engine.generate([prompts[i] for i in positions], sampling, [seeds[i] for i in positions])

        def check(positions: Sequence[int], results: Sequence[Generation]) -> None:
            check_generations(results, max_new_tokens=sampling.max_new_tokens, vocab_size=self.vocab_size)

        def count(positions: Sequence[int], results: Sequence[Generation]) -> int:
            return sum(len(prompts[i]) for i in positions) + sum(len(result.tokens) for result in results)

        # The most that a response can take: its length is not known before it is drawn.
        costs = [len(prompt) + sampling.max_new_tokens for prompt in prompts]
        return cast("list[Generation]", await self._run(costs, Call(ask, check, count), stop_at_failure=True))

    def set_weight_version(self, weight_version: int) -> None:
        """The replicas were given these weights, by whatever way: ask for them, and forget who was stale before."""
        self.weight_version = weight_version
        for member in self._pool.members:
            member.refused_version = None
        self._pool.look_again()

    @property
    def needs_weights(self) -> tuple[str, ...]:
        """Replicas that do not serve ``weight_version``; they get no work until it has been pushed to them."""
        return tuple(m.name for m in self._pool.members if m.suspended is None and not m.serves(self.weight_version))

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All that are not gone, suspended ones included."""
        return tuple(Replica(name=m.name, engine=m.engine) for m in self._pool.members)

    def suspend(self, name: str, *, reason: str, timeout_s: float) -> None:
        """No work for a replica that is being restarted; requests wait up to ``timeout_s`` for its ``replace``.

        What it has under way fails or ends by itself. ``KeyError`` if there is no such replica.
        """
        member = self._pool.member(name)
        member.suspended, member.suspended_until = reason, self._pool.now() + timeout_s
        self._pool.look_again()

    def replace(self, name: str, engine: Scorer | Generator) -> None:
        """A restarted replica works again, its breaker closed. ``KeyError`` if there is no such replica."""
        self._pool.member(name)
        self._pool.add(Replica(name=name, engine=engine))

    def remove(self, name: str, *, reason: str) -> None:
        """Gone for good; when it was the last one, waiting and later requests fail at once and name ``reason``."""
        self._pool.remove(name, reason)

    async def close(self) -> None:
        """No more work; requests that wait fail. Engines are closed by whoever made them."""
        self._pool.close()

    def take_numbers(self) -> GroupNumbers:
        """What happened since the last call; starts anew."""
        numbers = self._pool.take(self._wanted_version, kind=self.kind, name=self.name, retries=self._retries)
        self._retries = 0
        return numbers

    @property
    def _wanted_version(self) -> int | None:
        return self.weight_version if self.kind == "rollout" else None

    async def _run(self, costs: Sequence[int], call: Call[R], *, stop_at_failure: bool) -> list[R | SampleFailed]:
        """Cut, send, collect in order. Whatever ends it early, no request is left behind."""
        version = self._wanted_version

        async def outcomes_of(positions: Sequence[int]) -> list[R | SampleFailed]:
            request = Request(
                order=next(self._orders),
                tokens=sum(costs[i] for i in positions),
                version=version,
                call=call,
                positions=tuple(positions),
            )
            answer = await self._see_through(request)
            if not isinstance(answer, SampleFailed):
                return [*answer]
            if isinstance(answer.last_error, EngineRejected) and len(positions) > 1:
                # One sample may have spoilt the request of all: each gets its own.
                alone = await all_or_none(outcomes_of([position]) for position in positions)
                return [outcome for (outcome,) in alone]
            if stop_at_failure:
                raise answer
            return [answer] * len(positions)

        most = min(self._routing.max_tokens_per_request, self._routing.max_inflight_tokens)
        pieces = cut(costs, max_tokens=most, num_replicas=self._num_planned)
        answers = await all_or_none(map(outcomes_of, pieces))
        by_position: dict[int, R | SampleFailed] = {}
        for piece, outcomes in zip(pieces, answers, strict=True):
            by_position.update(zip(piece, outcomes, strict=True))
        return [by_position[i] for i in range(len(costs))]

    async def _see_through(self, request: Request[R]) -> list[R] | SampleFailed:
        """The results in order, or why there are none. Errors that are no ``EngineError`` (a wrong call) are raised."""
        while True:
            try:
                member = await self._pool.acquire(request)
            except NoReplica as error:
                met = error if request.last_error is None else NoReplica(f"{request.last_error}; then {error}")
                return self._failure(request, met)
            try:
                return list(await self._send(member, request))
            except EngineRejected as error:
                return self._failure(request, error)
            except EngineBusy as error:
                if self._pool.now() - (request.turned_away_since or 0.0) >= self._routing.request_timeout_s:
                    return self._failure(request, error)
            except EngineUnavailable as error:
                if not _is_stale(request, error):  # a stale one gets no such request again before it has the weights
                    if len(request.failed_on) >= self._limits.max_attempts:
                        return self._failure(request, error)
                    pause_s = self._limits.backoff_s * 2 ** (len(request.failed_on) - 1)
                    await asyncio.sleep(min(pause_s, MAX_BACKOFF_S))
            self._retries += 1

    async def _send(self, member: Member, request: Request[R]) -> Sequence[R]:
        """A request on one replica; the breaker and the counters learn what came of it."""
        started = self._pool.now()
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
                    num_tokens=request.call.count(request.positions, results),
                    latency_s=self._pool.now() - started,
                )
            return results
        finally:
            self._pool.ended(member, request)

    async def _ask(self, member: Member, request: Request[R]) -> Sequence[R]:
        timeout_s = self._routing.request_timeout_s
        call = asyncio.ensure_future(request.call.ask(member.engine, request.positions))
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
            request.call.check(request.positions, results)
        except ValueError as error:
            raise CorruptAnswer(f"{member.name}: corrupt answer: {error}") from error
        return results

    def _judge(self, member: Member, request: Request[R], error: EngineError) -> None:
        now = self._pool.now()
        is_stale = _is_stale(request, error)
        if isinstance(error, EngineUnavailable) and not is_stale:
            member.breaker.failed(now)
            member.counters.numbers.failures += 1
            request.failed_on.append(member.name)
            request.turned_away_since = None
        else:
            member.breaker.succeeded()  # it answered
        if isinstance(error, EngineBusy):
            member.counters.numbers.busy_answers += 1
            pause_s = min(error.retry_after_s, self._routing.request_timeout_s / 2)  # or waiting requests give up
            member.busy_until = now + max(pause_s, MIN_RETRY_AFTER_S)
            if request.turned_away_since is None:
                request.turned_away_since = now
        elif is_stale:
            member.counters.numbers.stale_answers += 1
            member.refused_version = request.version
        elif isinstance(error, EngineRejected):
            request.failed_on.append(member.name)
        request.last_error = error

    def _failure(self, request: Request[R], error: BaseException) -> SampleFailed:
        return SampleFailed(self.label, request.positions, attempts=request.failed_on, last_error=error)


def _is_stale(request: Request[Any], error: EngineError) -> bool:
    """The replica lacks weights that will be sent to it. Where weights are fixed, other ones are a failure."""
    return isinstance(error, StaleWeights) and request.version is not None


def cut(tokens: Sequence[int], *, max_tokens: int, num_replicas: int) -> list[list[int]]:
    """Positions of ``tokens`` in requests of at most ``max_tokens`` (a longer sample is a request of its own).

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
