"""The launchers of one run, one on each node: they meet before any rank starts, and each learns how the others end.

Node 0's launcher holds torch's store, which the ranks use too. In it each launcher leaves::

    here/R    its name, once             beat/R    a count that goes on, whatever its main thread does
    end/R     how its ranks ended        failed    there as soon as anybody's have, or somebody is silent
    silent/R  its beat has stopped, as node 0 sees it (its place among the ends)
    order     counts the ends: who failed first is told by the store, as the clocks of machines differ

Whoever reaches its port may write there. With ``MOPD_RUN_SECRET`` entries are signed, and a stranger's ends the run.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeVar

from mopd.base.hardware import node_name
from mopd.base.tasks import StopAsked
from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.launch.failure import ERROR_CODE, STOPPED_CODE, USER_ERROR_CODE
from mopd.launch.node import RUN_SECRET, Place
from mopd.launch.sharing import WAIT, signed_store
from mopd.placement.ending import TERMINATE_TIMEOUT_S
from mopd.weights.signing import ForgedEntry

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

JOIN_S = 600.0
"""From the first launcher's start to the last one's."""
POLL_S = 0.2
BEAT_S = 1.0
SILENT_S = 20.0
"""A launcher that does nothing for so long has lost its machine; a dead one's connection ends at once."""
REPORT_S = 10.0
"""For all launchers to say how their ranks ended, once one has failed."""
_LAST = 2**31
"""Order of an end that the store did not count."""
CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""Environment variable."""
Kind = Literal["user_error", "died", "error", "signal", "peer_lost", "gone", "ended"]
_CAUSES: tuple[tuple[Kind, ...], ...] = (("user_error", "died", "error", "signal"), ("gone",), ("peer_lost",))
"""Which end explains the others: one by itself, a node that is gone, a rank that has lost another; ``ended`` never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnd:
    """How one node's ranks ended."""

    node_rank: int
    name: str
    kind: Kind
    code: int
    line: str
    """One line, for the other nodes."""
    order: int
    """Its place among the ends of all nodes, from 1."""


class NodeLostError(Exception):
    """Another node has failed, and so has the run."""


