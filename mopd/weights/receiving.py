"""Receiving side of a transfer group: a member into whose memory tensors arrive."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor

from mopd.weights.buckets import Bucket, TensorMeta
from mopd.weights.group import GivenUp, GroupOrder, Pending, TransferFailed, TransferGroup
from mopd.weights.pieces import Expected, Part, Ring, Segment, cut_pieces


class Fit:
    """Checks, one by one as they come, that tensors are the weights of a model, each once."""

    def __init__(self, slots: Mapping[str, Tensor], *, name: str, kept: Set[str] = frozenset()) -> None:
        """Start with the model's weights and its name, for messages. ``kept`` weights stay as they are and must not
        come."""
        self._slots, self._kept, self._name = slots, kept, name
        self.missing: set[str] = slots.keys() - kept
        """Names of weights that have not come."""

    def take(self, weight: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Raise ``ValueError`` for a tensor that is no weight of the model, has come, or has another shape or dtype."""
        if weight not in self.missing:
            fault = "arrives twice for" if weight in self._slots else "does not exist in"
            fault = "arrives though it is a constant kept in" if weight in self._kept else fault
            raise ValueError(f"weight {weight!r} {fault} {self._name}")
        slot = self._slots[weight]
        if tuple(shape) != tuple(slot.shape):
            raise ValueError(f"weight {weight!r} has shape {list(shape)}, {self._name} needs {list(slot.shape)}")
        if dtype.is_floating_point != slot.dtype.is_floating_point:
            raise ValueError(f"weight {weight!r} has dtype {str(dtype)[6:]}, {self._name} needs another kind")
        self.missing.remove(weight)


def check_fit(metas: Sequence[TensorMeta], slots: Mapping[str, Tensor], *, name: str) -> None:
    """Raise ``ValueError`` unless ``metas`` are the weights of ``slots`` in their shapes; ``name``: the model's."""
    fit = Fit(slots, name=name)
    for meta in metas:
        fit.take(meta.name, meta.dtype, meta.shape)
    if fit.missing:
        raise ValueError(f"{len(fit.missing)} weights of {name} are not announced, among them {min(fit.missing)!r}")


