"""A process group beside torch's own, in which some members send to all others. Any failure ends it for every member.

::

    members   senders 0 … S-1 (ranks of the student)      receivers S … (engine workers, in the order of the chain)
    order ──> all members: enter the store ──> its owner decides "go" ──> connect ──> _prove ──> parts …
                                                └─ "no": a member is missing           └─ a stranger connected

    CPUs, gloo:     sender ──> first receiver ──> second ──> …     each link carries a part once, slice behind slice
    CUDA, NCCL:     a broadcast, in which the other senders take part as well
"""

from __future__ import annotations

import contextlib
import hmac
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from mopd.base.text import first_line
from mopd.weights.addresses import address_towards, interface_address
from mopd.weights.backends import open_gloo, open_nccl, see_through
from mopd.weights.signing import DIGEST_BYTES, ForgedEntry, sign
from mopd.weights.store import SignedStore, listening_store

CONNECT_S = 5.0
"""Seconds to connect to the store, which exists already: after a late order it is gone, and the wait must be short."""
SLICE_BYTES = 8 * 2**20
"""Bytes that a receiver passes on at a time: the next in the chain waits for a slice, not for a part."""
VERDICT_MARGIN_S = 5.0
"""Seconds that members wait for the verdict beyond the time that the store's owner has for it."""
_LOOK_EVERY_S = 0.01
_VERDICT, _GO = "verdict", "go"
_DATA, _TURN, _NEVER_SENT = 0, 1, 2
"""Tags of messages."""


class TransferFailed(RuntimeError):
    """Something did not arrive everywhere; the group is closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOrder:
    """Description of a group: what a process needs in order to join."""

    group_id: str
    host: str
    """Address of the store."""
    port: int
    """TCP port of the store; 0: there is none, see ``is_staged``."""
    num_senders: int
    num_receivers: int
    bucket_bytes: int
    large_bytes: int
    """Size from which a tensor travels without a bucket."""
    timeout_s: float
    """Deadline of every operation in seconds, also while a peer is silent."""
    secret: str = field(repr=False)
    """Secret of the members, who get it by another way than the store."""
    interface: str = ""
    """Network interface on which members listen; empty: the one that leads to ``host``."""
    memory: str = ""
    """Handles of the sender's memory, one for each receiver, if parts are read there (``mopd.weights.memory``)."""

    @property
    def size(self) -> int:
        """Number of members."""
        return self.num_senders + self.num_receivers

    @property
    def is_staged(self) -> bool:
        """Whether nobody meets: the parts lie in ``memory`` when receivers read them (``mopd.weights.carrying``)."""
        return self.port == 0


class GroupStore:
    """The store in which members meet. Its owner, who need not be a member, decides whether all are there."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Listen on the address ``host`` alone. ``OSError`` if it is not one of this machine."""
        self.store = listening_store(host, 0, timeout_s=timeout_s)
        self.host, self.port = host, self.store.port

    def decide(self, order: GroupOrder, given_up: threading.Event | None = None) -> bool:
        """Block until all members are there, ``given_up`` is set or the time is over; tell the members which."""
        signed = SignedStore(self.store, order.secret)  # held: see there
        store = PrefixStore(order.group_id, signed)
        missing, deadline = list(range(order.size)), time.monotonic() + order.timeout_s
        why = ""
        while missing and not why:
            missing = [rank for rank in missing if not store.check([str(rank)])]
            if given_up is not None and given_up.is_set():
                why = "given up"
            elif time.monotonic() > deadline:
                why = f"{len(missing)} not within {order.timeout_s:g} s"
            elif missing:
                time.sleep(_LOOK_EVERY_S)
        try:
            kinds = {bytes(store.get(str(rank))).decode() for rank in range(order.size) if not missing}
            if len(kinds) > 1:
                why = f"weights would travel between {' and '.join(sorted(kinds))}: student and rollout need the same"
        except ForgedEntry as error:
            why = str(error)
        store.set(_VERDICT, why or _GO)
        return not why


