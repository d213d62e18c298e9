"""Rank 0 of a group: sends a stream of tensors to all others, gathering one part while the one before it travels."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd.base.types import NonFiniteError
from mopd.weights.buckets import Bucket, TensorMeta
from mopd.weights.group import Pending, TransferGroup
from mopd.weights.pieces import Part, Ring, Segment, cut_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Size and durations of one sending."""

    num_bytes: int
    """Bytes to each receiver."""
    gather_s: float
    """Seconds until the tensors were there and, if needed, copied into their buckets."""
    send_s: float
    """Further seconds in which the sender waited for what travels."""


def send(
    group: TransferGroup,
    metas: Sequence[TensorMeta],
    weights: Iterable[tuple[str, Tensor]],
    *,
    bucket_bytes: int,
    verify: bool,
    checks_values: bool = True,
    num_skipped: int = 0,
    on_bucket: Callable[[int], None] = lambda number: None,
) -> Sent:
    """Send the stream to all receivers. It is read to its end, whatever happens: ranks that gather it together stay in
    step.

    NaN and infinite values are looked for with ``verify`` or ``checks_values``; otherwise the caller has done so. The
    stream lacks the first ``num_skipped`` of ``metas``, which an earlier update of this group brought.
    ``on_bucket(number)`` is called before each part leaves. Holds two buckets, and tensors of the stream until they
    have arrived.

    Raises:
        TransferFailed: a receiver was lost or silent. The group is closed.
        NonFiniteError: a value is NaN or infinite in the dtype of its ``metas``; receivers have a part of the weights.
        RuntimeError: the stream is not that of ``metas``.
    """
    with to_the_end(group, weights) as stream:
        # the first word: the number of tensors at the beginning that do not come
        group.tell(num_skipped)
        parts = cut_pieces(metas[num_skipped:], bucket_bytes)
        return _send(group, parts, stream, verify, verify or checks_values, on_bucket)


@contextmanager
def to_the_end(group: TransferGroup, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Yield the stream, of which the block reads what was announced, then drain it. A failure closes the group."""
    stream = iter(weights)
    try:
        yield stream
        if next(stream, None) is not None:
            raise RuntimeError("the stream has more weights than were announced")
    except BaseException:
        group.settle()
        raise
    finally:
        for _ in stream:
            pass


def _send(
    group: TransferGroup,
    parts: Sequence[Part],
    stream: Iterator[tuple[str, Tensor]],
    verify: bool,
    is_checked: bool,
    on_bucket: Callable[[int], None],
) -> Sent:
    ring, flying = Ring(group.device), deque[tuple[Pending, Tensor]]()
    tensor, digests = torch.empty(0), []
    gather_s = send_s = 0.0
    for i, part in enumerate(parts):
        began = time.perf_counter()
        if len(flying) == 2:
            flying.popleft()[0].wait()  # the part whose memory this one takes
        free = time.perf_counter()
        if isinstance(part, Bucket):
            buffer = ring.room(i, part.num_bytes)
            fill(part, buffer, stream, is_checked)
        else:
            if part.first == 0:
                tensor = next_tensor(stream, part.meta).contiguous()
            buffer = _as_it_travels(part, tensor, ring, i)
            if is_checked:
                require_finite(part.meta.name, buffer.view(part.meta.dtype))
        if verify:
            digests.append(part.digest(buffer))
        gather_s, send_s = gather_s + time.perf_counter() - free, send_s + free - began
        on_bucket(i)
        flying.append((group.broadcast(buffer), buffer))
    began = time.perf_counter()
    if digests:
        sums = torch.stack(digests)
        flying.append((group.broadcast(sums), sums))
    for pending, _ in flying:
        pending.wait()
    send_s += time.perf_counter() - began
    return Sent(num_bytes=sum(part.num_bytes for part in parts), gather_s=gather_s, send_s=send_s)


def _as_it_travels(piece: Segment, tensor: Tensor, ring: Ring, number: int) -> Tensor:
    """Return the piece's [bytes] uint8, in the tensor's own memory unless its dtype or device differs."""
    values = piece.of(tensor)
    if not piece.is_as_it_travels(tensor, ring.device):
        values = ring.room(number, piece.num_bytes).view(piece.meta.dtype).copy_(values)
    return values.view(torch.uint8)


def next_tensor(stream: Iterator[tuple[str, Tensor]], meta: TensorMeta) -> Tensor:
    """Return the stream's next tensor, which must be that of ``meta``; raises as ``send``."""
    name, tensor = next(stream, ("", torch.empty(0)))
    if name != meta.name or tuple(tensor.shape) != meta.shape:
        raise RuntimeError(f"the stream has {name!r} of shape {list(tensor.shape)} where {meta.name!r} was announced")
    return tensor


def fill(bucket: Bucket, buffer: Tensor, stream: Iterator[tuple[str, Tensor]], is_checked: bool) -> None:
    """Fill ``buffer`` with the bucket's tensors from the stream; raises as ``send``."""
    rooms = dict(bucket.views(buffer))
    for meta in bucket.metas:
        rooms[meta.name].copy_(next_tensor(stream, meta))
    if is_checked:
        require_all_finite(rooms)


def require_all_finite(weights: Mapping[str, Tensor]) -> None:
    """Apply ``require_finite`` to each weight, with one wait for the device."""
    sums = [values.sum().double() for values in weights.values() if values.is_floating_point()]
    if sums and not torch.stack(sums).isfinite().all():
        for name, values in weights.items():
            require_finite(name, values)


def require_finite(name: str, values: Tensor) -> None:
    """Raise ``NonFiniteError`` unless every value of this weight is finite. Reads them once."""
    if not values.is_floating_point() or values.numel() == 0 or values.sum().isfinite():
        return  # a sum keeps any NaN or infinite value
    if not all(bound.isfinite() for bound in torch.aminmax(values)):  # the sum may have overflowed; NaN is both bounds
        raise NonFiniteError(
            f"weight {name!r} of the student has values that are NaN or infinite in {str(values.dtype)[6:]}: the "
            "rollout does not get them; go back to a checkpoint before the damage and lower the learning rate"
        )
