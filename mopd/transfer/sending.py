"""Rank 0 of a group: a stream of tensors into buckets, one gathered while the one before it travels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd.transfer.buckets import Bucket, TensorMeta, cut
from mopd.transfer.group import Pending, TransferGroup
from mopd.types import NonFiniteError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What sending took."""

    num_bytes: int
    """To each receiver."""
    gather_s: float
    """Seconds until the tensors were there and in their buckets."""
    send_s: float
    """Seconds beyond in which the sender waited for a bucket to arrive."""


def send(
    group: TransferGroup,
    metas: Sequence[TensorMeta],
    weights: Iterable[tuple[str, Tensor]],
    *,
    bucket_bytes: int,
    verify: bool,
    on_bucket: Callable[[int], None] = lambda number: None,
) -> Sent:
    """Read the stream to its end, whatever happens: ranks that gather together stay in step.

    ``on_bucket(number)`` hears of each bucket before it leaves. Holds two buckets.

    Raises:
        TransferFailed: a receiver was lost or silent. The group is closed.
        NonFiniteError: a value is NaN or infinite in the dtype of its ``metas``; receivers have a part of the weights.
        RuntimeError: the stream is not that of ``metas``.
    """
    stream = iter(weights)
    try:
        sent = _send(group, cut(metas, bucket_bytes), stream, verify, on_bucket)
        if next(stream, None) is not None:
            raise RuntimeError("the stream has more weights than were announced")
        return sent
    except BaseException:
        group.close()
        raise
    finally:
        for _ in stream:
            pass


def _send(
    group: TransferGroup,
    buckets: Sequence[Bucket],
    stream: Iterator[tuple[str, Tensor]],
    verify: bool,
    on_bucket: Callable[[int], None],
) -> Sent:
    largest = max(bucket.num_bytes for bucket in buckets)
    memory = [torch.zeros(largest, dtype=torch.uint8) for _ in range(2)]
    flying: Pending | None = None
    gather_s = send_s = 0.0
    for i, bucket in enumerate(buckets):
        began = time.perf_counter()
        buffer = memory[i % 2][: bucket.num_bytes]
        _fill(bucket, buffer, stream)
        if verify:
            bucket.seal(buffer)
        filled = time.perf_counter()
        if flying is not None:
            flying.wait()
        gather_s, send_s = gather_s + filled - began, send_s + time.perf_counter() - filled
        on_bucket(i)
        flying = group.broadcast(buffer)
    before = time.perf_counter()
    if flying is not None:
        flying.wait()
    send_s += time.perf_counter() - before
    return Sent(num_bytes=sum(bucket.num_bytes for bucket in buckets), gather_s=gather_s, send_s=send_s)


def _fill(bucket: Bucket, buffer: Tensor, stream: Iterator[tuple[str, Tensor]]) -> None:
    for name, room in bucket.views(buffer):
        given, tensor = next(stream, ("", room))
        if given != name or tensor.shape != room.shape:
            raise RuntimeError(f"the stream has {given!r} of shape {list(tensor.shape)} where {name!r} was announced")
        room.copy_(tensor)
        if room.is_floating_point() and room.numel():
            bounds = torch.aminmax(room)  # NaN is both
            if not all(bound.isfinite() for bound in bounds):
                raise NonFiniteError(
                    f"weight {name!r} of the student has values that are NaN or infinite in {str(room.dtype)[6:]}: the "
                    "rollout does not get them; go back to a checkpoint before the damage and lower the learning rate"
                )
