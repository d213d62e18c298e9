"""The launchers of one run, one on each node: they meet before any rank starts, and each learns how the others end.

Node 0's launcher holds torch's store, which the ranks use too. In it each launcher leaves:

=========  ==========================================================================================================
here/R     its name, once
beat/R     a count that it raises once a second, whatever its main thread does
end/R      how its ranks ended
failed     exists as soon as any node's ranks have failed, or a launcher is silent
silent/R   written by node 0 when R's beat has stopped: its place among the ends
order      counts the ends: the store says who failed first, as the clocks of machines differ
met/X      counts the launchers that have come to X
claim/R    counts the launchers that say they are R
shared     node 0's resolved recipe, as JSON
told/X     exists once a node has told all the others X
bye/R      R needs the store no more
=========  ==========================================================================================================

Anyone who reaches its port may write there. With ``MOPD_RUN_SECRET`` entries are signed, and a forged one ends the run.
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
from mopd.base.tasks import StopRequested
from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.launch.failure import ERROR_CODE, LOST_CODE, STOPPED_CODE
from mopd.launch.node import RUN_SECRET, Place
from mopd.launch.sharing import WAIT, signed_store
from mopd.placement.ending import TERMINATE_TIMEOUT_S
from mopd.weights.signing import ForgedEntry

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

JOIN_S = 600.0
"""Seconds from the first launcher's start to the last one's."""
POLL_S = 0.2
BEAT_S = 1.0
SILENT_S = 20.0
"""A launcher that has not beaten for so long has lost its machine; a dead one's connection ends at once."""
REPORT_S = 10.0
"""Seconds for all launchers to say how their ranks ended, once one has failed."""
_LAST = 2**31
"""Order of an end that the store did not count."""
CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""Environment variable."""
Kind = Literal["user_error", "died", "error", "signal", "peer_lost", "gone", "ended"]
_CAUSES: tuple[tuple[Kind, ...], ...] = (("user_error", "died", "error", "signal"), ("gone",), ("peer_lost",))
"""Kinds of ends that explain the others, the best explanation first; ``ended`` explains nothing."""


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
    """The launchers of a run, as one of them sees them. A context manager: an error that leaves the block is told to
    the others, and an error of theirs ends this one's waits."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.are_several = place.num_nodes > 1
        self._others = [rank for rank in range(place.num_nodes) if rank != place.node_rank]
        self._store: Store | None = None
        self._own_end: NodeEnd | None = None
        self._order: int | None = None
        """Place of this node's end, once it has been counted."""
        self._names: dict[int, str] = {}
        self._gone: set[int] = set()
        """Nodes whose launcher has ended without a report."""
        self._trouble = False
        self._is_store_gone = False
        self._forged = ""
        """Error line for an entry that was written without the run's secret."""
        self._closing = threading.Event()
        self._beating: threading.Thread | None = None

    @property
    def store(self) -> Store:
        """The launchers' store, after ``join``; a node that is alone opens its own."""
        if self._store is None:
            self._store = held_store(self.place)
        return self._store

    @property
    def port(self) -> int:
        """TCP port of the store."""
        return int(self.store.port)  # type: ignore[attr-defined]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.are_several or self._store is None:
            return
        if error is not None and self._own_end is None:
            self._report_error(error)
        if self._own_end is not None:
            self._ask(lambda: self.store.set(f"bye/{self.place.node_rank}", "1"), None)
        self._closing.set()
        if self._beating is not None:
            self._beating.join(timeout=SILENT_S)
        if self.place.is_first and self._own_end is not None:  # the store goes with this process
            left = [rank for rank in self._others if rank in self._names and rank not in self._gone]
            self._wait_for(lambda: all(self._has(f"bye/{rank}") for rank in left), REPORT_S + TERMINATE_TIMEOUT_S)

    def _report_error(self, error: BaseException) -> None:
        if isinstance(error, UserError):
            self.report("user_error", one_line(error), code=error.exit_code)
        elif isinstance(error, StopRequested):
            self.report("signal", one_line(error), code=STOPPED_CODE)
        else:
            self.report("error", one_line(error))

    def check(self) -> None:
        """Raise ``NodeLostError`` if another node has failed, after telling the others that this one ends too."""
        if self._forged:
            raise self._foreign(self._forged)
        if self._trouble:
            if self._own_end is None:
                self.report("ended", "")
            raise NodeLostError

    def meet(self, where: str) -> None:
        """Return when all launchers have come to ``where``."""
        if self.are_several:
            self._come(where)
            self._wait(lambda: self._have_all_come(where))

    def await_end(self, timeout_s: float, poll: Callable[[], None]) -> None:
        """Return when the ranks of all nodes have ended well, at the latest after ``timeout_s`` or when a node fails:
        the store, which they need until then, goes with node 0's launcher."""
        if self.are_several:
            self._come("the end")
            self._wait_for(lambda: self._trouble or self._have_all_come("the end"), timeout_s, poll)

    def tell(self, what: str) -> None:
        """Tell the others once and for all."""
        self._ask(lambda: self.store.set(f"told/{what}", "1"), None)

    def was_told(self, what: str) -> bool:
        """Return whether a node has told it."""
        return self._has(f"told/{what}")

    def _come(self, where: str) -> None:
        self._ask(lambda: self.store.add(f"met/{where}", 1), 0)

    def _have_all_come(self, where: str) -> bool:
        return self._ask(lambda: self.store.add(f"met/{where}", 0), 0) >= self.place.num_nodes

    def once_per_node(self, first: Callable[[], str], others: Callable[[str], str]) -> str:
        """Return the text of this node: ``first()`` on node 0, elsewhere ``others`` of node 0's text."""
        if not self.place.is_first:
            self._wait(lambda: self._has("shared"))
            return others(self.store.get("shared").decode("utf-8"))
        text = first()
        if self.are_several:
            self.store.set("shared", text)
        return text

    def report(self, kind: Kind, line: str, *, code: int = ERROR_CODE) -> None:
        """Report how this node's ranks ended, which ends the others. A second report keeps the first one's order."""
        if self._order is None:
            self._order = self._ask(lambda: self.store.add("order", 1), _LAST)
        rank = self.place.node_rank
        end = NodeEnd(node_rank=rank, name=node_name(), kind=kind, code=code, line=line, order=self._order)
        self._own_end = end
        self._ask(lambda: self.store.set(f"end/{rank}", json.dumps(asdict(end))), None)
        self._ask(lambda: self.store.set("failed", "1"), None)

    def cause(self) -> NodeEnd:
        """Return the end that explains all others, after ``report``; waits ``REPORT_S`` for their reports."""
        assert self._own_end is not None
        self._wait_for(lambda: all(self._has(f"end/{r}") or self._has(f"silent/{r}") for r in self._others), REPORT_S)
        ends = [self._own_end, *map(self._end_of, self._others)]
        for kinds in _CAUSES:
            found = [end for end in ends if end.kind in kinds]
            if found:
                return min(found, key=lambda end: (end.order, end.node_rank))
        return self._own_end

    def _end_of(self, rank: int) -> NodeEnd:
        entry = self._read(f"end/{rank}")
        if entry:
            try:
                return NodeEnd(**json.loads(entry))
            except (ValueError, TypeError):
                raise self._foreign(f"what stands there as the end of node {rank} cannot be read") from None
        self._gone.add(rank)
        name = self._names.get(rank, "which did not come")
        return NodeEnd(
            node_rank=rank,
            name=name,
            kind="gone" if rank == 0 or not self._is_store_gone else "ended",
            code=LOST_CODE,
            line=f"node {rank} ({name}) is gone: its launcher was killed, or its machine is lost",
            order=int(self._read(f"silent/{rank}") or _LAST),
        )

    def _read(self, key: str) -> bytes:
        """Return an entry, empty if it is absent."""
        return self._ask(lambda: self.store.get(key) if self.store.check([key]) else b"", b"")

    def _has(self, key: str) -> bool:
        """Return whether a launcher of this run has written the entry."""
        return self._ask(lambda: self.store.check([key]) and self.store.get(key) is not None, False)

    def _foreign(self, what: object) -> UserError:
        return foreign_entry(self.place, what)

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Return the store's answer; ``otherwise`` once it is gone, with node 0's launcher."""
        if not self._is_store_gone:
            try:
                return question()
            except ForgedEntry as error:
                raise self._foreign(error) from None
            except RuntimeError:  # torch's errors of its store
                self._is_store_gone = self._trouble = True
        return otherwise

    def join(self) -> None:
        """Return when all launchers have come. ``UserError`` when one does not, or does not fit."""
        if not self.are_several:
            return
        _quieten_torch()
        place = self.place
        deadline = time.monotonic() + JOIN_S
        self._store = held_store(place) if place.is_first else client_store(place, JOIN_S)
        if self._store.add(f"claim/{place.node_rank}", 1) > 1:
            raise UserError(f"--node-rank {place.node_rank} is taken by another launcher: give each node its own")
        if place.is_first:
            self._store.set("num_nodes", str(place.num_nodes))
        self._wait(lambda: self._has("num_nodes"), deadline)
        entry = self._read("num_nodes")
        self.check()
        if not entry.isdigit():
            raise self._foreign("what node 0 wrote into the store is no number of nodes")
        num_nodes = int(entry)
        if num_nodes != place.num_nodes:
            raise UserError(f"--nnodes is {place.num_nodes} here and {num_nodes} on node 0: set the same")
        self._store.set(f"here/{place.node_rank}", node_name())
        self._beating = threading.Thread(target=self._beat, name="nodes", daemon=True)
        self._beating.start()
        for rank in range(place.num_nodes):
            self._wait(lambda rank=rank: self._has(f"here/{rank}"), deadline)  # type: ignore[misc]
            self._names[rank] = self._read(f"here/{rank}").decode("utf-8")
            self.check()

    def _wait(self, is_so: Callable[[], bool], deadline: float | None = None) -> None:
        """Wait; ``NodeLostError`` where another node fails, ``UserError`` after the deadline."""
        limit = time.monotonic() + WAIT.total_seconds() if deadline is None else deadline
        while not is_so():
            self.check()
            if time.monotonic() > limit:
                missing = [str(rank) for rank in self._others if not self._has(f"here/{rank}")]
                raise UserError(
                    f"--nnodes {self.place.num_nodes}: node {', '.join(missing) or '?'} did not come within "
                    f"{JOIN_S:g} s: start this command on each node"
                )
            time.sleep(POLL_S)

    def _wait_for(self, is_so: Callable[[], bool], timeout_s: float, poll: Callable[[], None] = lambda: None) -> None:
        """Wait for what others do at their end, whether or not it comes true."""
        deadline = time.monotonic() + timeout_s
        while not is_so() and not self._is_store_gone and time.monotonic() < deadline:
            poll()
            time.sleep(POLL_S)

    def _beat(self) -> None:
        """Raise this launcher's count, and look for failures: in a thread, over a connection of its own."""
        last_beats: dict[int, tuple[bytes, float]] = {}
        count = 0
        try:
            store = client_store(self.place)
            while not self._closing.wait(BEAT_S):
                count += 1
                store.set(f"beat/{self.place.node_rank}", str(count))
                if self.place.is_first:
                    self._find_silent(store, last_beats)
                self._trouble = self._trouble or (store.check(["failed"]) and store.get("failed") is not None)
        except ForgedEntry as error:
            self._forged = str(error)
        except (RuntimeError, UserError):
            if not self._closing.is_set():
                self._is_store_gone = self._trouble = True

    def _find_silent(self, store: Store, last_beats: dict[int, tuple[bytes, float]]) -> None:
        now = time.monotonic()
        for rank in self._others:
            if not store.check([f"here/{rank}"]):  # may come late; its beats follow
                continue
            beat = store.get(f"beat/{rank}") if store.check([f"beat/{rank}"]) else b""
            if rank not in last_beats or last_beats[rank][0] != beat:
                last_beats[rank] = (beat, now)
            elif now - last_beats[rank][1] > SILENT_S:
                if not store.check([f"silent/{rank}"]):
                    store.set(f"silent/{rank}", str(store.add("order", 1)))
                store.set("failed", "1")


