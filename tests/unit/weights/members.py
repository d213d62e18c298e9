"""Members of a transfer group as threads of this process, and one that dies in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mopd.weights import group as transfer_group
from mopd.weights.carrying import MappedParts, Parts, TravellingParts, part_memory_bytes
from mopd.weights.group import GroupOrder, GroupStore, TransferFailed, TransferGroup
from mopd.weights.memory import SharedMemory
from mopd.weights.parts import TensorMeta
from mopd.weights.receiving import Receiver
from mopd.weights.sending import Sent, Stream, send

CPU = torch.device("cpu")
LOOPBACK = "127.0.0.1"
BUCKET, LARGE, SLICE = 4096, 2048, 1000
DEADLINE_S = 600.0
"""Longer than a test may take: whatever waits for it fails."""
SHORT_S = 1.0
"""Where somebody waits until it has passed, once all have met."""
Weights = dict[str, Tensor]


def metas_of(weights: Weights, senders: Sequence[int] = ()) -> list[TensorMeta]:
    owners = senders or [0] * len(weights)
    return [
        TensorMeta(name, tensor.dtype, tuple(tensor.shape), sender)
        for (name, tensor), sender in zip(weights.items(), owners, strict=True)
    ]


def order_of(store: GroupStore, **changes: Any) -> GroupOrder:
    order = GroupOrder(
        group_id="g", host=store.host, port=store.port, num_senders=1, num_receivers=1, bucket_bytes=BUCKET,
        large_bytes=LARGE, timeout_s=DEADLINE_S, secret="ours",
    )  # fmt: skip
    return replace(order, **changes)


class Members:
    """Senders and receivers that have met. The receivers at even places have slots, the others keep what comes."""

    def __init__(
        self,
        metas: list[TensorMeta],
        num_receivers: int,
        *,
        slots: Callable[[], Weights] | None = None,
        is_mapped: bool = False,
        elsewhere: Mapping[int, Callable[[GroupOrder], object]] | None = None,
        **changes: Any,
    ) -> None:
        """``slots``: makes those of a receiver (default: of its metas' dtypes); ``elsewhere``: what brings members of
        these ranks here; ``changes`` of the order."""
        self.metas, num_senders = metas, changes.pop("num_senders", 1 + max(meta.sender for meta in metas))
        self.store = GroupStore(LOOPBACK, DEADLINE_S)
        order = order_of(self.store, num_senders=num_senders, num_receivers=num_receivers, **changes)
        self.memory: SharedMemory | None = None
        if is_mapped:
            self.memory = SharedMemory(part_memory_bytes(metas, order.bucket_bytes), CPU)
            order = replace(order, memory=self.memory.handles(num_receivers))
        self.order, self.pool = order, ThreadPoolExecutor(order.size + 1)
        make = slots or (lambda: {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in metas})
        self.slots = [make() if place % 2 == 0 else {} for place in range(num_receivers)]
        elsewhere = elsewhere or {}
        for bring in elsewhere.values():
            bring(order)
        given_up = threading.Event()
        deciding = self.pool.submit(self.store.decide, order, given_up)
        here = set(range(order.size)) - elsewhere.keys()
        coming = {rank: self.pool.submit(self._enter, rank) for rank in sorted(here)}
        for came in coming.values():  # else a failure to connect would cost the deadline
            came.add_done_callback(lambda done: given_up.set() if done.exception() else None)
        self.receivers: dict[int, Receiver] = {}
        self.senders: dict[int, Parts] = {}
        for rank, came in coming.items():
            if rank < num_senders:
                self.senders[rank] = came.result(DEADLINE_S)
            else:
                self.receivers[rank - num_senders] = came.result(DEADLINE_S)
        assert deciding.result(DEADLINE_S)

    def _enter(self, rank: int) -> Parts | Receiver:
        if rank < self.order.num_senders:
            group = TransferGroup(self.order, rank)
            return TravellingParts(group) if self.memory is None else MappedParts(group, self.memory.buffer, CPU)
        place = rank - self.order.num_senders
        slots = self.slots[place]
        return Receiver(self.order, rank, self.metas, keeps_views=not slots, slots=slots)

    def hurry(self) -> None:
        """From now on with a deadline that is short."""
        self.order = replace(self.order, timeout_s=SHORT_S)
        for one in (*self.senders.values(), *(receiver._carrier for receiver in self.receivers.values())):
            one.group.order = self.order

    def stream(self, rank: int, weights: Weights, num_skipped: int = 0) -> Iterator[tuple[str, Tensor | None]]:
        for meta in self.metas[num_skipped:]:
            yield meta.name, weights[meta.name] if meta.sender == rank else None

    def send(self, rank: int, weights: Weights, stream: Stream | None = None, **options: Any) -> Sent:
        stream = stream or self.stream(rank, weights, options.get("num_skipped", 0))
        return send(self.senders[rank], self.metas, stream, **{"verify": True, **options})

    def receive(self, place: int, *, verify: bool = True) -> Weights:
        """Everything that came: a copy of what has a slot."""
        slots, found = self.slots[place], {}
        for name, tensor in self.receivers[place].tensors(verify=verify, patience_s=self.order.timeout_s):
            found[name] = slots[name].copy_(tensor) if slots else tensor
        return {name: tensor.clone() for name, tensor in slots.items()} if slots else found

    def receiving(self, *, verify: bool = True) -> list[Future[Weights]]:
        return [self.pool.submit(self.receive, place, verify=verify) for place in self.receivers]

    def update(self, weights: Weights, **options: Any) -> list[Future[Any]]:
        """One of each member, under way: of the senders, then of the receivers."""
        sending = [self.pool.submit(self.send, rank, weights, **options) for rank in self.senders]
        return [*sending, *self.receiving(verify=options.get("verify", True))]

    def close(self) -> None:
        for one in self.senders.values():
            one.group.close()
        for receiver in self.receivers.values():
            receiver.close()
        if self.memory is not None:
            self.memory.close()
        self.pool.shutdown()


@contextmanager
def members(*args: Any, **options: Any) -> Iterator[Members]:
    made = Members(*args, **options)
    try:
        yield made
    finally:
        made.close()


def assert_all_fail(futures: Sequence[Future[Any]]) -> list[str]:
    """Each with ``TransferFailed`` in one line; these."""
    errors = [future.exception(DEADLINE_S) for future in futures]
    assert all(isinstance(error, TransferFailed) for error in errors), errors
    assert not any("\n" in str(error) for error in errors)
    return [str(error) for error in errors]


def die_in_the_middle(order: GroupOrder, rank: int, metas: list[TensorMeta], number: int) -> None:
    """In a process of its own: is killed at the part of this ``number``, or when so many tensors have come."""

    transfer_group.SLICE_BYTES = SLICE

    def die(at: int) -> None:
        if at >= number:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank < order.num_senders:
        own = ((m.name, torch.ones(m.shape, dtype=m.dtype) if m.sender == rank else None) for m in metas)
        send(TravellingParts(TransferGroup(order, rank)), metas, own, verify=True, on_part=die)
    receiver = Receiver(order, rank, metas, keeps_views=True)
    for at, _ in enumerate(receiver.tensors(verify=True, patience_s=order.timeout_s)):
        die(at)
