"""Nodes of a cluster that meet at one endpoint: each tells, node 0 hears them all and announces what follows.

The meeting point is torch's ``TCPStore``, which torchrun uses for the same end, on a socket that is bound to the named
address alone. Values are JSON within limits. Every wait has a deadline, and can be interrupted.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistError, PrefixStore, Store

from mopd.base.files.json_text import parse_json
from mopd.base.types import UserError
from mopd.launch.node import RUN_SECRET, Place
from mopd.launch.nodes import client_store, held_store
from mopd.weights.signing import ForgedEntry

POLL_S = 0.02
CONNECT_S = 5.0
"""For one try of a connection."""
GOODBYE_S = 10.0
"""How long node 0 keeps the store for the others to read its last word."""
MARGIN_S = 30.0
"""How much longer than node 0, which waits for everybody, the others wait for it."""
MAX_BYTES = 8 * 2**20
"""Of one value."""


class Meeting:
    """What one node says to the others and hears from them."""

    def __init__(self, place: Place, store: Store) -> None:
        self.place = place
        self._store = store
        self._silent: set[int] = set()
        """Nodes that did not tell something in time: nobody waits for them again."""

    @property
    def leads(self) -> bool:
        """This is node 0."""
        return self.place.is_first

    def tell(self, key: str, value: Any) -> None:
        """Leave a JSON-able value for node 0."""
        self._set(f"{self.place.node_rank}/{key}", value)

    def gather(self, key: str, own: Any, timeout_s: float) -> list[Any | None]:
        """On node 0: what every node told, ``None`` for those that did not in time. Elsewhere: tells ``own``, and
        returns nothing."""
        self.tell(key, own)
        if not self.leads:
            return []
        deadline = time.monotonic() + timeout_s
        told = []
        for node in range(self.place.num_nodes):
            told.append(self._get(f"{node}/{key}", 0.0 if node in self._silent else deadline))
            if told[-1] is None:
                self._silent.add(node)
        return told

    def decide(self, key: str, make: Callable[[], Any], timeout_s: float) -> Any:
        """What node 0 makes of what it heard, on every node.

        Args:
            key: names the decision.
            make: called on node 0 alone.
            timeout_s: what node 0 waits for at most until it decides.

        Raises:
            UserError: node 0 does not decide in time, or is gone.
        """
        if self.leads:
            value = make()
            self._set(f"decided/{key}", value)
            return value
        value = self._get(f"decided/{key}", time.monotonic() + timeout_s + MARGIN_S)
        if value is None:
            raise UserError(
                f"--rdzv-endpoint {_endpoint(self.place)}: node 0 did not answer in {timeout_s + MARGIN_S:.0f} s: see "
                "what it printed"
            )
        return value

    def part(self) -> None:
        """The last word was read; node 0 waits a while for the others to say so."""
        self.gather("goodbye", True, GOODBYE_S)

    def store_for(self, name: str) -> Store:
        """A store of its own for a process group."""
        return PrefixStore(name, self._store)

    def _set(self, key: str, value: Any) -> None:
        text = json.dumps(value, allow_nan=False)
        if len(text) > MAX_BYTES:
            raise ValueError(f"{key}: {len(text)} bytes are more than {MAX_BYTES}")
        with _losing(self.place):
            self._store.set(key, text)

    def _get(self, key: str, deadline: float) -> Any | None:
        with _losing(self.place):
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(POLL_S)
            text = self._store.get(key)
        if len(text) > MAX_BYTES:
            raise UserError(
                f"--rdzv-endpoint {_endpoint(self.place)}: {len(text)} bytes came, the limit is {MAX_BYTES}"
            )
        try:
            return parse_json(text)
        except ValueError as error:
            raise UserError(f"--rdzv-endpoint {_endpoint(self.place)}: what came is no JSON ({error})") from error


@contextmanager
def meeting_at(place: Place, timeout_s: float) -> Iterator[Meeting]:
    """The meeting, as long as the block lasts. Node 0 opens it; the others come, in whatever order.

    Raises:
        UserError: node 0 cannot listen there, or does not until ``timeout_s`` are over.
    """
    if place.is_first:
        store = held_store(place)
    else:
        _await_listener(place, time.monotonic() + timeout_s)
        with _losing(place):
            store = client_store(place, timeout_s)
    yield Meeting(place, PrefixStore("mopd/check", store))


def _await_listener(place: Place, deadline: float) -> None:
    """Returns once somebody listens; torch's own way of trying cannot be interrupted."""
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=CONNECT_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--rdzv-endpoint {_endpoint(place)}: node 0 does not listen there "
                    f"({error.strerror or error}): start the same command with --node-rank 0 on the node that has "
                    "this address"
                ) from error
            time.sleep(10 * POLL_S)


def _endpoint(place: Place) -> str:
    return f"{place.host}:{place.port}"


@contextmanager
def _losing(place: Place) -> Iterator[None]:
    try:
        yield
    except DistError as error:
        raise UserError(
            f"--rdzv-endpoint {_endpoint(place)}: the connection to node 0 is lost: see what it printed"
        ) from error
    except ForgedEntry as error:
        raise UserError(
            f"--rdzv-endpoint {_endpoint(place)}: {error}: set {RUN_SECRET} to the same on all nodes, or keep other "
            "users from this port"
        ) from error
