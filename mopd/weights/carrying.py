"""How parts come from a sender to the receivers: over the group (``TravellingParts``), by way of memory that both sides
map (``MappedParts``), or in messages, collected in memory of the receivers' machine before they read it
(``StagedParts``).

Parts in memory that is mapped, of which only signals travel::

    sender          fill 0   fill 1        fill 2       …        two halves of one memory: part i is in half i % 2
    part is there       0        1             2
    receivers               read 0 ─a0    read 1 ─a1    …        a: one has read it; of all, and the half is filled anew

Parts that came in messages::

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
        if not self._rooms:
            order = self.group.order
            try:
                self._rooms = _rooms(self._sizes, open_memory(order.memory, self.group.rank - order.num_senders, CPU))
            except ValueError as error:
                raise TransferFailed(str(error)) from error
        return self._rooms[number][:num_bytes]

    def carry(self, number: int, buffer: Tensor, sender: int) -> Pending:
        """Do nothing: the part is there."""
        return Pending(self.group, [], None)

    def release(self, pending: Pending) -> None:
        """Do nothing: the memory is not filled again."""

    def drop_room(self) -> None:
        """Let go of the memory."""
        self._rooms = []


def _room_bytes(sizes: Sequence[int]) -> list[int]:
    return [-(-size // ALIGN) * ALIGN for size in sizes]


def _rooms(sizes: Sequence[int], memory: Tensor) -> list[Tensor]:
    """Return the room of each part."""
    rooms = _room_bytes(sizes)
    if len(memory) < sum(rooms):
        raise ValueError(f"the staged update has {len(memory)} bytes of memory: too few for its parts")
    return list(memory[: sum(rooms)].split(rooms))


def part_memory_bytes(metas: Sequence[TensorMeta], bucket_bytes: int) -> int:
    """Return the bytes of memory that ``MappedParts`` needs: two buckets."""
    largest = max(part.num_bytes for part in cut_parts(metas, bucket_bytes, bucket_bytes))
    return 2 * (-(-largest // 16) * 16)


class TravellingParts:
    """Parts that travel over the group, from the memory of a tensor into that of its slot where both fit."""

    is_mapped = False

    def __init__(self, group: TransferGroup) -> None:
        self.group = group
        self.device = group.device
        self._halves = [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in range(2)]

    def room(self, number: int, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8 of undefined values for a part that has no memory of its own; those of the part two
        before are overwritten."""
        if len(self._halves[number % 2]) < num_bytes:
            self._halves[number % 2] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._halves[number % 2][:num_bytes]

    def carry(self, number: int, buffer: Tensor, sender: int) -> Pending:
        """Begin to bring a part to the receivers; ``wait`` of it as ``TransferGroup.carry``'s."""
        return self.group.carry(buffer, sender)

    def release(self, pending: Pending) -> None:
        """Say, as a receiver, that a part was read."""
        pending.free()

    def drop_room(self) -> None:
        """Free the memory of ``room`` until the next update."""
        self._halves = [half[:0].clone() for half in self._halves]


class MappedParts:
    """Parts that receivers read in the one sender's memory; only signals travel, on the CPU."""

    is_mapped = True

    def __init__(self, group: TransferGroup, memory: Tensor, device: torch.device) -> None:
        """``memory``: [bytes] uint8 on the model's ``device``, mapped by every member."""
        self.group, self.device, self._memory = group, device, memory

    def room(self, number: int, num_bytes: int) -> Tensor:
        """Return the part's bytes in the memory."""
        start = number % 2 * (len(self._memory) // 2)
        return self._memory[start : start + num_bytes]

    def carry(self, number: int, buffer: Tensor, sender: int) -> Pending:
        """Begin to say that a part is there. ``wait`` of what it returns ends when all have read it, for the sender,
        and for a receiver when it is there."""
        signal = torch.zeros(1, dtype=torch.uint8)
        if self.group.rank >= self.group.order.num_senders:
            return self.group.carry(signal, sender)
        self._settle()
        self.group.carry(signal, sender).wait()
        return self.group.acks()

    def release(self, pending: Pending) -> None:
        """Say, as a receiver, that a part was read."""
        self._settle()  # copies out of the half have ended
        pending.free()
        self.group.send_ack().wait()

    def drop_room(self) -> None:
        """Keep the memory, which is the sender's."""

    def _settle(self) -> None:
        """Wait for the device's queue: another process reads or fills this memory next."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


Parts = TravellingParts | MappedParts | StagedParts


def enter_as_receiver(
    order: GroupOrder, rank: int, metas: Sequence[TensorMeta], device: torch.device, given_up: threading.Event | None
) -> Parts:
    """Join the group; blocks until it has met.

    Raises:
        ValueError: the sender's memory cannot be opened, or is smaller than two buckets of ``metas``.
        TransferFailed: not all came.
    """
    if order.is_staged:
        return StagedParts(order, rank, metas)
    if not order.memory:
        return TravellingParts(TransferGroup(order, rank, given_up=given_up, device=device))
    memory = open_memory(order.memory, rank - order.num_senders, device)
    if len(memory) < part_memory_bytes(metas, order.bucket_bytes):
        raise ValueError(f"the sender's memory has {len(memory)} bytes: too few for two buckets")
    return MappedParts(TransferGroup(order, rank, given_up=given_up), memory, device)
