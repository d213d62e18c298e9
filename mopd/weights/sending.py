"""A sender of a group: its share of the parts to all receivers, gathering one while the one before it travels.

::

    parts of   0  0  1  1  1  0  2  2 …        in the order of the tensors
    sender 0   ──────┐go      ┌───┐go          gathers ahead meanwhile
    sender 1         └────────┘go └─>2

Whose part is next waits for the word of the sender before, so that its deadlines begin with its turn.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd.base.types import NonFiniteError
from mopd.weights.carrying import Parts
from mopd.weights.group import Pending, TransferGroup
from mopd.weights.parts import Bucket, Part, Segment, TensorMeta, cut_parts, digest

Stream = Iterable[tuple[str, Tensor | None]]
"""All tensors by name, in order; ``None`` in the place of those that another sender has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Size and durations of one sender's part in an update."""

    num_bytes: int
    """Bytes to each receiver."""
    gather_s: float
    """Seconds until the tensors were there and, if needed, copied into their buckets."""
    send_s: float
    """Further seconds in which the sender waited for what travels, and for its turn."""


def send(
    carrier: Parts,
    metas: Sequence[TensorMeta],
    weights: Stream,
    *,
    verify: bool,
    checks_values: bool = True,
    num_skipped: int = 0,
    longest_turn_s: float = math.inf,
    on_part: Callable[[int], None] = lambda number: None,
) -> Sent:
    """Send this sender's tensors of the stream to all receivers. It is read to its end, whatever happens: ranks that
    gather it together stay in step.

    NaN and infinite values are looked for with ``verify`` or ``checks_values``; otherwise the caller has done so. The
    streams lack the first ``num_skipped`` of ``metas``, which an earlier update of this group brought.
    ``on_part(number)`` is called before each part leaves; ``longest_turn_s`` bounds a wait for other senders. Holds two
    buckets, and tensors of the stream until they have arrived.

    Raises:
        TransferFailed: a member was lost or silent. The group is closed.
        NonFiniteError: a value is NaN or infinite in the dtype of its ``metas``; receivers have a part of the weights.
        RuntimeError: the stream is not that of ``metas``.
    """
    order = carrier.group.order
    try:
        with to_the_end(carrier.group, weights) as stream:
            carrier.group.tell(num_skipped)  # the first word: the number of tensors at the beginning that do not come
            parts = cut_parts(metas[num_skipped:], order.bucket_bytes, order.large_bytes)
            filler = _Filler(carrier, stream, is_checked=verify or checks_values)
            return _send(carrier, parts, filler, verify, longest_turn_s, on_part)
    finally:
        carrier.drop_room()  # the step that follows needs the memory


@contextmanager
def to_the_end(group: TransferGroup, weights: Stream) -> Iterator[Iterator[tuple[str, Tensor | None]]]:
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
    carrier: Parts,
    parts: Sequence[Part],
    filler: _Filler,
    verify: bool,
    longest_turn_s: float,
    on_part: Callable[[int], None],
) -> Sent:
    group, clock = carrier.group, time.perf_counter
    # digests travel in the order in which senders have their first parts
    counts = Counter(part.sender for part in parts) if verify else Counter[int]()
    # at the end the first sender, who answers for all, hears that all is sent
    turns = _Turns(group, [*(part.sender for part in parts), *counts, 0], longest_turn_s)
    flying, digests = deque[tuple[Pending, Tensor]](), list[Tensor]()
    gather_s, began, number = 0.0, clock(), 0
    for i, part in enumerate(parts):
        is_own = part.sender == group.rank
        if not is_own:
            filler.skip(part)
            if not group.is_broadcast:
                continue
        if len(flying) == 2:
            flying.popleft()[0].wait()  # the part whose memory this one takes
        free = clock()
        buffer = filler.fill(number, part) if is_own else carrier.room(number, part.num_bytes)
        if verify and is_own:
            digests.append(digest(buffer))
        gather_s += clock() - free
        turns.take(i)
        on_part(i)
        flying.append((carrier.carry(number, buffer, part.sender), buffer))
        turns.give(i)
        number += 1
    for pending, _ in flying:
        pending.wait()
    for i, (sender, count) in enumerate(counts.items(), len(parts)):
        if sender == group.rank or group.is_broadcast:
            sums = torch.stack(digests) if sender == group.rank else torch.zeros(count, dtype=torch.int64)
            turns.take(i)
            pending = group.carry(sums.to(group.device).view(torch.uint8), sender)
            turns.give(i)
            pending.wait()
    if group.rank == 0:
        turns.take(len(parts) + len(counts))
    turns.end()
    num_bytes = sum(part.num_bytes for part in parts if part.sender == group.rank)
    return Sent(num_bytes=num_bytes, gather_s=gather_s, send_s=clock() - began - gather_s)