class TransferGroup:
    """One member of a group. ``TransferFailed`` of any operation closes it; with ``settle`` peers fail as soon as they
    can instead of at their deadline."""

    def __init__(
        self,
        order: GroupOrder,
        rank: int,
        *,
        given_up: threading.Event | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Join, and block until all are there, or ``given_up`` is set. ``TransferFailed`` if not all come in time."""
        self.order, self.rank = order, rank
        self.device = device or torch.device("cpu")
        """Device of what travels: a CPU's over gloo, CUDA's over NCCL."""
        self._closing = threading.Lock()
        self._flying: set[Pending] = set()
        try:
            own = TCPStore(order.host, order.port, is_master=False, timeout=timedelta(seconds=CONNECT_S))
            own.set_timeout(timedelta(seconds=order.timeout_s))
            self._store: Any = SignedStore(own, order.secret)
            meeting = PrefixStore(order.group_id, self._store)
            host = ""
            if not self.is_broadcast:  # before `_enter`: a failure here costs nobody a deadline
                name = order.interface
                host = interface_address(name) if name else address_towards(order.host, order.port)
            _enter(meeting, order, rank, given_up or threading.Event(), self.device.type)
            if self.is_broadcast:
                # Not the signed one: NCCL's threads would call Python, and may do so while the interpreter ends.
                self._group: Any = open_nccl(PrefixStore(order.group_id, own), rank, order.size, self.device)
            else:
                self._group = open_gloo(meeting, rank, order.size, order.timeout_s, host)
                _prove(self._group, order, rank)
        except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
            raise TransferFailed(
                f"not all of {order.size} processes met at {order.host}:{order.port}: {first_line(error):.200}"
            ) from error

    @property
    def is_over(self) -> bool:
        """Whether it has failed or was closed."""
        return self._group is None

    @property
    def is_broadcast(self) -> bool:
        """Whether all members take part in every ``carry``."""
        return self.device.type == "cuda"

    def carry(self, buffer: Tensor, sender: int) -> Pending:
        """Begin to bring the bytes of the sender's ``buffer`` into that of every receiver, while the caller goes on.
        The buffers of other senders are left alone, or overwritten if all take part."""
        if self.is_broadcast:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = sender, 0
            return self._begin(lambda group: [group.broadcast([buffer], options)])
        first, slices = self.order.num_senders, buffer.split(SLICE_BYTES)
        if self.rank < first:
            sent = slices if self.rank == sender else ()
            return self._begin(lambda group: [group.send([one], first, _DATA) for one in sent])
        source = sender if self.rank == first else self.rank - 1
        pass_on = None
        if self.rank + 1 < self.order.size:

            def pass_on(number: int) -> Any:
                return self._started(lambda group: group.send([slices[number]], self.rank + 1, _DATA))

        return self._begin(lambda group: [group.recv([one], source, _DATA) for one in slices], pass_on)

    def tell(self, number: int, *, timeout_s: float | None = None) -> int:
        """Bring the first sender's ``number`` to all receivers, and return it there."""
        word = torch.tensor([number], device=self.device)
        pending = self.carry(word.view(torch.uint8), 0)
        pending.wait(timeout_s)
        pending.free()
        return int(word)

    def give_turn(self, to: int) -> Pending:
        """Begin to tell another sender that its parts are next. Nothing where all take part."""
        word = torch.zeros(1, dtype=torch.uint8)
        return self._begin(lambda group: [] if self.is_broadcast else [group.send([word], to, _TURN)])

    def take_turn(self, source: int, timeout_s: float) -> None:
        """Wait for ``give_turn`` of another sender."""
        word = torch.zeros(1, dtype=torch.uint8)
        self._begin(lambda group: [] if self.is_broadcast else [group.recv([word], source, _TURN)]).wait(timeout_s)

    def send_ack(self) -> Pending:
        """Tell the first sender that this receiver has read a part in its memory."""
        return self._begin(lambda group: [group.send([torch.zeros(1, dtype=torch.uint8)], 0, _TURN)])

    def acks(self) -> Pending:
        """Begin to wait for one ``send_ack`` of each receiver."""
        words = torch.zeros(self.order.num_receivers, 1, dtype=torch.uint8)
        first = self.order.num_senders
        return self._begin(lambda group: [group.recv([word], first + i, _TURN) for i, word in enumerate(words)])

    def _begin(self, start: Callable[[Any], list[Any]], then: Callable[[int], Any] | None = None) -> Pending:
        pending = Pending(self, self._started(start), then)
        self._flying.add(pending)
        return pending

    def _started(self, start: Callable[[Any], Any]) -> Any:
        group = self._group
        if group is None:
            raise TransferFailed("the group is closed")
        try:
            return start(group)
        except RuntimeError as error:
            why = first_line(error)
        self.close()
        del group  # whoever keeps the error keeps its frames: see `forget`
        raise TransferFailed(f"{why:.200}")

    def close(self) -> None:
        """Close the group, from any thread, once or more. Waits of other threads and of peers fail."""
        with self._closing:
            group, self._group, self._store = self._group, None, None
        if group is not None:
            if not self.is_broadcast:
                _end(group)
            group.abort()

    def settle(self) -> None:
        """Close the group from the thread that uses it, and wait until no operation is in progress: buffers are neither
        read nor written from then on, and peers learn of the end. Takes up to the deadline if a peer is silent."""
        self.close()
        for pending in tuple(self._flying):
            pending.drain()


class Pending:
    """An operation in progress."""

    def __init__(self, group: TransferGroup, works: list[Any], then: Callable[[int], Any] | None) -> None:
        """``then(i)`` begins what follows ``works[i]``: a slice that has arrived is passed on."""
        self._group, self._works, self._then = group, works, then
        self._passed_on: list[Any] = []

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the bytes have left, or have arrived. ``TransferFailed`` if they have not within ``timeout_s``
        (default: the group's), or a peer has gone."""
        deadline = self._deadline(timeout_s)
        for i in range(len(self._works)):
            self._see(self._works.pop(0), deadline)
            if self._then is not None:
                self._passed_on.append(self._then(i))
        if not self._passed_on:
            self.forget()

    def free(self) -> None:
        """Wait, after ``wait``, until the buffer may be used for something else; raises as ``wait``."""
        deadline = self._deadline(None)
        while self._passed_on:
            self._see(self._passed_on.pop(0), deadline)
        self.forget()

    def drain(self) -> None:
        """Wait until nothing reads or writes the buffer, however that ends."""
        deadline = self._deadline(None)
        for work in (*self._works, *self._passed_on):
            with contextlib.suppress(TransferFailed):
                self._see(work, deadline)
        self.forget()

    def forget(self) -> None:
        """Drop the operation: as long as gloo's works are held, so are its connections."""
        self._group._flying.discard(self)
        self._works, self._passed_on, self._then = [], [], None

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._group.order.timeout_s if timeout_s is None else timeout_s)

    def _see(self, work: Any, deadline: float) -> None:
        group = self._group
        try:
            if group.is_broadcast:
                see_through(work, deadline=deadline, is_over=lambda: group.is_over)
            else:
                # 0 would be no deadline
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            return
        except RuntimeError as error:
            why = first_line(error)
        group.close()
        del work  # whoever keeps the error keeps its frames: see `forget`
        raise TransferFailed(f"{why:.200}")


def _end(group: Any) -> None:
    """End all that waits in this process, and its connections: gloo's ``abort`` does not, a wait beyond its time
    does."""
    with contextlib.suppress(RuntimeError):
        group.recv_anysource([torch.zeros(1, dtype=torch.uint8)], _NEVER_SENT).wait(timedelta(milliseconds=1))


def _enter(store: PrefixStore, order: GroupOrder, rank: int, given_up: threading.Event, kind: str) -> None:
    """Say that this member is there, with its kind of device, and wait for the verdict: members that connect before
    would wait for missing ones."""
    deadline = time.monotonic() + order.timeout_s + VERDICT_MARGIN_S
    store.set(str(rank), kind)
    while not store.check([_VERDICT]):
        if given_up.is_set() or time.monotonic() > deadline:
            raise TransferFailed("given up" if given_up.is_set() else f"not within {order.timeout_s:g} s")
        time.sleep(_LOOK_EVERY_S)
    verdict = store.get(_VERDICT)  # `ForgedEntry` for a stranger's entry
    if verdict != _GO.encode():
        raise TransferFailed(verdict.decode(errors="replace"))


def _prove(group: Any, order: GroupOrder, rank: int) -> None:
    """Exchange with each peer a proof that only a holder of the secret can make for this pair.

    gloo accepts the first connection to a member's port, so that signed addresses alone do not show who is at the other
    end.
    """
    others = [other for other in range(order.size) if other != rank]
    deadline = timedelta(seconds=order.timeout_s)  # gloo's own is that of a connection
    # all sends are posted before the first receive: two members that receive first would wait for each other
    sending = [group.send([_proof(order, rank, other)], other, _DATA) for other in others]
    for other in others:
        heard = torch.zeros(DIGEST_BYTES, dtype=torch.uint8)
        group.recv([heard], other, _DATA).wait(deadline)
        if not hmac.compare_digest(heard.numpy().tobytes(), _proof(order, other, rank).numpy().tobytes()):
            raise TransferFailed(f"who came as member {other} does not know the group's secret")
    for work in sending:
        work.wait(deadline)


def _proof(order: GroupOrder, sender: int, receiver: int) -> Tensor:
    """Return [DIGEST_BYTES] uint8 for this sender and receiver."""
    name = f"{order.group_id} {sender} {receiver}"
    return torch.frombuffer(bytearray(sign(order.secret, name, b"")), dtype=torch.uint8)