class GroupReceiver(ABC):
    """Receives one model's tensors from one sender: a member of its group."""

    travels = True
    """Whether values travel over the group, on the model's device. Otherwise only signals do, on the CPU."""

    def __init__(
        self,
        order: GroupOrder,
        rank: int,
        metas: Sequence[TensorMeta],
        *,
        keeps_views: bool,
        slots: Mapping[str, Tensor],
        device: torch.device,
        given_up: GivenUp | None = None,
    ) -> None:
        """Join the group and block until it has met; raises as ``TransferGroup``.

        Args:
            keeps_views: the reader may hold tensors beyond their bucket, so that each gets memory of its own.
            slots: contiguous tensors of these names may be written there.
            device: of the model.
        """
        self._expected = Expected(metas, lambda announced: self._cut(announced, order.bucket_bytes))
        self._keeps_views, self._device = keeps_views, device
        self._slots = {name: slot for name, slot in slots.items() if slot.is_contiguous()}
        self._whole: dict[str, Tensor] = {}
        """Large tensors that are arriving and have no slot."""
        self.wait_s = 0.0
        """Seconds of the last ``tensors`` in which nothing had arrived."""
        self._group = TransferGroup(order, rank, given_up=given_up, device=device if self.travels else None)

    @property
    def num_skipped(self) -> int:
        """Tensors that the last update left out, since no step changes them."""
        return self._expected.num_skipped

    def close(self) -> None:
        """Leave the group; a ``tensors`` that waits in another thread fails."""
        self._group.close()

    def tensors(self, *, verify: bool, patience_s: float) -> Iterator[tuple[str, Tensor]]:
        """Yield once, in the sender's order, the tensors that arrive, except those written to their slots. The first
        word of the sender may take ``patience_s`` seconds. A tensor is valid until the next one is requested; with
        ``keeps_views`` for ever.

        Raises:
            TransferFailed: a peer was lost or silent, or with ``verify`` something is not as it was sent. The group is
                closed; what was yielded or written before is part of an incomplete update.
        """
        before = time.perf_counter()
        try:
            self._expected.skip(self._group.tell(0, timeout_s=patience_s))
            self.wait_s = time.perf_counter() - before
            yield from self._arriving(verify)
        except BaseException:
            self._group.settle()  # also if the reader fails: nothing late may be written into a slot
            raise
        finally:
            self._whole.clear()
        self._expected.has_all = True

    @abstractmethod
    def _cut(self, metas: Sequence[TensorMeta], bucket_bytes: int) -> list[Part]:
        """Return the parts in which tensors arrive."""

    @abstractmethod
    def _arriving(self, verify: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the expected tensors, once their number is known."""

    def _wait(self, pending: Pending) -> None:
        before = time.perf_counter()
        pending.wait()
        self.wait_s += time.perf_counter() - before

    def _target(self, piece: Segment) -> Tensor:
        """Return the whole tensor that ``piece`` belongs to: its slot, or memory until it is complete."""
        meta = piece.meta
        slot = self._slots.get(meta.name)
        if slot is not None:
            return slot
        if piece.first == 0:
            self._whole[meta.name] = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
        return self._whole[meta.name]

    def _completed(self, piece: Segment) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensor that is complete with this piece and has no slot."""
        if piece.is_last and piece.meta.name in self._whole:
            yield piece.meta.name, self._whole.pop(piece.meta.name)


class BroadcastReceiver(GroupReceiver):
    """Receiver of broadcasts. Holds at most two buckets of memory: one is read while the next arrives."""

    def _cut(self, metas: Sequence[TensorMeta], bucket_bytes: int) -> list[Part]:
        return cut_pieces(metas, bucket_bytes)

    def _arriving(self, verify: bool) -> Iterator[tuple[str, Tensor]]:
        self._ring = Ring(self._device)
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
            del self._ring

    def _compare(self, digests: Tensor) -> None:
        # all digests in one broadcast at the end: no part waits for its own
        sums = torch.zeros_like(digests)
        self._wait(self._group.broadcast(sums))
        for i, same in enumerate((sums == digests).tolist()):
            if not same:
                raise TransferFailed(f"part {i} of {len(digests)} changed on its way")

    def _arrivals(self) -> Iterator[tuple[Part, Tensor]]:
        """Yield each part with its bytes, while the next one travels."""
        flying, parts = deque[tuple[Tensor, Pending]](), self._expected.parts
        for i, part in enumerate(parts):
            # the first part alone, then always one ahead: two parts have memory in the ring
            for number in range(i + len(flying), min(i + (2 if i else 1), len(parts))):
                buffer = self._room(number, parts[number])
                flying.append((buffer, self._group.broadcast(buffer)))
            buffer, pending = flying.popleft()
            self._wait(pending)
            yield part, buffer

    def _room(self, number: int, part: Part) -> Tensor:
        """Return [bytes] uint8 where the part is to arrive."""
        if isinstance(part, Bucket):
            if self._keeps_views:
                return torch.empty(part.num_bytes, dtype=torch.uint8, device=self._device)
            return self._ring.room(number, part.num_bytes)
        target = self._target(part)
        if not part.is_as_it_travels(target, self._device):
            return self._ring.room(number, part.num_bytes)
        return part.of(target).view(torch.uint8)

    def _put(self, piece: Segment, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Copy a piece from the ring into its slot; yield a tensor without a slot when it is complete."""
        slot = self._slots.get(piece.meta.name)
        if slot is not None and not piece.is_as_it_travels(slot, self._device):
            piece.of(slot).copy_(buffer.view(piece.meta.dtype))
        yield from self._completed(piece)
