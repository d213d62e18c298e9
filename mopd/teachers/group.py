"""One teacher: its replicas, and the sharing of requests between them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from torch import Tensor

from mopd.engines.interface import Scorer, Scores


class TeacherGroup:
    """Replicas of one teacher. Each sequence goes to the replica with the fewest tokens waiting."""

    def __init__(self, name: str, scorers: Sequence[Scorer], *, vocab_size: int) -> None:
        """``vocab_size`` is the teacher's own. ``ValueError`` for no replica, or one engine given twice."""
        if not scorers:
            raise ValueError(f"teachers.{name} has no replica: set replicas: 1 or more")
        if len({id(scorer) for scorer in scorers}) != len(scorers):
            raise ValueError(f"teachers.{name}: two replicas are one engine; each needs its own")
        self.name = name
        self.vocab_size = vocab_size
        self._scorers = list(scorers)
        self._waiting_tokens = [0] * len(scorers)

    async def score(
        self, tokens: Sequence[Tensor], prompt_lengths: Sequence[int], *, top_k: int, temperature: float
    ) -> list[Scores]:
        """See ``Scorer.score``; results in the order of the request. A replica's failure is the group's."""
        shares: list[list[int]] = [[] for _ in self._scorers]
        for i in sorted(range(len(tokens)), key=lambda i: -len(tokens[i])):
            replica = self._waiting_tokens.index(min(self._waiting_tokens))
            shares[replica].append(i)
            self._waiting_tokens[replica] += len(tokens[i])
        results: dict[int, Scores] = {}

        async def score_share(replica: int) -> None:
            share = sorted(shares[replica])
            try:
                scores = await self._scorers[replica].score(
                    [tokens[i] for i in share],
                    [prompt_lengths[i] for i in share],
                    top_k=top_k,
                    temperature=temperature,
                )
            finally:
                self._waiting_tokens[replica] -= sum(len(tokens[i]) for i in share)
            results.update(zip(share, scores, strict=True))

        await asyncio.gather(*(score_share(r) for r in range(len(shares)) if shares[r]))
        return [results[i] for i in range(len(tokens))]
