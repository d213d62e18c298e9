"""A process group beside torch's own: rank 0 sends to all others; whatever fails ends it, for everybody."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from mopd.text import first_line
from mopd.transfer.backends import HOST, open_gloo, open_nccl, see_through
from mopd.transfer.signing import DIGEST_BYTES, sign
from mopd.transfer.store import SignedStore

CONNECT_S = 5.0
"""For a connection to a store that is there already: an order that comes late finds none, and shall not wait."""
_LOOK_EVERY_S = 0.01
_VERDICT, _GO, _NO = "verdict", "go", "no"


class TransferFailed(RuntimeError):
    """What was to travel did not arrive everywhere; the group is closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOrder:
    """What a process needs to know to join."""

    group_id: str
    port: int
    """Of the store of rank 0."""
    world_size: int
    bucket_bytes: int
    timeout_s: float
    """Deadline of every operation: nobody waits longer for a peer that says nothing."""
    secret: str = field(repr=False)
    """Known to the members alone, who get it by another way than the store."""
    memory: str = ""
    """Where buckets are read in rank 0's memory (``mopd.transfer.mapped``): its handles, one for each receiver."""
    shares: tuple[int, ...] = ()
    """How many tensors each of several senders has (``mopd.transfer.stages``); empty where rank 0 has them all."""


class GivenUp(Protocol):
    """``threading.Event``, or what else can be asked."""

    def is_set(self) -> bool:
        """It is no use to wait any longer."""
        ...


class GroupStore:
    """Where processes meet, held by rank 0."""

    def __init__(self, timeout_s: float) -> None:
        listener = socket.create_server((HOST, 0))  # a store that opens its own port does so for every network
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
    """One member. ``TransferFailed`` of any operation closes it; with ``settle`` peers fail as soon as they can instead
    of at their deadline."""

    def __init__(
        self,
        order: GroupOrder,
        rank: int,
        store: GroupStore | None = None,
        *,
        given_up: GivenUp | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Blocks until all are there, or somebody has ``given_up`` waiting: rank 0 for everybody, another for itself.
        ``store`` is rank 0's. ``TransferFailed`` if they are not in time."""
        self.rank = rank
        self.device = device or torch.device("cpu")
        """Of what travels: a CPU's over gloo, CUDA's over NCCL."""
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
        except RuntimeError as error:  # DistError is one
            raise TransferFailed(f"not all of {order.world_size} processes came: {first_line(error):.200}") from error

    @property
    def is_over(self) -> bool:
        """It failed, or somebody closed it."""
        return self._group is None

    def broadcast(self, buffer: Tensor, *, timeout_s: float | None = None) -> Pending:
        """Rank 0's bytes into everybody's ``buffer``, beside what the caller goes on with. ``timeout_s`` in the place
        of the group's."""
        return self._post(buffer, timeout_s)

    def tell(self, number: int, *, timeout_s: float | None = None) -> int:
        """Rank 0's ``number``, to everybody; returns when it is there."""
        said = torch.tensor([number], device=self.device)
        self._post(said, timeout_s).wait()
        return int(said)

    def _post(self, buffer: Tensor, timeout_s: float | None) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        group = self._group
        if group is None:
            raise TransferFailed("the group is closed")
        try:
            return self._began(group.broadcast([buffer], options), timeout_s)
        except RuntimeError as error:
            self.close()
            raise TransferFailed(f"{first_line(error):.200}") from error

    def all_reached(self) -> Pending:
        """The next point that all members are to reach: is over when all have called this."""
        group = self._group
        if group is None:
            raise TransferFailed("the group is closed")
        try:
            return self._began(group.allreduce([torch.zeros(1, dtype=torch.int64)]))
        except RuntimeError as error:
            self.close()
            raise TransferFailed(f"{first_line(error):.200}") from error

    def close(self) -> None:
        """From any thread, once is enough. Peers fail as soon as nothing of this process is under way any more."""
        with self._closing:
            group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort()

    def settle(self) -> None:
        """``close``, from the thread that uses the group. Returns when nothing is under way any more: buffers are
        neither read nor written from then on, and peers hear of the end. Takes the deadline where a peer is silent."""
        self.close()
        for pending in tuple(self._flying):
            with contextlib.suppress(TransferFailed):
                pending.wait()
            pending.forget()

    def _began(self, work: Any, timeout_s: float | None = None) -> Pending:
        pending = Pending(self, work, time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s))
        self._flying.add(pending)
        return pending


class Pending:
    """An operation under way."""

    def __init__(self, group: TransferGroup, work: Any, deadline: float) -> None:
        self._group, self._work, self._deadline = group, work, deadline

    def wait(self) -> None:
        """``TransferFailed`` if it did not end in time, or a peer has gone."""
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
        """As long as gloo's works are held, so are its connections."""
        self._group._flying.discard(self)
        self._work = None


def _meet(store: PrefixStore, order: GroupOrder, rank: int, given_up: GivenUp) -> None:
    """Rank 0 says whether all are there: who connects to others before that waits for those that never come."""
    deadline = time.monotonic() + order.timeout_s
    if rank:
        store.set(str(rank), "")
    waited_for = [_VERDICT] if rank else [str(other) for other in range(1, order.world_size)]
    while not (there := store.check(waited_for)) and not given_up.is_set() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    said = [store.get(key) for key in waited_for] if there else []  # ``ForgedEntry`` for a stranger's
    if rank == 0:
        store.set(_VERDICT, _GO if there else _NO)
    elif there:
        there = said == [_GO.encode()]
    if not there:
        raise TransferFailed("given up" if given_up.is_set() else f"not within {order.timeout_s:g} s")


def _prove(group: Any, order: GroupOrder, rank: int) -> None:
    """Exchange with each peer a proof that only a holder of the secret can make for this pair. gloo lets in whoever
    connects to a member's port first, so that signed addresses alone do not say who is at the other end."""
    others = [other for other in range(order.world_size) if other != rank]
    sending = [group.send([_proof(order, rank, other)], other, 0) for other in others]
    for other in others:
        heard = torch.zeros(DIGEST_BYTES, dtype=torch.uint8)
        group.recv([heard], other, 0).wait()
        if not hmac.compare_digest(heard.numpy().tobytes(), _proof(order, other, rank).numpy().tobytes()):
            raise TransferFailed(f"who came as member {other} does not know the group's secret")
    for work in sending:
        work.wait()


def _proof(order: GroupOrder, sender: int, receiver: int) -> Tensor:
    """[DIGEST_BYTES] uint8."""
    name = f"{order.group_id} {sender} {receiver}"
    return torch.frombuffer(bytearray(sign(order.secret, name, b"")), dtype=torch.uint8)
