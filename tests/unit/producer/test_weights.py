"""The student's weights on the way that claims, generations and scores take too: none of these waits for them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import torch

from mopd.data_plane.local import LocalDataPlane
from mopd.producer.channel import PIECE_BYTES, Channel
from mopd.producer.samples import FarWorkers, SampleAnswers
from mopd.producer.weights import FarWeights
from mopd.types import SampleMeta
from mopd.wire.weights import stage_updates

NUM_CLAIMS = 20
WEIGHTS = {f"layer.{i}": torch.randn(2**21, generator=torch.Generator().manual_seed(i)) for i in range(16)}
"""128 MiB, of which a chunk holds 64."""
MOST_BEFORE_ANSWER = 4 * PIECE_BYTES
"""Bytes of weights between a claim and its answer: the piece that leaves, and what sockets hold of the one before."""
PART = 2**16


class Relay:
    """Stands between the two ends, and counts what the first one sends."""

    def __init__(self) -> None:
        self.ours, self._near = socket.socketpair()
        self._far, self.theirs = socket.socketpair()
        for end in (self.ours, self._near, self._far, self.theirs):
            end.setblocking(False)
        self.num_bytes = 0

    async def run(self) -> None:
        await asyncio.gather(self._carry(self._near, self._far, True), self._carry(self._far, self._near, False))

    async def _carry(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        loop = asyncio.get_running_loop()
        while part := await loop.sock_recv(source, PART):
            await loop.sock_sendall(target, part)
            self.num_bytes += len(part) if is_counted else 0


def meta(sample_id: int) -> SampleMeta:
    return SampleMeta(
        sample_id=sample_id, domain="math", weight_version=0, prompt_length=1, response_length=1, num_loss_tokens=1
    )


def test_claims_are_answered_between_the_pieces_of_a_model() -> None:
    """Counted in bytes: on any machine a claim waits for some pieces of the weights, and not for the rest."""
    arrived: list[int] = []
    staged = stage_updates(WEIGHTS.items(), 1)

    async def weights(head: dict[str, Any], frames: Sequence[bytes]) -> None:
        assert tuple(frames) == staged.bodies
        arrived.append(len(frames))

    async def main() -> None:
        plane, relay = LocalDataPlane(), Relay()
        await plane.put([meta(i) for i in range(NUM_CLAIMS)], {})
        far: Any = None
        answers = SampleAnswers(far, far, None, plane)
        asking = Channel("the producer", {})
        answering = Channel("rank 0", {**answers.handlers, "weights": weights})
        running = [asyncio.ensure_future(asking.run(relay.ours)), asyncio.ensure_future(answering.run(relay.theirs))]
        running.append(asyncio.ensure_future(relay.run()))
        sending = asyncio.ensure_future(FarWeights(asking).send(staged))
        while relay.num_bytes < PIECE_BYTES:
            await asyncio.sleep(0)
        for sample_id in range(NUM_CLAIMS):
            before = relay.num_bytes
            batch = await FarWorkers(asking).claim([sample_id], [])
            assert batch.samples == (meta(sample_id),)
            assert relay.num_bytes - before <= MOST_BEFORE_ANSWER
            assert not sending.done() and not arrived
        await sending
        assert arrived
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 300))
