"""Buckets that receivers read in the sender's memory: over the group only signals travel.

::

    rank 0          fill 0   fill 1        fill 2       …           two halves of one memory: bucket i is in half i % 2
    bucket is there     b0       b1            b2                   broadcasts of its number and digest
    receivers                read 0 ─a0   read 1 ─a1    …           a: all have read it; rank 0 fills the half anew

All members call b0, a0, b1, a1, … in this order, and wait for a(i - 2) before bucket i. A member that fails closes its
group, and the others learn it at once: no signal of a receiver is in progress that would have to end first. A dead or
silent member costs the others what it costs in ``TransferGroup``: the signals are that group's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mopd.weights.buckets import Bucket, TensorMeta
from mopd.weights.group import GroupOrder, Pending, TransferFailed, TransferGroup
from mopd.weights.memory import SharedMemory, open_memory
from mopd.weights.pieces import Part, cut_pieces
from mopd.weights.receiving import BroadcastReceiver, GroupReceiver
from mopd.weights.sending import Sent, fill, next_tensor, require_finite, to_the_end
from mopd.weights.stages import StagesReceiver


def mapped_bytes(metas: Sequence[TensorMeta], bucket_bytes: int) -> int:
    """Return the bytes of memory that ``send_mapped`` needs: two buckets."""
    return 2 * (-(-max(part.num_bytes for part in _parts(metas, bucket_bytes)) // 16) * 16)


def send_mapped(
    group: TransferGroup,
    memory: SharedMemory,
    metas: Sequence[TensorMeta],
    weights: Iterable[tuple[str, Tensor]],
    *,
    bucket_bytes: int,
    verify: bool,
    checks_values: bool = True,
    num_skipped: int = 0,
    on_bucket: Callable[[int], None] = lambda number: None,
) -> Sent:
    """Send as ``mopd.weights.sending.send``, to ``MappedReceiver``s that have opened ``memory``."""
    parts = _parts(metas[num_skipped:], bucket_bytes)
    gather_s = send_s = 0.0
    with to_the_end(group, weights) as stream:
        # the first word: the number of tensors at the beginning that do not come
        group.tell(num_skipped)
        filler = _Filler(stream, is_checked=verify or checks_values)
        reading = deque[Pending]()
        for i, part in enumerate(parts):
            began = time.perf_counter()
            if len(reading) == 2:
                reading.popleft().wait()  # a(i - 2)
            free = time.perf_counter()
            buffer = _half(memory.buffer, i, part)
            filler.fill(part, buffer)
            digest = int(part.digest(buffer)) if verify else 0
            _settle(memory.device)
            gather_s, send_s = gather_s + time.perf_counter() - free, send_s + free - began
            on_bucket(i)
            group.broadcast(torch.tensor([i, digest])).wait()
            reading.append(group.all_reached())
        began = time.perf_counter()
        for pending in reading:
            pending.wait()
        send_s += time.perf_counter() - began
    return Sent(num_bytes=sum(part.num_bytes for part in parts), gather_s=gather_s, send_s=send_s)


class _Filler:
    """Copies a stream's tensors into parts, one after another."""

    def __init__(self, stream: Iterator[tuple[str, Tensor]], *, is_checked: bool) -> None:
        self._stream, self._is_checked = stream, is_checked
        self._tensor = torch.empty(0)
        """Tensor of the last segment."""

    def fill(self, part: Part, buffer: Tensor) -> None:
        """Fill ``buffer`` with a part. Raises as ``send``."""
        if isinstance(part, Bucket):
            fill(part, buffer, self._stream, self._is_checked)
            return
        if part.first == 0:
            self._tensor = next_tensor(self._stream, part.meta).contiguous()
        values = buffer.view(part.meta.dtype).copy_(part.of(self._tensor))
        if self._is_checked:
            require_finite(part.meta.name, values)


