"""A process group beside torch's own, in which rank 0 sends to all others. Any failure ends it for every member.

::

    order ──> all ranks: open the store ──> _meet: rank 0 decides "go" ──> connect ──> _prove ──> broadcasts …
                                              └─ "no": a member is missing            └─ a stranger connected
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from mopd.base.text import first_line
from mopd.weights.backends import HOST, open_gloo, open_nccl, see_through
from mopd.weights.signing import DIGEST_BYTES, sign
from mopd.weights.store import SignedStore

CONNECT_S = 5.0
"""Seconds to connect to the store, which exists already: after a late order it is gone, and the wait must be short."""
_LOOK_EVERY_S = 0.01
_VERDICT, _GO, _NO = "verdict", "go", "no"


class TransferFailed(RuntimeError):
    """Something did not arrive everywhere; the group is closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOrder:
    """Description of a group: what a process needs in order to join."""

    group_id: str
    port: int
    """TCP port of rank 0's store."""
    world_size: int
    bucket_bytes: int
    timeout_s: float
    """Deadline of every operation in seconds, also while a peer is silent."""
    secret: str = field(repr=False)
    """Secret of the members, who get it by another way than the store."""
    memory: str = ""
    """Handles of rank 0's memory, one for each receiver, if buckets are read there (``mopd.weights.mapped``)."""
    shares: tuple[int, ...] = ()
    """Number of tensors of each of several senders (``mopd.weights.stages``); empty if rank 0 has them all."""


class GivenUp(Protocol):
    """A flag that ends a wait: ``threading.Event``, or another object with its ``is_set``."""

    def is_set(self) -> bool:
        """Return whether waiting any longer is of no use."""
        ...


class GroupStore:
    """The store in which processes meet, held by rank 0."""

    def __init__(self, timeout_s: float) -> None:
        listener = socket.create_server((HOST, 0))  # a port that TCPStore opens by itself is open to every network
        self.port: int = listener.getsockname()[1]
        self.store = TCPStore(
            HOST,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            multi_tenant=False,
            master_listen_fd=listener.detach(),
        )


class TransferGroup:
    """One member of a group. ``TransferFailed`` of any operation closes it; with ``settle`` peers fail as soon as they
    can instead of at their deadline."""

    def __init__(
        self,
        order: GroupOrder,
        rank: int,
        store: GroupStore | None = None,
        *,
        given_up: GivenUp | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Join, and block until all are there or ``given_up`` is set: rank 0's ends the wait of all, another rank's its
        own. ``store`` is rank 0's. ``TransferFailed`` if not all come in time."""
        self.rank = rank
        self.device = device or torch.device("cpu")
        """Device of what travels: a CPU's over gloo, CUDA's over NCCL."""
        self.timeout_s = order.timeout_s
        self._closing = threading.Lock()
        self._flying: set[Pending] = set()
        timeout = timedelta(seconds=order.timeout_s)
        try:
            if store is None:
                own = TCPStore(HOST, order.port, is_master=False, timeout=timedelta(seconds=CONNECT_S))
                own.set_timeout(timeout)
            else:
                own = store.store
            self._store: Any = SignedStore(own, order.secret)
            meeting = PrefixStore(order.group_id, self._store)
            _meet(meeting, order, rank, given_up or threading.Event())
            if self.device.type == "cuda":
                # Not the signed one: NCCL's threads would call Python, and may do so while the interpreter ends.
                self._group: Any = open_nccl(PrefixStore(order.group_id, own), rank, order.world_size, self.device)
            else:
                self._group = open_gloo(meeting, rank, order.world_size, order.timeout_s)
                _prove(self._group, order, rank)
        except RuntimeError as error:  # torch's DistError is one
            raise TransferFailed(f"not all of {order.world_size} processes came: {first_line(error):.200}") from error

    @property
    def is_over(self) -> bool:
        """Whether it has failed or was closed."""
        return self._group is None

    def broadcast(self, buffer: Tensor, *, timeout_s: float | None = None) -> Pending:
        """Start to send rank 0's bytes into every member's ``buffer``, while the caller goes on. ``timeout_s`` replaces
        the group's."""
        return self._begin(lambda group: group.broadcast([buffer], _options(timeout_s)), timeout_s)

    def tell(self, number: int, *, timeout_s: float | None = None) -> int:
        """Send rank 0's ``number`` to all members and return it."""
        buffer = torch.tensor([number], device=self.device)
        self._begin(lambda group: group.broadcast([buffer], _options(timeout_s)), timeout_s).wait()
        return int(buffer)

    def all_reached(self) -> Pending:
        """Start a barrier that ends when all members have called this."""
        return self._begin(lambda group: group.allreduce([torch.zeros(1, dtype=torch.int64)]))

    def _begin(self, start: Callable[[Any], Any], timeout_s: float | None = None) -> Pending:
        group = self._group
        if group is None:
            raise TransferFailed("the group is closed")
        try:
            work = start(group)
        except RuntimeError as error:
            self.close()
            raise TransferFailed(f"{first_line(error):.200}") from error
        pending = Pending(self, work, time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s))
        self._flying.add(pending)
        return pending

    def close(self) -> None:
        """Close the group, from any thread, once or more. Peers fail once this process has no operation in progress."""
        with self._closing:
            group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort()

    def settle(self) -> None:
        """Close the group from the thread that uses it, and wait until no operation is in progress: buffers are neither
        read nor written from then on, and peers learn of the end. Takes up to the deadline if a peer is silent."""
        self.close()
        for pending in tuple(self._flying):
            with contextlib.suppress(TransferFailed):
                pending.wait()
            pending.forget()


