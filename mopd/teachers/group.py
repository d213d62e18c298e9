"""One teacher: its replicas behind a router, and its turn where several teachers share a pool of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from torch import Tensor

from mopd.engines.interface import Scores
from mopd.replicas.interface import SampleFailed
from mopd.replicas.router import Router

Turn = Callable[[], AbstractAsyncContextManager[object]]
"""Makes the context in which a teacher is awake; a teacher with resources of its own always is."""


class TeacherGroup:
    """Replicas of one teacher."""

    def __init__(self, name: str, router: Router, *, vocab_size: int, turn: Turn = nullcontext) -> None:
        """``vocab_size`` is the teacher's own: no answer may name an id beyond it."""
        self.name = name
        self.router = router
        self.router.vocab_size = vocab_size
        self.turn = turn

    async def score(
        self,
        tokens: Sequence[Tensor],
        prompt_lengths: Sequence[int],
        *,
        top_k: int,
        temperature: float,
        stop_at_failure: bool = True,
    ) -> list[Scores | SampleFailed]:
        """See ``Scorer.score``; results in the order of the request.

        A sample that no replica can score ends everything (``SampleFailed``), or with ``stop_at_failure`` false is
        answered with that error.
        """
        ask = self.router.score if stop_at_failure else self.router.score_each
        async with self.turn():
            return [*await ask(tokens, prompt_lengths, top_k=top_k, temperature=temperature)]