class MappedReceiver(GroupReceiver):
    """Receiver that reads buckets in the sender's memory and has none of its own for them."""

    travels = False

    def __init__(
        self, order: GroupOrder, rank: int, metas: Sequence[TensorMeta], *, device: torch.device, **options: Any
    ) -> None:
        """Open the sender's memory and join, with the ``options`` of ``GroupReceiver``. Raises as it does;
        ``ValueError`` if the memory cannot be opened."""
        self._memory = open_memory(order.memory, rank - 1, device)
        if len(self._memory) < mapped_bytes(metas, order.bucket_bytes):
            raise ValueError(f"the sender's memory has {len(self._memory)} bytes: too few for two buckets")
        super().__init__(order, rank, metas, device=device, **options)

    def _cut(self, metas: Sequence[TensorMeta], bucket_bytes: int) -> list[Part]:
        return _parts(metas, bucket_bytes)

    def _arriving(self, verify: bool) -> Iterator[tuple[str, Tensor]]:
        reading = deque[Pending]()
        parts = self._expected.parts
        for i, part in enumerate(parts):
            number, digest = self._hear()
            if number != i:
                raise TransferFailed(f"part {number} came in the place of {i}")
            buffer = _half(self._memory, i, part)
            if verify and int(part.digest(buffer)) != digest:
                raise TransferFailed(f"part {i} of {len(parts)} is not as it was sent")
            yield from self._give(part, buffer)
            _settle(self._device)  # copies out of the half have ended
            reading.append(self._group.all_reached())
            if len(reading) == 2:
                reading.popleft().wait()  # a(i - 1): rank 0 waits for it before part i + 1
        for pending in reading:
            pending.wait()

    def _give(self, part: Part, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        if isinstance(part, Bucket):
            for name, tensor in part.views(buffer):
                yield name, tensor.clone() if self._keeps_views else tensor
            return
        part.of(self._target(part)).copy_(buffer.view(part.meta.dtype))
        yield from self._completed(part)

    def _hear(self) -> tuple[int, int]:
        """Return number and digest of the next part."""
        said = torch.tensor([-1, 0])
        self._wait(self._group.broadcast(said))
        number, digest = said.tolist()
        return number, digest


Receiver = GroupReceiver | StagesReceiver


def open_receiver(
    order: GroupOrder,
    rank: int,
    metas: Sequence[TensorMeta],
    *,
    keeps_views: bool,
    slots: Mapping[str, Tensor] | None = None,
    device: torch.device | None = None,
    given_up: threading.Event | None = None,
) -> Receiver:
    """Open the kind of receiver that fits the order. Blocks until its group has met; raises as ``TransferGroup``, and
    ``ValueError`` for memory that cannot be opened.

    Args:
        order: rank 0's.
        rank: of this process in the group.
        metas: the announced tensors.
        keeps_views: as in ``GroupReceiver``, like ``slots`` (default: none).
        device: of the model (default: the CPU).
        given_up: ends the wait for the other members.
    """
    options: dict[str, Any] = {
        "keeps_views": keeps_views,
        "slots": slots or {},
        "device": device or torch.device("cpu"),
        "given_up": given_up,
    }
    if order.shares:
        return StagesReceiver(order, metas, lambda one, share: BroadcastReceiver(one, rank, share, **options))
    make = MappedReceiver if order.memory else BroadcastReceiver
    return make(order, rank, metas, **options)


def _parts(metas: Sequence[TensorMeta], bucket_bytes: int) -> list[Part]:
    """Return buckets, and segments of tensors larger than one."""
    return cut_pieces(metas, bucket_bytes, large_bytes=bucket_bytes)


def _half(memory: Tensor, number: int, part: Part) -> Tensor:
    start = number % 2 * (len(memory) // 2)
    return memory[start : start + part.num_bytes]


def _settle(device: torch.device) -> None:
    """Wait for the device's queue: another process reads or fills this memory next."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
