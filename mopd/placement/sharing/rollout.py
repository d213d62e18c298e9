"""The rollout's side of GPUs that it shares with the student: replicas that sleep, wake and get their weights again.

::

    give back   no push is under way ──> every replica sleeps: weights and cache are gone
    take        every replica takes the memory of its weights ──> gets the version that was sent last ──> of its cache
                from what is kept for it (HTTP), or from the student's own parameters (``weight_sync.type: ipc``)

A replica that does not follow is ended, so that what it holds is free whatever had become of it; the group starts it
again, in the rollout's turn. That costs one of its restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from mopd.base.types import UserError
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.concurrency import cancel
from mopd.engines.interface import EngineUnavailable, Generation, Generator, ResponseCallback, ToDraw
from mopd.placement.interface import WeightSource
from mopd.placement.server_group import ServerGroup


class RolloutMemory:
    """Implements ``MemoryHolder`` for the rollout's replicas."""

    def __init__(self) -> None:
        self.group: ServerGroup | None = None
        """The rollout's group; ``None`` before it is placed."""
        self.weights: WeightSource | None = None
        """Sends weights to replicas that wake; ``None`` before there are weights."""

    async def give_back(self) -> None:
        """Put every replica to sleep. ``UserError`` for a replica that cannot be ended either."""
        if self.weights is not None:
            await self.weights.stop()
        if self.group is not None:
            await self.group.all_do("sleep", lambda engine: engine.sleep())

    async def take(self) -> None:
        """Wake every replica and give it weights. Raises as ``give_back`` and ``WeightSource.go_on`` do."""
        if self.group is None:
            return
        await self.group.all_do("wake up for weights", lambda engine: engine.wake_up(weights_only=True))
        version = None if self.weights is None else await self.weights.go_on()

        async def wake(engine: RemoteEngine) -> None:
            if version is not None and engine.weight_version < version:
                raise EngineUnavailable(f"{engine.name}: it has weights {engine.weight_version}, not {version}")
            await engine.wake_up()

        await self.group.all_do("wake up", wake)


class TurnsGenerator:
    """Implements ``Generator`` over one that answers only while it is the rollout's turn."""

    def __init__(self, generator: Generator, kept_awake: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._generator, self._kept_awake = generator, kept_awake
        self._calls: set[asyncio.Future[list[Generation]]] = set()
        self._is_stopped = False

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer in the next turn."""
        return self._generator.weight_version

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        """Wait for the turn, then generate. ``UserError`` after ``stop``."""
        async with self._kept_awake():
            self._require_going()
            call = asyncio.ensure_future(self._generator.generate(asked, on_response=on_response))
            self._calls.add(call)
            try:
                await asyncio.wait({call})
            finally:
                self._calls.discard(call)
                await cancel([call])
            self._require_going()
            return call.result()

    def stop(self) -> None:
        """Draw nothing any more, so that the student gets its turn: it is to save what it has done."""
        self._is_stopped = True
        for call in self._calls:
            call.cancel()

    def _require_going(self) -> None:
        if self._is_stopped:
            raise UserError("nothing more is drawn: the run ends")
