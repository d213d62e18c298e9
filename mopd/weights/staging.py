"""All parts of an update in memory of one machine, before the engine reads them: they came in messages, over HTTP.

::

    memory:  part 0 | pad | part 1 | pad | …        parts begin at multiples of 16
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mopd.weights.group import GroupOrder, Pending, TransferFailed, TransferGroup
from mopd.weights.memory import SharedMemory, open_memory
from mopd.weights.parts import ALIGN, TensorMeta, cut_parts
from mopd.weights.parts import digest as digest_of

CPU = torch.device("cpu")
PART_BYTES = 2**26 - 2**20 - 2**12
"""Bytes of a part that travels in a message, which has at most 64 MiB with all around it."""


def staged_order(group_id: str = "", *, num_receivers: int = 1, bucket_bytes: int = PART_BYTES) -> GroupOrder:
    """Return the order of an update whose parts come in messages."""
    return GroupOrder(
        group_id=group_id,
        host="",
        port=0,
        num_senders=1,
        num_receivers=num_receivers,
        bucket_bytes=bucket_bytes,
        large_bytes=bucket_bytes,
        timeout_s=0.0,
        secret="",
    )


class LocalGroup(TransferGroup):
    """Group of this process alone: what a sender carries goes to a function, and a receiver waits for nothing."""

    def __init__(self, order: GroupOrder, rank: int, on_carry: Callable[[Tensor], object]) -> None:
        """``on_carry(buffer)`` takes [bytes] uint8 and returns when that is done."""
        self.order, self.rank, self.device, self._on_carry = order, rank, CPU, on_carry
        self._closing, self._flying, self._group = threading.Lock(), set(), None

    def carry(self, buffer: Tensor, sender: int) -> Pending:
        """Do what ``on_carry`` does."""
        self._on_carry(buffer)
        return Pending(self, [], None)

    def tell(self, number: int, *, timeout_s: float | None = None) -> int:
        """Return the number."""
        return number


class Staging:
    """Memory that the parts of one update are collected in, for the workers of one engine."""

    def __init__(self, order: GroupOrder, metas: Sequence[TensorMeta]) -> None:
        """Reserve the memory, which takes seconds for a large model."""
        self._sizes = [part.num_bytes for part in cut_parts(metas, order.bucket_bytes, order.large_bytes)]
        self._memory = SharedMemory(max(1, sum(_room_bytes(self._sizes))), CPU)
        self._rooms = _rooms(self._sizes, self._memory.buffer)
        self.order = replace(order, memory=self._memory.handles(order.num_receivers))
        """Order for the receivers, with the memory's handles."""
        self.num_filled = 0
        """Parts that have come."""

    @property
    def is_complete(self) -> bool:
        """Whether all parts have come."""
        return self.num_filled == len(self._sizes)

    def add(self, index: int, digest: int, data: Tensor) -> None:
        """Keep the next part, [bytes] uint8; ``ValueError`` for one out of turn, of another size or another digest."""
        if index != self.num_filled or self.is_complete:
            raise ValueError(f"part {index} came when {self.num_filled} of {len(self._sizes)} was due")
        if len(data) != self._sizes[index]:
            raise ValueError(f"part {index} has {len(data)} bytes, {self._sizes[index]} were due")
        if int(digest_of(data)) != digest:
            raise ValueError(f"part {index} of {len(self._sizes)} changed on its way")
        self._rooms[index][: len(data)].copy_(data)
        self.num_filled += 1

    def close(self) -> None:
        """Free the memory, once no receiver reads it."""
        self._memory.close()
        self._rooms = []


class StagedParts:
    """Carrier of a receiver whose parts a ``Staging`` of this machine holds, and has compared with their digests. It
    opens the memory for each update, and holds none in between."""

    is_mapped, device = True, CPU

    def __init__(self, order: GroupOrder, rank: int, metas: Sequence[TensorMeta]) -> None:
        self.group = LocalGroup(order, rank, lambda buffer: None)
        self._sizes = [part.num_bytes for part in cut_parts(metas, order.bucket_bytes, order.large_bytes)]
        self._rooms: list[Tensor] = []

    def room(self, number: int, num_bytes: int) -> Tensor:
        """Return the part's bytes in the memory."""
        return self._room(number)[:num_bytes]

    def carry(self, number: int, buffer: Tensor, sender: int) -> Pending:
        """Do nothing: the part is there."""
        return Pending(self.group, [], None)

    def release(self, pending: Pending) -> None:
        """Do nothing: the memory is not filled again."""

    def drop_room(self) -> None:
        """Let go of the memory."""
        self._rooms = []

    def _room(self, number: int) -> Tensor:
        if not self._rooms:
            order = self.group.order
            try:
                self._rooms = _rooms(self._sizes, open_memory(order.memory, self.group.rank - order.num_senders, CPU))
            except ValueError as error:
                raise TransferFailed(str(error)) from error
        return self._rooms[number]


def _room_bytes(sizes: Sequence[int]) -> list[int]:
    return [-(-size // ALIGN) * ALIGN for size in sizes]


def _rooms(sizes: Sequence[int], memory: Tensor) -> list[Tensor]:
    """Return the room of each part."""
    rooms = _room_bytes(sizes)
    if len(memory) < sum(rooms):
        raise ValueError(f"the staged update has {len(memory)} bytes of memory: too few for its parts")
    return list(memory[: sum(rooms)].split(rooms))