def _quieten_torch() -> None:
    """Have torch's store not warn on the terminal, with a stack, of a connection that has ended: this module says why.
    The ranks keep their warnings."""
    if CPP_LOG_LEVEL not in os.environ and "torch" not in sys.modules:  # read once, at its import
        os.environ[CPP_LOG_LEVEL] = "ERROR"
        importlib.import_module("torch")
        del os.environ[CPP_LOG_LEVEL]


def foreign_entry(place: Place, what: object) -> UserError:
    """Return the error for an entry of the store that no launcher of this run has written."""
    return UserError(
        f"--rdzv-endpoint {place.host}:{place.port}: {what}: set {RUN_SECRET} to the same on all nodes, or keep other "
        "users from this port"
    )


def held_store(place: Place) -> Store:
    """Open the store in this process, on the one address that the other nodes know."""
    from mopd.weights.store import listening_store  # heavy

    try:
        return signed_store(listening_store(place.host, place.port, timeout_s=SILENT_S))
    except OSError as error:
        raise UserError(
            f"--rdzv-endpoint {place.host}:{place.port}: cannot be listened on here ({error.strerror or error}): name "
            "an address of this node, node 0, and a free port"
        ) from error


def client_store(place: Place, timeout_s: float = SILENT_S) -> Store:
    """Connect to node 0's store, which may still have to be opened: torch's own way of trying cannot be interrupted.

    Args:
        place: names its address.
        timeout_s: for node 0 to come.
    """
    from torch.distributed import TCPStore  # heavy

    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=POLL_S * 10).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--rdzv-endpoint {place.host}:{place.port}: node 0 does not listen there after {timeout_s:g} s "
                    f"({error.strerror or error}): start the same command with --node-rank 0 on the node that has this "
                    "address, or name an address that this node reaches"
                ) from None
            time.sleep(POLL_S)
    return signed_store(TCPStore(place.host, place.port, is_master=False, timeout=timedelta(seconds=SILENT_S)))
