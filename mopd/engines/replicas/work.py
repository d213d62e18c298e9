"""The two kinds of work of replicas. Works that are equal may travel in one request, of whatever calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mopd.engines.checks import check_generations, check_scores
from mopd.engines.images import Item, split
from mopd.engines.interface import Generation, Generator, SamplingParams, Scorer, Scores
from mopd.engines.replicas.members import Room


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """Work of scorers; an item is a sequence, the length of its prompt, and its images."""

    top_k: int
    temperature: float
    vocab_size: int | None

    async def ask(
        self, engine: Scorer, items: Sequence[Item[Tensor]], on_response: Callable[[int, Scores], None] | None
    ) -> Sequence[Scores]:
        """Score the items. Scorers answer for all at once, so ``on_response`` is not called."""
        tokens, starts, images = split(items)
        return await engine.score(tokens, starts, top_k=self.top_k, temperature=self.temperature, images=images)

    def check(self, items: Sequence[Item[Tensor]], results: Sequence[Scores]) -> None:
        """Raise ``ValueError`` for scores that cannot be right."""
        tokens, starts, _ = split(items)
        check_scores(results, tokens, starts, top_k=self.top_k, vocab_size=self.vocab_size)

    def room(self, item: Item[Tensor]) -> Room:
        """Return the room of a sequence, whose length is known."""
        return Room(len(item[0]), 0, len(item[0]))

    def count(self, item: Item[Tensor], result: Scores) -> int:
        """Return the tokens of the sequence."""
        return len(item[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Generating:
    """Work of generators; an item is a prompt, its seed, and its images."""

    sampling: SamplingParams
    vocab_size: int | None

    async def ask(
        self,
        engine: Generator,
        items: Sequence[Item[Sequence[int]]],
        on_response: Callable[[int, Generation], None] | None,
    ) -> Sequence[Generation]:
        """Draw the items' responses."""
        prompts, seeds, images = split(items)
        return await engine.generate(prompts, self.sampling, seeds, on_response=on_response, images=images)

    def check(self, items: Sequence[Item[Sequence[int]]], results: Sequence[Generation]) -> None:
        """Raise ``ValueError`` for responses that cannot have been drawn."""
        check_generations(results, max_new_tokens=self.sampling.max_new_tokens, vocab_size=self.vocab_size)

    def room(self, item: Item[Sequence[int]]) -> Room:
        """Return the room of a prompt. A response's length is unknown before it ends: only its load counts with the
        most, and the engine makes room for it as it grows."""
        length = len(item[0])
        return Room(length, 1, length + self.sampling.max_new_tokens)

    def count(self, item: Item[Sequence[int]], result: Generation) -> int:
        """Return the tokens of prompt and response."""
        return len(item[0]) + len(result.tokens)
