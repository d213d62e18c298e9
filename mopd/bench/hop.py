"""The link from this process to a student's rank, as from a run's orchestrator: all that benchmarks know of how a run's
processes speak.

::

    orchestrator (this process) ── commands, by the link ──> rank 0 (a child) ── weights by a group ──> engines
                 ▲          └──── HTTP ──> engines                │
                 └──────────────── weights in chunks ─────────────┘
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from mopd.base.tasks import Tasks
from mopd.bench.processes import forks
from mopd.config.schema import Recipe
from mopd.launch.link import LinkEnded, RankLink
from mopd.launch.ranks import CommandChannel, facts_of, obey
from mopd.orchestrator.ranks import Ranks
from mopd.orchestrator.student import StudentGroup
from mopd.placement.weights import GroupWeightSync

END_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Hop:
    """The orchestrator's side."""

    ranks: Ranks
    pid: int
    """Process id of rank 0."""
    facts: dict[str, Any]
    """What a run's orchestrator is told of the student (``facts_of``)."""

    def student(self, recipe: Recipe, weights: GroupWeightSync) -> StudentGroup:
        """The student as a run's controller has it; its weights go as ``recipe.weight_sync`` says."""
        return StudentGroup(recipe, self.ranks, self.facts, weights)


@asynccontextmanager
async def hop(make: Callable[[Recipe], Any], recipe: Recipe) -> AsyncIterator[Hop]:
    """Start a child that is rank 0, the only one, with the student worker ``make(recipe)``, until the end of the
    block."""
    ours, theirs = socket.socketpair()
    process = forks(make.__module__).Process(target=_follow, args=(make, recipe, theirs), daemon=True)
    process.start()
    theirs.close()
    link = RankLink(ours, "the student's process")
    assert process.pid is not None
    try:
        async with Tasks() as tasks:
            ranks = Ranks(link)
            tasks.start(ranks.run())
            facts = await tasks.unless_failed(ranks.ask("join"))
            yield Hop(ranks=ranks, pid=process.pid, facts=facts)
    finally:
        link.close()
        await asyncio.to_thread(process.join, END_S)
        process.kill()
        process.join()


def _follow(make: Callable[[Recipe], Any], recipe: Recipe, end: socket.socket) -> None:
    """The child's whole life."""
    torch.set_num_threads(1)  # as beside as many busy engines
    worker, link = make(recipe), RankLink(end, "the benchmark")
    with suppress(LinkEnded):
        link.next_command()
        link.answer(facts_of(recipe, worker))
        obey(worker, CommandChannel(None), link)
