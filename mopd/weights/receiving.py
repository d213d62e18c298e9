"""Receiving side of a transfer group: a member into whose memory tensors arrive."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mopd.weights.carrying import enter_as_receiver
from mopd.weights.group import GroupOrder, Pending, TransferFailed
from mopd.weights.parts import Bucket, Part, Segment, TensorMeta, cut_parts, digest


def check_fit(metas: Sequence[TensorMeta], slots: Mapping[str, Tensor], *, name: str) -> None:
    """Raise ``ValueError`` unless ``metas`` are the weights of ``slots``, each once, in their shapes and kinds of
    dtype; ``name``: the model's."""
    missing = set(slots)
    for meta in metas:
        if meta.name not in missing:
            fault = "arrives twice for" if meta.name in slots else "does not exist in"
            raise ValueError(f"weight {meta.name!r} {fault} {name}")
        slot = slots[meta.name]
        if meta.shape != tuple(slot.shape):
            raise ValueError(f"weight {meta.name!r} has shape {list(meta.shape)}, {name} needs {list(slot.shape)}")
        if meta.dtype.is_floating_point != slot.dtype.is_floating_point:
            raise ValueError(f"weight {meta.name!r} has dtype {str(meta.dtype)[6:]}, {name} needs another kind")
        missing.remove(meta.name)
    if missing:
        raise ValueError(f"{len(missing)} weights of {name} are missing, among them {min(missing)!r}")


class Receiver:
    """Member of a group into whose memory a model's tensors arrive. Holds at most two buckets: one is read while the
    next arrives."""

    def __init__(
        self,
        order: GroupOrder,
        rank: int,
        metas: Sequence[TensorMeta],
        *,
        keeps_views: bool,
        slots: Mapping[str, Tensor] | None = None,
        device: torch.device | None = None,
        given_up: threading.Event | None = None,
    ) -> None:
        """Join the group and block until it has met.

        Args:
            order: of the orchestrator.
            rank: of this process in the group.
            metas: the announced tensors.
            keeps_views: the reader may hold tensors beyond their bucket, so that each gets memory of its own.
            slots: contiguous tensors of these names may be written there (default: none).
            device: of the model (default: the CPU).
            given_up: ends the wait for the other members.

        Raises:
            TransferFailed: not all came.
            ValueError: a tensor is of no sender, or the sender's memory cannot be opened.
        """
        if any(meta.sender >= order.num_senders for meta in metas):
            raise ValueError(f"a weight comes from a sender beyond the {order.num_senders} of the group")
        self._metas, self._keeps_views, self._device = metas, keeps_views, device or torch.device("cpu")
        self._slots = {name: slot for name, slot in (slots or {}).items() if slot.is_contiguous()}
        self._whole: dict[str, Tensor] = {}
        """Large tensors that are arriving and have no slot."""
        self.wait_s = 0.0
        """Seconds of the last ``tensors`` in which nothing had arrived."""
        self.num_skipped = 0
        """Tensors that the last update left out, since no step changes them."""
        self._has_all = False
        """Whether a whole update has arrived."""
        self._carrier = enter_as_receiver(order, rank, metas, self._device, given_up)

    def close(self) -> None:
        """Leave the group; a ``tensors`` that waits in another thread fails."""
        self._carrier.group.close()

    def tensors(self, *, verify: bool, patience_s: float) -> Iterator[tuple[str, Tensor]]:
        """Yield once, in the senders' order, the tensors that arrive, except those written to their slots. The first
        word of the sender may take ``patience_s`` seconds. A tensor is valid until the next one is requested; with
        ``keeps_views`` for ever.

        Raises:
            TransferFailed: a member was lost or silent, or with ``verify`` something is not as it was sent. The group
                is closed; what was yielded or written before is part of an incomplete update.
        """
        group, before = self._carrier.group, time.perf_counter()
        try:
            self._skip(group.tell(0, timeout_s=patience_s))
            self.wait_s = time.perf_counter() - before
            order = group.order
            parts = cut_parts(self._metas[self.num_skipped :], order.bucket_bytes, order.large_bytes)
            digests = []
            for part, buffer in self._arrivals(parts):
                if verify:
                    digests.append(digest(buffer))
                yield from self._take(part, buffer)
            if verify:
                self._compare(parts, digests)
        except BaseException:
            group.settle()  # also if the reader fails: nothing late may be written into a slot
            raise
        finally:
            self._whole.clear()
            self._carrier.drop_room()
        self._has_all = True

    def _skip(self, count: int) -> None:
        """Expect no values of the first ``count`` tensors."""
        if not 0 <= count < len(self._metas) or (count and not self._has_all):
            raise TransferFailed(f"{count} of {len(self._metas)} weights are left out, which never came")
        self.num_skipped = count

    def _arrivals(self, parts: Sequence[Part]) -> Iterator[tuple[Part, Tensor]]:
        """Yield each part with its bytes, while the next one travels."""
        flying = deque[tuple[Tensor, Pending]]()
        for i, part in enumerate(parts):
            for number in range(i + len(flying), min(i + 2, len(parts))):
                buffer = self._room(number, parts[number])
                flying.append((buffer, self._carrier.carry(number, buffer, parts[number].sender)))
            buffer, pending = flying.popleft()
            before = time.perf_counter()
            pending.wait()
            self.wait_s += time.perf_counter() - before
            yield part, buffer
            self._carrier.release(pending)

    def _compare(self, parts: Sequence[Part], digests: Sequence[Tensor]) -> None:
        """Compare what arrived with each sender's own digests."""
        group = self._carrier.group
        for sender, count in Counter(part.sender for part in parts).items():
            sums = torch.zeros(count, dtype=torch.int64, device=group.device)
            pending = group.carry(sums.view(torch.uint8), sender)
            pending.wait()
            pending.free()
            own = [number for number, part in enumerate(parts) if part.sender == sender]
            for number, same in zip(own, sums.tolist(), strict=True):
                if int(digests[number]) != same:
                    raise TransferFailed(f"part {number} of {len(parts)} changed on its way")

    def _room(self, number: int, part: Part) -> Tensor:
        """Return [bytes] uint8 where the part is to arrive."""
        if self._carrier.is_mapped:
            return self._carrier.room(number, part.num_bytes)
        if isinstance(part, Bucket):
            if self._keeps_views:
                return torch.empty(part.num_bytes, dtype=torch.uint8, device=self._device)
            return self._carrier.room(number, part.num_bytes)
        target = self._target(part)
        if not part.is_as_it_travels(target, self._device):
            return self._carrier.room(number, part.num_bytes)
        return part.of(target).view(torch.uint8)

    def _take(self, part: Part, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what is complete with this part, and has no slot."""
        if isinstance(part, Bucket):
            copies = self._keeps_views and self._carrier.is_mapped
            for name, tensor in part.views(buffer):
                yield name, tensor.clone() if copies else tensor
            return
        target, meta = self._target(part), part.meta
        if self._carrier.is_mapped or not part.is_as_it_travels(target, self._device):
            part.of(target).copy_(buffer.view(meta.dtype))
        if part.is_last and meta.name in self._whole:
            yield meta.name, self._whole.pop(meta.name)

    def _target(self, piece: Segment) -> Tensor:
        """Return the whole tensor that ``piece`` belongs to: its slot, or memory until it is complete."""
        meta = piece.meta
        slot = self._slots.get(meta.name)
        if slot is not None:
            return slot
        if meta.name not in self._whole:
            self._whole[meta.name] = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
        return self._whole[meta.name]
