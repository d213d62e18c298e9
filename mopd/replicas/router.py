"""The replicas of one group as one engine: each sample is seen through on some replica, or the caller learns why not.

::

    samples ──cut──> requests ──Pool: room, least tokens under way──> replica ──> answer ──> results in order
                        ▲                                                │
                        └── another replica, after a pause <── failure ──┘        a sample has one answer: the first

A request is given up (``SampleFailed``) after ``max_attempts`` failed attempts, when a replica refuses it as such, or
when the group stands still. A full queue or stale weights are no failures of a request: it waits for another replica.
Works on one event loop, with that loop's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from mopd.config.groups import RoutingConfig
from mopd.engines.clients.answers import check_generations, check_scores
from mopd.engines.interface import EngineRejected, Generation, Generator, SamplingParams, Scorer, Scores
from mopd.replicas.cutting import cut
from mopd.replicas.dispatch import Dispatcher, Request
from mopd.replicas.interface import Kind, Replica, SampleFailed
from mopd.replicas.pool import Pool
from mopd.replicas.statistics import GroupNumbers
from mopd.replicas.tasks import all_or_none

R = TypeVar("R")
Ask = Callable[[Any, Sequence[int]], Awaitable[Sequence[R]]]
Check = Callable[[Sequence[int], Sequence[R]], None]
Count = Callable[[Sequence[int], Sequence[R]], int]


class Router:
    """Implements ``Scorer`` and ``Generator``. Replicas may come and go while requests are under way."""

    def __init__(self, name: str, replicas: Sequence[Replica], routing: RoutingConfig, *, kind: Kind) -> None:
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
        self._routing = routing
        self._pool = Pool(routing, replicas)
        self._dispatcher = Dispatcher(self.label, self._pool, routing)
        self._num_planned = len(replicas)
        self.weight_version = -1
        """Rollout groups: the version that ``generate`` asks for; replicas with another get no work. Set by
        ``set_weight_version``."""
        self.vocab_size: int | None = None
        """Answers with an id from here on are corrupt; ``None``: nobody has told."""

    async def score(
        self, tokens: Sequence[Tensor], prompt_lengths: Sequence[int], *, top_k: int, temperature: float
    ) -> list[Scores]:
        """See ``Scorer.score``. The first ``SampleFailed`` ends it."""
        outcomes = await self._score(tokens, prompt_lengths, top_k, temperature, stop_at_failure=True)
        return cast("list[Scores]", outcomes)

    async def score_each(
        self, tokens: Sequence[Tensor], prompt_lengths: Sequence[int], *, top_k: int, temperature: float
    ) -> list[Scores | SampleFailed]:
        """As ``score``, but a sample that cannot be scored is answered with its error, and the others go on."""
        return await self._score(tokens, prompt_lengths, top_k, temperature, stop_at_failure=False)

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
        return cast("list[Generation]", await self._run(costs, ask, check, count, stop_at_failure=True))

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """See ``Generator.load_weights``: each replica in turn, then ``set_weight_version``. Suspended: left out.

        Several replicas need the whole set in memory, since the stream can be read once.
        """
        members = [member for member in self._pool.members if member.suspended is None]
        source = weights if len(members) == 1 else list(weights)
        for member in members:
            await cast(Generator, member.engine).load_weights(source, weight_version)
        self.set_weight_version(weight_version)

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

    def add(self, replica: Replica) -> None:
        """One more replica. ``ValueError`` if there is one of this name."""
        if replica.name in {member.name for member in self._pool.members}:
            raise ValueError(f"{self.label} has a replica {replica.name!r} already: replace it")
        self._pool.add(replica)

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
        dispatcher = self._dispatcher
        numbers = self._pool.take(
            self._wanted_version,
            name=self.name,
            retries=dispatcher.retries,
            hedges=dispatcher.hedges,
            hedges_won=dispatcher.hedges_won,
        )
        dispatcher.retries = dispatcher.hedges = dispatcher.hedges_won = 0
        return numbers

    @property
    def _wanted_version(self) -> int | None:
        return self.weight_version if self.kind == "rollout" else None

    async def _score(
        self,
        tokens: Sequence[Tensor],
        prompt_lengths: Sequence[int],
        top_k: int,
        temperature: float,
        *,
        stop_at_failure: bool,
    ) -> list[Scores | SampleFailed]:
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
                is_half=self._routing.wire_dtype == "float16",
            )

        def count(positions: Sequence[int], results: Sequence[Scores]) -> int:
            return sum(lengths[i] for i in positions)

        return await self._run(lengths, ask, check, count, stop_at_failure=stop_at_failure)

    async def _run(
        self, costs: Sequence[int], ask: Ask[R], check: Check[R], count: Count[R], *, stop_at_failure: bool
    ) -> list[R | SampleFailed]:
        """Cut, send, collect in order. Whatever ends it early, no request is left behind."""
        version = self._wanted_version

        async def outcomes_of(positions: Sequence[int]) -> list[R | SampleFailed]:
            tokens = sum(costs[i] for i in positions)
            request = Request(positions, tokens=tokens, version=version, ask=ask, check=check, count=count)
            answer = await self._dispatcher.see_through(request)
            if not isinstance(answer, SampleFailed):
                return [*answer]
            if isinstance(answer.last_error, EngineRejected) and len(positions) > 1:
                # One sample may have spoilt the request of all: each gets its own.
                alone = await all_or_none([asyncio.create_task(outcomes_of([position])) for position in positions])
                return [outcome for (outcome,) in alone]
            if stop_at_failure:
                raise answer
            return [answer] * len(positions)

        most = min(self._routing.max_tokens_per_request, self._routing.max_inflight_tokens)
        pieces = cut(costs, max_tokens=most, num_replicas=self._num_planned)
        answers = await all_or_none([asyncio.create_task(outcomes_of(piece)) for piece in pieces])
        by_position: dict[int, R | SampleFailed] = {}
        for piece, outcomes in zip(pieces, answers, strict=True):
            by_position.update(zip(piece, outcomes, strict=True))
        return [by_position[i] for i in range(len(costs))]
