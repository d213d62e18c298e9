"""Turns on GPUs that student and rollout share: both ends of each call. The order is kept in the producer process,
beside the engines; rank 0 has the student."""

from __future__ import annotations

from typing import Protocol

from mopd.placement.sharing.turns import GpuTurns
from mopd.producer.channel import Channel, Handler


class LendingStudent(Protocol):
    """The student on all its ranks."""

    async def lend(self) -> None:
        """See ``StudentWorker.lend``."""
        ...

    async def restore(self) -> None: ...


class FarTurns:
    """Implements ``StudentTurns`` for rank 0."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def begin(self) -> None:
        """See ``StudentTurns.begin``."""
        await self._channel.call("begin_turn")

    async def end(self) -> None:
        """See ``GpuTurns.end``."""
        await self._channel.call("end_turn")

    async def expect(self) -> None:
        """See ``GpuTurns.expect``."""
        await self._channel.call("expect_turn")


def turn_handlers(turns: GpuTurns) -> dict[str, Handler]:
    """The producer's answers to ``FarTurns``."""

    async def begin() -> None:
        await turns.begin("student")

    async def end() -> None:
        turns.end()

    async def expect() -> None:
        turns.expect("student")

    return {"begin_turn": begin, "end_turn": end, "expect_turn": expect}


class FarMemory:
    """Implements ``MemoryHolder`` for the producer: the student's memory on its ranks. Its deadlines are theirs."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def give_back(self) -> None:
        """See ``MemoryHolder.give_back``."""
        await self._channel.call("lend")

    async def take(self) -> None:
        """See ``MemoryHolder.take``."""
        await self._channel.call("restore")


def memory_handlers(student: LendingStudent) -> dict[str, Handler]:
    """Rank 0's answers to ``FarMemory``."""
    return {"lend": student.lend, "restore": student.restore}
