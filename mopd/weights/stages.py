"""Several senders, one after the other: each pipeline stage's first rank leads a group of its own, with all receivers.

::

    senders      0: its share ──go──> 1: its share ──go──> … ──go──> 0 knows that all is sent
    receivers    of group 0           of group 1           …

The tensors stand in the order of the senders. Words pass through the store of whoever orders the update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from mopd.base.text import first_line
from mopd.weights.backends import HOST
from mopd.weights.buckets import TensorMeta
from mopd.weights.group import CONNECT_S, GroupOrder, GroupStore, TransferFailed
from mopd.weights.receiving import GroupReceiver
from mopd.weights.signing import ForgedEntry
from mopd.weights.store import SignedStore

LOOK_EVERY_S = 0.005
_OFF = "off"


def of_sender(order: GroupOrder, sender: int) -> GroupOrder:
    """Return the order of the group that a sender leads."""
    return dataclasses.replace(order, group_id=f"{order.group_id}.{sender}", shares=())


class SenderSignals:
    """Words that the senders of one order leave for one another."""

    def __init__(self, order: GroupOrder, store: GroupStore | None = None) -> None:
        """``store`` is its holder's. Here and in all methods ``TransferFailed`` if there is none any more."""
        with _lost_store():
            timeout = timedelta(seconds=CONNECT_S)
            own: Any = TCPStore(HOST, order.port, is_master=False, timeout=timeout) if store is None else store.store
        self._signed = SignedStore(own, order.secret)
        self._store: Any = PrefixStore(f"{order.group_id}.words", self._signed)

    def call_off(self) -> None:
        """Nobody need wait for receivers any longer."""
        with _lost_store():
            self._store.set(_OFF, "")

    def is_set(self) -> bool:
        """It was called off."""
        return self._is_there(_OFF) and self._read(_OFF) == b""

    def pass_on(self, update: int, sender: int, *, is_good: bool) -> None:
        """It is this sender's turn in this update; or whoever came before has failed."""
        with _lost_store():
            self._store.set(f"{update}.{sender}", "go" if is_good else "no")

    def wait(self, update: int, sender: int, timeout_s: float) -> None:
        """Wait for the turn of ``sender``. ``TransferFailed`` if it does not come."""
        word, deadline = f"{update}.{sender}", time.monotonic() + timeout_s
        while not self._is_there(word):
            if time.monotonic() > deadline:
                raise TransferFailed(f"sender {sender - 1} is not done after {timeout_s:g} s")
            time.sleep(LOOK_EVERY_S)
        if self._read(word) != b"go":
            raise TransferFailed(f"a sender before {sender} has failed")

    def _is_there(self, word: str) -> bool:
        with _lost_store():
            return bool(self._store.check([word]))

    def _read(self, word: str) -> bytes:
        try:
            with _lost_store():
                return bytes(self._store.get(word))
        except ForgedEntry as error:
            raise TransferFailed(str(error)) from error


@contextlib.contextmanager
def _lost_store() -> Iterator[None]:
    try:
        yield
    except ForgedEntry:
        raise
    except RuntimeError as error:  # DistError is one
        raise TransferFailed(f"the store of the group is gone: {first_line(error):.200}") from error


class StagesReceiver:
    """Receiver from several senders, with the interface of ``GroupReceiver``."""

    def __init__(
        self,
        order: GroupOrder,
        metas: Sequence[TensorMeta],
        make: Callable[[GroupOrder, Sequence[TensorMeta]], GroupReceiver],
    ) -> None:
        """Enter each sender's group by ``make``. Raises as it does; ``ValueError`` for other tensors than ordered."""
        if sum(order.shares) != len(metas) or min(order.shares) < 1:
            raise ValueError(f"{len(metas)} weights are announced, and {list(order.shares)} by their senders")
        self._receivers: list[GroupReceiver] = []
        end = 0
        try:
            for sender, share in enumerate(order.shares):
                start, end = end, end + share
                self._receivers.append(make(of_sender(order, sender), metas[start:end]))
        except BaseException:
            self.close()
            raise

    @property
    def wait_s(self) -> float:
        """Seconds of the last ``tensors`` in which nothing had arrived, over all senders."""
        return sum(receiver.wait_s for receiver in self._receivers)

    @property
    def num_skipped(self) -> int:
        """Tensors that the last update left out, all of them rank 0's."""
        return self._receivers[0].num_skipped

    def close(self) -> None:
        """Leave all groups."""
        for receiver in self._receivers:
            receiver.close()

    def tensors(self, *, verify: bool, patience_s: float) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one sender after the other; any failure closes all groups."""
        try:
            for receiver in self._receivers:
                yield from receiver.tensors(verify=verify, patience_s=patience_s)
        except BaseException:
            self.close()  # senders of the other groups learn it
            raise
