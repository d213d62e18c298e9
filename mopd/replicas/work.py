"""The two things that a router asks of replicas. Items of equal work may travel in one request, whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from mopd.engines.checks import check_generations, check_scores
from mopd.engines.images import Item, split
from mopd.engines.interface import Generation, Generator, SamplingParams, Scorer, Scores
from mopd.replicas.members import Room

ItemT = TypeVar("ItemT", contravariant=True)
ResultT = TypeVar("ResultT")
EngineT = TypeVar("EngineT", contravariant=True)


class Work(Protocol[EngineT, ItemT, ResultT]):
    """What is asked about items. Equal ones hash equally."""

    async def ask(
        self, engine: EngineT, items: Sequence[ItemT], told: Callable[[int, ResultT], None] | None
    ) -> Sequence[ResultT]:
        """A result for each item; ``told`` as in ``Generator.generate``."""
        ...

    def __hash__(self) -> int:
        """Of what must be equal."""
        ...

    def check(self, items: Sequence[ItemT], results: Sequence[ResultT]) -> None:
        """``ValueError`` for results that cannot be right."""
        ...

    def room(self, item: ItemT) -> Room:
        """What an item takes of a replica."""
        ...

    def count(self, item: ItemT, result: ResultT) -> int:
        """Tokens that it turned out to have."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """``Work`` of scorers; an item is a sequence, the length of its prompt, and its images."""

    top_k: int
    temperature: float
    vocab_size: int | None

    async def ask(
        self, engine: Scorer, items: Sequence[Item[Tensor]], told: Callable[[int, Scores], None] | None
    ) -> Sequence[Scores]:
        """See ``Work.ask``. Scorers answer at once for all."""
        tokens, starts, images = split(items)
        return await engine.score(tokens, starts, top_k=self.top_k, temperature=self.temperature, images=images)

    def check(self, items: Sequence[Item[Tensor]], results: Sequence[Scores]) -> None:
        """See ``Work.check``."""
        tokens, starts, _ = split(items)
        check_scores(results, tokens, starts, top_k=self.top_k, vocab_size=self.vocab_size)

    def room(self, item: Item[Tensor]) -> Room:
        """See ``Work.room``."""
        return Room(len(item[0]), 0, len(item[0]))

    def count(self, item: Item[Tensor], result: Scores) -> int:
        """See ``Work.count``."""
        return len(item[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Generating:
    """``Work`` of generators; an item is a prompt, its seed, and its images."""

    sampling: SamplingParams
    vocab_size: int | None

    async def ask(
        self,
        engine: Generator,
        items: Sequence[Item[Sequence[int]]],
        told: Callable[[int, Generation], None] | None,
    ) -> Sequence[Generation]:
        """See ``Work.ask``."""
        prompts, seeds, images = split(items)
        return await engine.generate(prompts, self.sampling, seeds, told=told, images=images)

    def check(self, items: Sequence[Item[Sequence[int]]], results: Sequence[Generation]) -> None:
        """See ``Work.check``."""
        check_generations(results, max_new_tokens=self.sampling.max_new_tokens, vocab_size=self.vocab_size)

    def room(self, item: Item[Sequence[int]]) -> Room:
        """See ``Work.room``. How long a response gets is not known before: the engine makes room for it as it grows."""
        length = len(item[0])
        return Room(length, 1, length + self.sampling.max_new_tokens)

    def count(self, item: Item[Sequence[int]], result: Generation) -> int:
        """See ``Work.count``."""
        return len(item[0]) + len(result.tokens)
