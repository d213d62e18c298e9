"""One receiving process: a member of a group, into whose memory tensors come."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mopd.transfer.buckets import Bucket, TensorMeta
from mopd.transfer.group import GroupOrder, Pending, TransferFailed, TransferGroup
from mopd.transfer.pieces import Expected, Part, Ring, Segment, cut_pieces


def check_fit(metas: Sequence[TensorMeta], slots: Mapping[str, Tensor], *, name: str) -> None:
    """``ValueError`` unless these are exactly the weights of ``slots``, in their shapes; ``name`` is the model's."""
    waiting = set(slots)
    for meta in metas:
        if meta.name not in waiting:
            fault = "arrives twice for" if meta.name in slots else "does not exist in"
            raise ValueError(f"weight {meta.name!r} {fault} {name}")
        slot = slots[meta.name]
        if meta.shape != tuple(slot.shape):
            raise ValueError(f"weight {meta.name!r} has shape {list(meta.shape)}, {name} needs {list(slot.shape)}")
        if meta.dtype.is_floating_point != slot.dtype.is_floating_point:
            raise ValueError(f"weight {meta.name!r} has dtype {str(meta.dtype)[6:]}, {name} needs another kind")
        waiting.remove(meta.name)
    if waiting:
        raise ValueError(f"{len(waiting)} weights of {name} are not announced, among them {min(waiting)!r}")


class Receiver(ABC):
    """One model's way to what a group sends."""

    @property
    @abstractmethod
    def num_skipped(self) -> int:
        """Tensors that did not come in the last update: no step changes them."""

    @property
    @abstractmethod
    def wait_s(self) -> float:
        """Of the last ``tensors``: seconds in which nothing had arrived."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group; a ``tensors`` that waits in another thread fails."""

    @abstractmethod
    def tensors(self, *, verify: bool, patience_s: float) -> Iterator[tuple[str, Tensor]]:
        """What the sender sends, once, in its order, but for what was written to its slot; its first word may take
        ``patience_s``. A tensor is good until the next one is asked for, or, with ``keeps_views``, for ever.

        Raises:
            TransferFailed: a peer was lost or silent, or with ``verify`` something is not as it was sent. The group is
                closed, and what was yielded before, or written, is part of nothing whole.
        """


class GroupReceiver(Receiver):
    """Of one sender."""

    def __init__(
        self,
        expected: Expected,
        group: TransferGroup,
        *,
        keeps_views: bool,
        slots: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """``keeps_views``: whoever reads may hold tensors beyond their bucket, so that each gets memory of its own.
        ``slots``: what arrives under these names may be written there. ``device`` of the model."""
        self._expected, self._group = expected, group
        self._keeps_views, self._slots, self._device = keeps_views, slots, device
        self._whole: dict[str, Tensor] = {}
        """Large tensors that arrive and have no slot."""
        self._wait_s = 0.0

    @property
    def num_skipped(self) -> int:
        """See ``Receiver``."""
        return self._expected.num_skipped

    @property
    def wait_s(self) -> float:
        """See ``Receiver``."""
        return self._wait_s

    def close(self) -> None:
        """See ``Receiver``."""
        self._group.close()

    def tensors(self, *, verify: bool, patience_s: float) -> Iterator[tuple[str, Tensor]]:
        """See ``Receiver``."""
        before = time.perf_counter()
        try:
            self._expected.skip(self._group.tell(0, timeout_s=patience_s))
            self._wait_s = time.perf_counter() - before
            yield from self._arriving(verify)
        except BaseException:
            self._group.settle()  # also when the reader fails; and what comes late shall not be written into a slot
            raise
        finally:
            self._whole.clear()
        self._expected.has_all = True

    @abstractmethod
    def _arriving(self, verify: bool) -> Iterator[tuple[str, Tensor]]:
        """``tensors``, once it is known which."""

    def _wait(self, pending: Pending) -> None:
        before = time.perf_counter()
        pending.wait()
        self._wait_s += time.perf_counter() - before

    def _target(self, piece: Segment) -> Tensor:
        """The whole tensor that it is a piece of: its slot, or memory until it is whole."""
        meta = piece.meta
        slot = self._slots.get(meta.name)
        if slot is not None:
            return slot
        if piece.first == 0:
            self._whole[meta.name] = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
        return self._whole[meta.name]

    def _completed(self, piece: Segment) -> Iterator[tuple[str, Tensor]]:
        """What is whole with this piece, and has no slot."""
        if piece.is_last and piece.meta.name in self._whole:
            yield piece.meta.name, self._whole.pop(piece.meta.name)


class BroadcastReceiver(GroupReceiver):
    """Holds two buckets of memory at most: one that is read while the next arrives."""

    def __init__(
        self,
        order: GroupOrder,
        rank: int,
        metas: Sequence[TensorMeta],
        *,
        keeps_views: bool,
        slots: Mapping[str, Tensor],
        device: torch.device,
        given_up: threading.Event | None = None,
    ) -> None:
        """Blocks until the group has met; raises as ``TransferGroup``."""
        expected = Expected(metas, lambda announced: cut_pieces(announced, order.bucket_bytes))
        group = TransferGroup(order, rank, given_up=given_up, device=device)
        flat = {name: slot for name, slot in slots.items() if slot.is_contiguous()}
        super().__init__(expected, group, keeps_views=keeps_views, slots=flat, device=group.device)
        self._ring = Ring(group.device)

    def _arriving(self, verify: bool) -> Iterator[tuple[str, Tensor]]:
        digests = []
        try:
            for part, buffer in self._arrivals():
                if verify:
                    digests.append(part.digest(buffer))
                if isinstance(part, Bucket):
                    yield from part.views(buffer)
                else:
                    yield from self._put(part, buffer)
            if digests:
                self._compare(torch.stack(digests))
        finally:
            self._ring = Ring(self._group.device)

    def _compare(self, digests: Tensor) -> None:
        sums = torch.zeros_like(digests)
        self._wait(self._group.broadcast(sums))
        for i, same in enumerate((sums == digests).tolist()):
            if not same:
                raise TransferFailed(f"part {i} of {len(digests)} changed on its way")

    def _arrivals(self) -> Iterator[tuple[Part, Tensor]]:
        """Each part with its bytes, while the next one travels."""
        flying, parts = deque[tuple[Tensor, Pending]](), self._expected.parts
        for i, part in enumerate(parts):
            for number in range(i + len(flying), min(i + (2 if i else 1), len(parts))):
                buffer = self._room(number, parts[number])
                flying.append((buffer, self._group.broadcast(buffer)))
            buffer, pending = flying.popleft()
            self._wait(pending)
            yield part, buffer

    def _room(self, number: int, part: Part) -> Tensor:
        """[bytes] where it is to arrive."""
        if isinstance(part, Bucket):
            if self._keeps_views:
                return torch.empty(part.num_bytes, dtype=torch.uint8, device=self._group.device)
            return self._ring.room(number, part.num_bytes)
        target = self._target(part)
        if not part.is_as_it_travels(target, self._group.device):
            return self._ring.room(number, part.num_bytes)
        return part.of(target).view(torch.uint8)

    def _put(self, piece: Segment, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What arrived in the ring into its slot; what has none is yielded when it is whole."""
        slot = self._slots.get(piece.meta.name)
        if slot is not None and not piece.is_as_it_travels(slot, self._group.device):
            piece.of(slot).copy_(buffer.view(piece.meta.dtype))
        yield from self._completed(piece)
