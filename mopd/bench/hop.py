"""The process that makes samples in a run, and the trainer's way to it and to the engines' weights: all that benchmarks
know of how a run's processes speak.

::

    trainer's side (this process) ── one pair of sockets ──> workers, routers, storage (a child) ──> engines

The child has an event loop and a processor of its own, as in a run, and what moves between the two goes through the
socket that a run's goes through.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from mopd.bench.processes import forks
from mopd.config.weights import BucketsConfig
from mopd.controller import Plane
from mopd.launch.transfer import Transfer
from mopd.placement.weights import GroupWeightSync
from mopd.producer.channel import Channel, PeerEnded
from mopd.producer.samples import FarWorkers, SampleAnswers
from mopd.producer.weights import FarTargets, FarWeights, WeightAnswers
from mopd.tasks import Tasks
from mopd.transfer.buckets import TensorMeta

END_S = 20.0


@dataclass(kw_only=True)
class Makers:
    """The child's parts."""

    sync: GroupWeightSync
    plane: Plane
    rollout: Any = None
    teachers: Any = None
    rewards: Any = None
    """Workers as the controller knows them; none where a benchmark asks for weights and the data plane alone."""
    calls: Mapping[str, Callable[..., Awaitable[Any]]] = field(default_factory=dict)
    """Further calls that the child answers, by name."""


class Hop:
    """The trainer's side."""

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel, self.pid = channel, pid
        self.workers, self.weights, self.call = FarWorkers(channel), FarWeights(channel), channel.call

    def transfer(self, cfg: BucketsConfig, metas: Sequence[TensorMeta], device: torch.device) -> Transfer:
        """The student's side of a collective. As in a run nobody looks for NaN, which optimizer steps do."""
        targets = FarTargets(self._channel)
        return Transfer(targets, cfg, metas, num_workers=1, device=device, checks_values=False)

    @property
    def moved(self) -> tuple[int, int]:
        """Calls and bytes until now, in both directions."""
        return self._channel.num_calls, self._channel.bytes_moved


@asynccontextmanager
async def hop(make: Callable[..., AbstractAsyncContextManager[Makers]], *arguments: Any) -> AsyncIterator[Hop]:
    """Start the child, which holds ``make(*arguments)``, until the end of the block."""
    ours, theirs = socket.socketpair()
    process = forks(make.__module__).Process(target=_work, args=(make, arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    ours.setblocking(False)
    channel = Channel("the process that makes samples", {})
    assert process.pid is not None
    try:
        async with Tasks() as tasks:
            tasks.start(channel.run(ours))
            yield Hop(channel, process.pid)
    finally:
        ours.close()
        await asyncio.to_thread(process.join, END_S)
        process.kill()
        process.join()


def _work(make: Callable[..., AbstractAsyncContextManager[Makers]], arguments: Any, end: socket.socket) -> None:
    """The child's whole life."""
    end.setblocking(False)
    torch.set_num_threads(1)
    asyncio.run(_serve(make, arguments, end))


async def _serve(make: Callable[..., AbstractAsyncContextManager[Makers]], arguments: Any, end: socket.socket) -> None:
    async with make(*arguments) as held:
        samples = SampleAnswers(held.rollout, held.teachers, held.rewards, held.plane)
        handlers = {**WeightAnswers(lambda: held.sync).handlers, **samples.handlers, **held.calls}
        with suppress(PeerEnded):
            await Channel("the trainer", handlers).run(end)
