"""Nodes of a cluster that meet at one endpoint: each reports to node 0, which announces what follows.

The meeting point is torch's ``TCPStore``, which torchrun uses for the same end, on a socket that is bound to the named
address alone. Values are JSON within limits. Every wait has a deadline, and can be interrupted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistError, Store

from mopd.base.files.json_text import parse_json
from mopd.base.types import UserError
from mopd.launch.checks.inputs import Check
from mopd.launch.node import Place
from mopd.launch.nodes import client_store, foreign_entry, held_store
from mopd.weights.signing import ForgedEntry

PREFIX = "mopd/check"
POLL_S = 0.02
GOODBYE_S = 10.0
"""Seconds for which node 0 keeps the store for the others to read its last message."""
MARGIN_S = 30.0
"""Seconds by which the others wait longer for node 0 than it waits for all of them."""
MAX_BYTES = 8 * 2**20
"""Size of one value."""


class Meeting:
    """What one node reports to the others and reads from them."""

    def __init__(self, place: Place, store: Store) -> None:
        self.place = place
        self.store = store
        """Stays referenced as long as a group uses it: C++ finds a signed store through its Python object alone."""
        self._silent: set[int] = set()
        """Nodes that once did not report in time: they are not waited for again."""

    def gather(self, key: str, own: Any, timeout_s: float) -> list[Any | None]:
        """Report ``own``, a JSON-able value. On node 0 return what every node reported, ``None`` for those that did
        not in time; elsewhere nothing."""
        self._set(f"{self.place.node_rank}/{key}", own)
        if not self.place.is_first:
            return []
        deadline = time.monotonic() + timeout_s
        reports = []
        for node in range(self.place.num_nodes):
            reports.append(self._get(f"{node}/{key}", 0.0 if node in self._silent else deadline))
            if reports[-1] is None:
                self._silent.add(node)
        return reports

    def decide(self, key: str, make: Callable[[], Any], timeout_s: float) -> Any:
        """Return node 0's decision, on every node.

        Args:
            key: names the decision.
            make: called on node 0 alone.
            timeout_s: what node 0 waits for at most until it decides.

        Raises:
            UserError: node 0 does not decide in time, or is gone.
        """
        if self.place.is_first:
            value = make()
            self._set(f"decided/{key}", value)
            return value
        value = self._get(f"decided/{key}", time.monotonic() + timeout_s + MARGIN_S)
        if value is None:
            raise self._error(f"node 0 did not answer in {timeout_s + MARGIN_S:.0f} s: see what it printed")
        return value

    def part(self) -> None:
        """Say that node 0's last message has been read; on node 0 wait a while for the others to say so."""
        self.gather("goodbye", True, GOODBYE_S)

    def outcomes(self, name: str, problems: Sequence[str], detail: str) -> list[Check]:
        """Return, on node 0, each problem as a failed check, or one that passed with ``detail``; elsewhere nothing."""
        if not self.place.is_first:
            return []
        return [Check(name, "failed", line) for line in problems] or [Check(name, "ok", detail)]

    def _error(self, what: str) -> UserError:
        return UserError(f"--rdzv-endpoint {self.place.host}:{self.place.port}: {what}")

    def _set(self, key: str, value: Any) -> None:
        with self._losing():
            self.store.set(f"{PREFIX}/{key}", json.dumps(value, allow_nan=False))

    def _get(self, key: str, deadline: float) -> Any | None:
        with self._losing():
            while not self.store.check([f"{PREFIX}/{key}"]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(POLL_S)
            text = self.store.get(f"{PREFIX}/{key}")
        if len(text) > MAX_BYTES:
            raise self._error(f"{len(text)} bytes came, the limit is {MAX_BYTES}")
        try:
            return parse_json(text)
        except ValueError as error:
            raise self._error(f"what came is no JSON ({error})") from error

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Turn errors of the store into one line."""
        try:
            yield
        except DistError as error:
            raise self._error("the connection to node 0 is lost: see what it printed") from error
        except ForgedEntry as error:
            raise foreign_entry(self.place, error) from error


def meeting_at(place: Place, timeout_s: float) -> Meeting:
    """Open the meeting on node 0; elsewhere come to it. It lasts as long as node 0 holds the object.

    Raises:
        UserError: node 0 cannot listen there, or does not until ``timeout_s`` are over.
    """
    store = held_store(place) if place.is_first else client_store(place, timeout_s)
    return Meeting(place, store)
