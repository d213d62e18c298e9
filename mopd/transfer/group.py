"""A process group beside torch's own: rank 0 sends to all others; whatever fails ends it, for everybody."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

HOST = "127.0.0.1"
"""Sender and receivers are processes of one machine."""


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


class GroupStore:
    """Where processes meet, held by rank 0."""

    def __init__(self, timeout_s: float) -> None:
        self.store = TCPStore(
            HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), multi_tenant=False
        )
        self.port = int(self.store.port)


class TransferGroup:
    """One member. ``TransferFailed`` of any operation closes it: its peers fail at once instead of at their
    deadline."""

    def __init__(self, order: GroupOrder, rank: int, store: GroupStore | None = None) -> None:
        """Blocks until all are there. ``store`` is rank 0's. ``TransferFailed`` if they are not in time."""
        self.rank = rank
        self._closing = threading.Lock()
        timeout = timedelta(seconds=order.timeout_s)
        try:
            self._store: Any = (
                TCPStore(HOST, order.port, is_master=False, timeout=timeout) if store is None else store.store
            )
            gloo: Any = ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timeout
            options._devices = [gloo.create_device(hostname=HOST)]
            self._group: Any = gloo(PrefixStore(order.group_id, self._store), rank, order.world_size, options)
        except RuntimeError as error:  # DistError is one
            raise TransferFailed(f"not all of {order.world_size} processes came: {_first_line(error)}") from error

    @property
    def is_over(self) -> bool:
        """It failed, or somebody closed it."""
        return self._group is None

    def broadcast(self, buffer: Tensor, *, timeout_s: float | None = None) -> Pending:
        """Rank 0's bytes into everybody's ``buffer``, beside what the caller goes on with. ``timeout_s`` in the place
        of the group's."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        group = self._group
        if group is None:
            raise TransferFailed("the group is closed")
        try:
            return Pending(self, group.broadcast([buffer], options))
        except RuntimeError as error:
            self.close()
            raise TransferFailed(_first_line(error)) from error

    def close(self) -> None:
        """From any thread; what waits here and elsewhere fails. Once is enough."""
        with self._closing:
            group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort()


class Pending:
    """A broadcast under way."""

    def __init__(self, group: TransferGroup, work: Any) -> None:
        self._group, self._work = group, work

    def wait(self) -> None:
        """``TransferFailed`` if it did not end in time, or a peer has gone."""
        try:
            self._work.wait()
        except RuntimeError as error:
            self._group.close()
            raise TransferFailed(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
