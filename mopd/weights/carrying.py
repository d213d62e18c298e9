"""How parts come from a sender to the receivers: over the group, or by way of memory that both sides map.

Parts in memory that is mapped (``MappedParts``), of which only signals travel::

    sender          fill 0   fill 1        fill 2       …        two halves of one memory: part i is in half i % 2
    part is there       0        1             2
    receivers               read 0 ─a0    read 1 ─a1    …        a: one has read it; of all, and the half is filled anew
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from mopd.weights.group import GroupOrder, Pending, TransferGroup
from mopd.weights.memory import open_memory
from mopd.weights.parts import TensorMeta, cut_parts
from mopd.weights.staging import StagedParts


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
