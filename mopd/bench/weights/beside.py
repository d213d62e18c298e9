"""The process between the student and the servers, as beside rank 0 of a run: router, clients, samples, one channel."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import torch

from mopd.bench.weights.student import TIMEOUT_S, forks
from mopd.config.groups import RoutingConfig
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import SamplingParams
from mopd.placement.weights import GroupWeightSync
from mopd.producer.channel import Channel, PeerEnded
from mopd.producer.samples import FarWorkers, SampleAnswers
from mopd.producer.weights import FarTargets, FarWeights, WeightAnswers
from mopd.replicas.interface import Replica
from mopd.replicas.router import Router
from mopd.replicas.transfer import TransferTargets
from mopd.tasks import Tasks

END_S = 20.0
PROMPT = [3, 4, 5]
SAMPLING = SamplingParams(max_new_tokens=4)
CLAIM_EVERY_S = 0.005


class ProducerWay:
    """The student's way to the process."""

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel, self.pid = channel, pid
        self.weights, self.targets = FarWeights(channel), FarTargets(channel)
        self._samples = FarWorkers(channel)

    async def answers(self) -> list[Any]:
        """What each server draws: tokens and log-probs."""
        return list(await self._channel.call("answers"))

    @asynccontextmanager
    async def claiming(self) -> AsyncIterator[list[float]]:
        """Claim from the data plane every few milliseconds in the block; seconds to each answer."""
        seconds: list[float] = []
        is_over = asyncio.Event()

        async def claim() -> None:
            while not is_over.is_set():
                began = time.perf_counter()
                await self._samples.claim([], [])
                seconds.append(time.perf_counter() - began)
                await asyncio.sleep(CLAIM_EVERY_S)

        claims = asyncio.ensure_future(claim())
        try:
            yield seconds
        finally:
            is_over.set()
            await claims


@asynccontextmanager
async def beside(urls: Sequence[str], token: str) -> AsyncIterator[ProducerWay]:
    """The process, until the end of the block."""
    ours, theirs = socket.socketpair()
    process = forks().Process(target=_work, args=(tuple(urls), token, theirs), daemon=True)
    process.start()
    theirs.close()
    ours.setblocking(False)
    channel = Channel("the process beside", {})
    assert process.pid is not None
    try:
        async with Tasks() as tasks:
            tasks.start(channel.run(ours))
            yield ProducerWay(channel, process.pid)
    finally:
        ours.close()
        await asyncio.to_thread(process.join, END_S)
        process.kill()
        process.join()


def _work(urls: Sequence[str], token: str, end: socket.socket) -> None:
    """The whole life of the process."""
    end.setblocking(False)
    torch.set_num_threads(1)
    asyncio.run(_serve(urls, token, end))


async def _serve(urls: Sequence[str], token: str, end: socket.socket) -> None:
    engines = [
        RemoteEngine(url, token=token, timeout_s=TIMEOUT_S, name=f"rollout.{number}") for number, url in enumerate(urls)
    ]
    replicas = [Replica(name=engine.name, engine=engine) for engine in engines]
    router = Router("bench", replicas, RoutingConfig(), kind="rollout")
    targets = TransferTargets(router, num_workers=1, on_running="finish", drain_s=TIMEOUT_S)
    sync = GroupWeightSync(router, targets=targets)

    async def answers() -> list[Any]:
        drawn = [await engine.generate([PROMPT], SAMPLING, [0]) for engine in engines]
        return [[generation.tokens.tolist(), generation.logprobs.tolist()] for (generation,) in drawn]

    nobody: Any = None  # only the data plane is asked
    samples = SampleAnswers(nobody, nobody, nobody, LocalDataPlane())
    handlers = {**WeightAnswers(lambda: sync).handlers, **samples.handlers, "answers": answers}
    with suppress(PeerEnded):
        await Channel("the student", handlers).run(end)
    await router.close()
    for engine in engines:
        await engine.close()