class Nodes:
    """The launchers of a run, seen from one of them. A context manager: an error that leaves the block is told to the
    others, and theirs end this one's waits."""

    def __init__(self, place: Place, poll: Callable[[], None] = lambda: None) -> None:
        """``poll`` is called inside every wait, and may raise."""
        self.place, self._poll = place, poll
        self._store: Store | None = None
        self._told: NodeEnd | None = None
        self._order: int | None = None
        """Place of this node's end, once anything is told of it."""
        self._names: dict[int, str] = {}
        self._gone: set[int] = set()
        """Nodes of which nothing more is heard."""
        self._trouble = False
        self._is_store_gone = False
        self._forged = ""
        """What somebody without the run's secret wrote into the store."""
        self._closing = threading.Event()
        self._beating: threading.Thread | None = None

    @property
    def are_several(self) -> bool:
        """There is more than this one."""
        return self.place.num_nodes > 1

    @property
    def store(self) -> Store:
        """After ``join``, or for a node that is alone."""
        if self._store is None:
            self._store = held_store(self.place)
        return self._store

    @property
    def port(self) -> int:
        """Of the store."""
        return int(self.store.port)  # type: ignore[attr-defined]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.are_several or self._store is None:
            return
        if error is not None and self._told is None:
            self._tell_error(error)
        if self._told is not None:
            self._ask(lambda: self.store.set(f"bye/{self.place.node_rank}", "1"), None)
        self._closing.set()
        if self._beating is not None:
            self._beating.join(timeout=SILENT_S)
        if self.place.is_first and self._told is not None:  # the store goes with this process
            left = [rank for rank in self._others() if rank in self._names and rank not in self._gone]
            self._wait_for(lambda: all(self._has(f"bye/{rank}") for rank in left), REPORT_S + TERMINATE_TIMEOUT_S)

    def _tell_error(self, error: BaseException) -> None:
        if isinstance(error, UserError):
            self.tell("user_error", one_line(error), code=USER_ERROR_CODE)
        elif isinstance(error, StopAsked):
            self.tell("signal", one_line(error), code=STOPPED_CODE)
        else:
            self.tell("error", one_line(error))

    def check(self) -> None:
        """Raise ``NodeLostError`` once another node has failed; that this one ends is then told."""
        if self._forged:
            raise self._foreign(self._forged)
        if self._trouble:
            if self._told is None:
                self.tell("ended", "")
            raise NodeLostError

    def meet(self, where: str) -> None:
        """Returns when all launchers have come to ``where``."""
        if self.are_several:
            self._ask(lambda: self.store.add(f"met/{where}", 1), 0)
            self._wait(lambda: self._ask(lambda: self.store.add(f"met/{where}", 0), 0) >= self.place.num_nodes)

    def once_per_node(self, first: Callable[[], str], others: Callable[[str], str]) -> str:
        """The text of this node: ``first()`` on node 0, elsewhere ``others`` of node 0's text."""
        if not self.place.is_first:
            self._wait(lambda: self._has("shared"))
            return others(self.store.get("shared").decode("utf-8"))
        text = first()
        if self.are_several:
            self.store.set("shared", text)
        return text

    def tell(self, kind: Kind, line: str, *, code: int = ERROR_CODE) -> None:
        """Have the others end: how this node's ranks did. What is told again keeps its place among all ends."""
        if self._order is None:
            self._order = self._ask(lambda: self.store.add("order", 1), _LAST)
        self._told = NodeEnd(
            node_rank=self.place.node_rank,
            name=node_name(),
            kind=kind,
            code=code,
            line=line,
            order=self._order,
        )
        told = json.dumps(asdict(self._told))
        self._ask(lambda: self.store.set(f"end/{self.place.node_rank}", told), None)
        self._ask(lambda: self.store.set("failed", "1"), None)

    def cause(self) -> NodeEnd:
        """After ``tell``: the end that explains all others; waits for theirs, but not for long."""
        assert self._told is not None
        self._wait_for(lambda: all(self._has(f"end/{r}") or self._has(f"silent/{r}") for r in self._others()), REPORT_S)
        ends = [self._told, *(self._end_of(rank) for rank in self._others())]
        for kinds in _CAUSES:
            found = [end for end in ends if end.kind in kinds]
            if found:
                return min(found, key=lambda end: (end.order, end.node_rank))
        return self._told

    def _end_of(self, rank: int) -> NodeEnd:
        if self._has(f"end/{rank}"):
            told = self._ask(lambda: self.store.get(f"end/{rank}"), b"")
            if told:
                return self._read_end(rank, told)
        self._gone.add(rank)
        name = self._names.get(rank, "which did not come")
        silent = f"silent/{rank}"
        place = self._ask(lambda: self.store.get(silent), b"") if self._has(silent) else b""
        return NodeEnd(
            node_rank=rank,
            name=name,
            kind="gone" if rank == 0 or not self._is_store_gone else "ended",
            code=ERROR_CODE,
            line=f"node {rank} ({name}) is gone: its launcher was killed, or its machine is lost",
            order=int(place or _LAST),
        )

    def _read_end(self, rank: int, told: bytes) -> NodeEnd:
        try:
            return NodeEnd(**json.loads(told))
        except (ValueError, TypeError):
            raise self._foreign(f"what stands there as the end of node {rank} cannot be read") from None

    def _others(self) -> list[int]:
        return [rank for rank in range(self.place.num_nodes) if rank != self.place.node_rank]

    def _has(self, key: str) -> bool:
        """It is there, and a launcher of this run wrote it."""
        return self._ask(lambda: self.store.check([key]) and self.store.get(key) is not None, False)

    def _foreign(self, what: object) -> UserError:
        return UserError(
            f"--rdzv-endpoint {self.place.host}:{self.place.port}: {what}: set {RUN_SECRET} to the same on all nodes, "
            "or keep other users from this port"
        )

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """The store's answer; ``otherwise`` once it is gone, with node 0's launcher."""
        if not self._is_store_gone:
            try:
                return question()
            except ForgedEntry as error:
                raise self._foreign(error) from None
            except RuntimeError:  # torch's errors of its store
                self._is_store_gone = self._trouble = True
        return otherwise

    def join(self) -> None:
        """Returns when all launchers are there. ``UserError`` when one does not come, or does not fit."""
        if not self.are_several:
            return
        _quieten_torch()
        place = self.place
        deadline = time.monotonic() + JOIN_S
        self._store = held_store(place) if place.is_first else self._connected(deadline)
        if self._store.add(f"claim/{place.node_rank}", 1) > 1:
            raise UserError(f"--node-rank {place.node_rank} is taken by another launcher: give each node its own")
        if place.is_first:
            self._store.set("num_nodes", str(place.num_nodes))
        self._wait(lambda: self._has("num_nodes"), deadline)
        told = self._store.get("num_nodes")
        if not told.isdigit():
            raise self._foreign("what node 0 wrote into the store is no number of nodes")
        num_nodes = int(told)
        if num_nodes != place.num_nodes:
            raise UserError(f"--nnodes is {place.num_nodes} here and {num_nodes} on node 0: set the same")
        self._store.set(f"here/{place.node_rank}", node_name())
        self._beating = threading.Thread(target=self._beat, name="nodes", daemon=True)
        self._beating.start()
        for rank in range(place.num_nodes):
            self._wait(lambda rank=rank: self._has(f"here/{rank}"), deadline)  # type: ignore[misc]
            self._names[rank] = self._store.get(f"here/{rank}").decode("utf-8")

    def _connected(self, deadline: float) -> Store:
        """Node 0's store, which may only come into being."""
        while True:
            self._poll()
            try:
                socket.create_connection((self.place.host, self.place.port), timeout=POLL_S * 10).close()
                return client_store(self.place)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"--rdzv-endpoint {self.place.host}:{self.place.port}: node 0 does not answer after "
                        f"{JOIN_S:g} s ({error.strerror or error}): start it, or name an address that this node reaches"
                    ) from None
                time.sleep(POLL_S)

    def _wait(self, is_so: Callable[[], bool], deadline: float | None = None) -> None:
        """``NodeLostError`` where another node fails, ``UserError`` after the deadline."""
        limit = time.monotonic() + WAIT.total_seconds() if deadline is None else deadline
        while not is_so():
            self._poll()
            self.check()
            if time.monotonic() > limit:
                missing = [str(rank) for rank in self._others() if not self._has(f"here/{rank}")]
                raise UserError(
                    f"--nnodes {self.place.num_nodes}: node {', '.join(missing) or '?'} did not come within "
                    f"{JOIN_S:g} s: start this command on each node"
                )
            time.sleep(POLL_S)

    def _wait_for(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """For what others do at their end, whether or not it comes true."""
        deadline = time.monotonic() + timeout_s
        while not is_so() and not self._is_store_gone and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _beat(self) -> None:
        """In a thread and over a connection of its own."""
        seen: dict[int, tuple[bytes, float]] = {}
        count = 0
        try:
            store = client_store(self.place)
            while not self._closing.wait(BEAT_S):
                count += 1
                store.set(f"beat/{self.place.node_rank}", str(count))
                if self.place.is_first:
                    self._look_for_silent(store, seen)
                self._trouble = self._trouble or (store.check(["failed"]) and store.get("failed") is not None)
        except ForgedEntry as error:
            self._forged = str(error)
        except RuntimeError:
            if not self._closing.is_set():
                self._is_store_gone = self._trouble = True

    def _look_for_silent(self, store: Store, seen: dict[int, tuple[bytes, float]]) -> None:
        now = time.monotonic()
        for rank in self._others():
            if not store.check([f"here/{rank}"]):  # may come late; its beats follow
                continue
            beat = store.get(f"beat/{rank}") if store.check([f"beat/{rank}"]) else b""
            if rank not in seen or seen[rank][0] != beat:
                seen[rank] = (beat, now)
            elif now - seen[rank][1] > SILENT_S:
                if not store.check([f"silent/{rank}"]):
                    store.set(f"silent/{rank}", str(store.add("order", 1)))
                store.set("failed", "1")


def _quieten_torch() -> None:
    """Its store warns on the terminal, with a stack, of a connection that has ended; this module tells why it has.
    The ranks keep their warnings."""
    if CPP_LOG_LEVEL not in os.environ and "torch" not in sys.modules:  # read once, at its import
        os.environ[CPP_LOG_LEVEL] = "ERROR"
        importlib.import_module("torch")
        del os.environ[CPP_LOG_LEVEL]


def held_store(place: Place) -> Store:
    """The store, held by this process, on the one address that others know it by."""
    from torch.distributed import TCPStore  # heavy

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        raise UserError(
            f"--rdzv-endpoint {place.host}:{place.port}: cannot be listened on here ({error.strerror or error}): name "
            "an address of this node, node 0, and a free port"
        ) from error
    port = listener.getsockname()[1]
    store = TCPStore(
        place.host,
        port,
        is_master=True,
        timeout=timedelta(seconds=SILENT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return signed_store(store)


def client_store(place: Place, timeout_s: float = SILENT_S) -> Store:
    """The store that another process holds, which listens."""
    from torch.distributed import TCPStore  # heavy

    return signed_store(TCPStore(place.host, place.port, is_master=False, timeout=timedelta(seconds=timeout_s)))