class Pending:
    """An operation in progress."""

    def __init__(self, group: TransferGroup, work: Any, deadline: float) -> None:
        self._group, self._work, self._deadline = group, work, deadline

    def wait(self) -> None:
        """Wait for its end. ``TransferFailed`` if it does not end in time, or a peer has gone."""
        try:
            if self._group.device.type == "cuda":
                see_through(self._work, deadline=self._deadline, is_over=lambda: self._group.is_over)
            else:
                self._work.wait()
        except RuntimeError as error:
            self._group.close()
            raise TransferFailed(f"{first_line(error):.200}") from error
        self.forget()

    def forget(self) -> None:
        """Drop the operation: as long as gloo's works are held, so are its connections."""
        self._group._flying.discard(self)
        self._work = None


def _options(timeout_s: float | None) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    if timeout_s is not None:
        options.timeout = timedelta(seconds=timeout_s)
    return options


def _meet(store: PrefixStore, order: GroupOrder, rank: int, given_up: GivenUp) -> None:
    """Let rank 0 decide whether all are there: members that connect before would wait for missing ones."""
    deadline = time.monotonic() + order.timeout_s
    if rank:
        store.set(str(rank), "")
    waited_for = [_VERDICT] if rank else [str(other) for other in range(1, order.world_size)]
    while not (there := store.check(waited_for)) and not given_up.is_set() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    said = [store.get(key) for key in waited_for] if there else []  # `ForgedEntry` for a stranger's entry
    if rank == 0:
        store.set(_VERDICT, _GO if there else _NO)
    elif there:
        there = said == [_GO.encode()]
    if not there:
        raise TransferFailed("given up" if given_up.is_set() else f"not within {order.timeout_s:g} s")


def _prove(group: Any, order: GroupOrder, rank: int) -> None:
    """Exchange with each peer a proof that only a holder of the secret can make for this pair.

    gloo accepts the first connection to a member's port, so that signed addresses alone do not show who is at the other
    end.
    """
    others = [other for other in range(order.world_size) if other != rank]
    # all sends are posted before the first receive: two members that receive first would wait for each other
    sending = [group.send([_proof(order, rank, other)], other, 0) for other in others]
    for other in others:
        heard = torch.zeros(DIGEST_BYTES, dtype=torch.uint8)
        group.recv([heard], other, 0).wait()
        if not hmac.compare_digest(heard.numpy().tobytes(), _proof(order, other, rank).numpy().tobytes()):
            raise TransferFailed(f"who came as member {other} does not know the group's secret")
    for work in sending:
        work.wait()


def _proof(order: GroupOrder, sender: int, receiver: int) -> Tensor:
    """Return [DIGEST_BYTES] uint8 for this sender and receiver."""
    name = f"{order.group_id} {sender} {receiver}"
    return torch.frombuffer(bytearray(sign(order.secret, name, b"")), dtype=torch.uint8)
