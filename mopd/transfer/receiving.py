"""One receiving process: a member of a group that turns buckets into tensors again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mopd.transfer.buckets import Bucket, TensorMeta, cut
from mopd.transfer.group import GroupOrder, Pending, TransferFailed, TransferGroup


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


class Receiver:
    """Two buckets of memory: one that is read while the next arrives."""

    def __init__(self, order: GroupOrder, rank: int, metas: Sequence[TensorMeta], *, keeps_views: bool) -> None:
        """Blocks until the group has met; raises as ``TransferGroup``. ``keeps_views``: whoever reads may hold tensors
        beyond their bucket, so that each gets memory of its own."""
        self._buckets = cut(metas, order.bucket_bytes)
        self._group = TransferGroup(order, rank)
        self._keeps_views = keeps_views
        self._memory: list[Tensor] = []
        self.wait_s = 0.0
        """Of the last ``tensors``: seconds in which nothing had arrived."""

    def close(self) -> None:
        """Leave the group; a ``tensors`` that waits in another thread fails."""
        self._group.close()

    def tensors(self, *, verify: bool, patience_s: float) -> Iterator[tuple[str, Tensor]]:
        """What rank 0 sends, once, in its order; the first bucket may take ``patience_s``. A tensor is good until the
        next one is asked for, or, with ``keeps_views``, for ever.

        Raises:
            TransferFailed: a peer was lost or silent, or with ``verify`` a bucket is not as it was sent. The group is
                closed, and what was yielded before is part of nothing whole.
        """
        self.wait_s = 0.0
        try:
            yield from self._tensors(verify, patience_s)
        except BaseException:
            self.close()  # also when the reader fails
            raise
        finally:
            self._memory.clear()

    def _tensors(self, verify: bool, patience_s: float) -> Iterator[tuple[str, Tensor]]:
        flying = self._post(0, patience_s)
        for i, bucket in enumerate(self._buckets):
            assert flying is not None
            buffer, pending = flying
            before = time.perf_counter()
            pending.wait()
            self.wait_s += time.perf_counter() - before
            flying = self._post(i + 1)
            if verify and not bucket.is_intact(buffer):
                raise TransferFailed(f"bucket {i} of {len(self._buckets)} changed on its way")
            yield from bucket.views(buffer)

    def _post(self, number: int, timeout_s: float | None = None) -> tuple[Tensor, Pending] | None:
        if number == len(self._buckets):
            return None
        buffer = self._room(number, self._buckets[number])
        return buffer, self._group.broadcast(buffer, timeout_s=timeout_s)

    def _room(self, number: int, bucket: Bucket) -> Tensor:
        if self._keeps_views:
            return torch.empty(bucket.num_bytes, dtype=torch.uint8)
        if not self._memory:
            largest = max(bucket.num_bytes for bucket in self._buckets)
            self._memory = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]
        return self._memory[number % 2][: bucket.num_bytes]