class _Turns:
    """Passes the turn from sender to sender. ``senders``: those of the parts and of what follows them, in order."""

    def __init__(self, group: TransferGroup, senders: Sequence[int], longest_s: float) -> None:
        self._group, self._senders, self._longest_s = group, senders, longest_s
        self._last = -1
        """Part of this sender's last turn."""
        self._given: Pending | None = None

    def take(self, i: int) -> None:
        """Wait until part ``i``, this sender's, is next: as long as those in between may take."""
        group = self._group
        if i and self._senders[i - 1] != group.rank:
            group.take_turn(self._senders[i - 1], min(group.order.timeout_s * (i - self._last), self._longest_s))
            self.end()  # the turn that was given before was taken long ago
        self._last = i

    def give(self, i: int) -> None:
        """Part ``i`` has begun to leave: let another sender begin with the next."""
        if i + 1 < len(self._senders) and self._senders[i + 1] != self._group.rank:
            self._given = self._group.give_turn(self._senders[i + 1])

    def end(self) -> None:
        """Wait until the turn that was given last was taken."""
        given, self._given = self._given, None
        if given is not None:
            given.wait()


class _Filler:
    """Brings a stream's tensors into the memory that parts leave from."""

    def __init__(self, carrier: Parts, stream: Iterator[tuple[str, Tensor | None]], *, is_checked: bool) -> None:
        self._carrier, self._stream, self._is_checked = carrier, stream, is_checked
        self._tensor = torch.empty(0)
        """Tensor of the last segment."""

    def fill(self, number: int, part: Part) -> Tensor:
        """Return the bytes of the next part, [num_bytes] uint8, in the tensor's own memory where it can leave from
        there; raises as ``send``."""
        if isinstance(part, Segment):
            return self._segment(number, part)
        buffer = self._carrier.room(number, part.num_bytes)
        self._fill(part, buffer)
        return buffer

    def skip(self, part: Part) -> None:
        """Pass over a part of another sender, which this rank may have to help to gather."""
        for meta in part.metas if isinstance(part, Bucket) else [part.meta] if part.first == 0 else []:
            if self._next(meta) is not None:
                raise RuntimeError(f"the stream has {meta.name!r}, which is sender {part.sender}'s")

    def _segment(self, number: int, piece: Segment) -> Tensor:
        if piece.first == 0:
            self._tensor = self._own(piece.meta).contiguous()
        values = piece.of(self._tensor)
        if self._carrier.is_mapped or not piece.is_as_it_travels(self._tensor, self._carrier.device):
            values = self._carrier.room(number, piece.num_bytes).view(piece.meta.dtype).copy_(values)
        if self._is_checked:
            require_finite(piece.meta.name, values)
        return values.view(torch.uint8)

    def _fill(self, bucket: Bucket, buffer: Tensor) -> None:
        rooms = dict(bucket.views(buffer))
        for meta in bucket.metas:
            rooms[meta.name].copy_(self._own(meta))
        if self._is_checked:
            require_all_finite(rooms)

    def _own(self, meta: TensorMeta) -> Tensor:
        tensor = self._next(meta)
        if tensor is None or tuple(tensor.shape) != meta.shape:
            shape = "nothing" if tensor is None else f"shape {list(tensor.shape)}"
            raise RuntimeError(f"the stream has {shape} where {meta.name!r} of shape {list(meta.shape)} was announced")
        return tensor

    def _next(self, meta: TensorMeta) -> Tensor | None:
        name, tensor = next(self._stream, ("", None))
        if name != meta.name:
            raise RuntimeError(f"the stream has {name!r} where {meta.name!r} was announced")
        return tensor


def require_all_finite(weights: Mapping[str, Tensor]) -> None:
    """Apply ``require_finite`` to each weight, with one wait for the device."""
    sums = [_summable(values).sum().double() for values in weights.values() if values.is_floating_point()]
    if sums and not torch.stack(sums).isfinite().all():
        for name, values in weights.items():
            require_finite(name, values)


def require_finite(name: str, values: Tensor) -> None:
    """Raise ``NonFiniteError`` unless every value of this weight is finite. Reads them once."""
    if not values.is_floating_point() or values.numel() == 0 or _summable(values).sum().isfinite():
        return  # a sum keeps any NaN or infinite value
    # the sum may have overflowed; NaN is both bounds
    if not all(bound.isfinite() for bound in torch.aminmax(_summable(values))):
        raise NonFiniteError(
            f"weight {name!r} of the student has values that are NaN or infinite in {str(values.dtype)[6:]}: the "
            "rollout does not get them; go back to a checkpoint before the damage and lower the learning rate"
        )


def _summable(values: Tensor) -> Tensor:
    """Return floats of one byte in fp32, as torch sums no such dtype; all others as they are."""
    return values.float() if values.dtype.itemsize == 1 else values
