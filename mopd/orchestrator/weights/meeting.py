"""Updates over a process group of the student's ranks and all engine workers. This file holds the order of a meeting
alone: tensors go from the ranks to the engines (``mopd.student.sending``)."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mopd.base.types import UserError
from mopd.config.weights import BucketsConfig, IpcConfig
from mopd.orchestrator.weights.targets import Failures, TransferTargets
from mopd.orchestrator.weights.transfer import Transfer
from mopd.weights.addresses import address_towards, interface_address
from mopd.weights.carrying import part_memory_bytes
from mopd.weights.group import GroupOrder, GroupStore
from mopd.weights.parts import from_json

FIRST_ATTEMPTS = 2
"""Tries of a first update into whose group nobody comes."""
LOOPBACK = "127.0.0.1"
PROBED_PORT = 9
"""Port for looking up a route; nothing is sent to it."""
Ask = Callable[..., Awaitable[Any]]
"""Function that has all ranks execute a command (``Ranks.ask``)."""


class CannotJoin(UserError):
    """All replicas answer, and none came into a group with the student, or the student has no address for one."""


class GroupTransfer(Transfer):
    """The ranks send to all replicas at once. The group stays as long as the replicas are the same, and is sent only
    once what no step changes; a failure ends it."""

    is_together = True

    def __init__(
        self,
        targets: TransferTargets,
        cfg: BucketsConfig,
        ask: Ask,
        *,
        tensors: str,
        num_senders: int,
        large_bytes: int,
        num_constants: int = 0,
        checks_values: bool = True,
        host: str = "",
    ) -> None:
        """Set up.

        Args:
            tensors: ``to_json`` of every weight of the student, as it will travel.
            num_senders: ranks that send.
            large_bytes: of ``GroupOrder``.
            num_constants: number of the first of ``tensors`` that no step changes.
            checks_values: look for NaN in every update; a verified one always does.
            host: address by which ranks of other machines know this one; empty if there are none.
        """
        super().__init__(targets, verify_every=cfg.verify_every)
        self._cfg, self._ask, self._host = cfg, ask, host
        self._tensors, self._metas = tensors, from_json(json.loads(tensors))
        self._num_senders, self._large_bytes, self._bucket_bytes = num_senders, large_bytes, cfg.bucket_mib * 2**20
        self._num_constants, self._checks_values = num_constants, checks_values
        self._stores = deque[GroupStore](maxlen=2)
        """Stores of the last two groups: a replica that is to hear that it was given up reads it there."""
        self._has_met = False
        """Whether the ranks were told to join a group, and not to leave it since."""
        self._names: Sequence[str] = ()
        """Members of the group behind the ranks, in its order."""
        self._have_constants = self._has_sent = False
        self._num_refused = 0
        """Tries in a row in which all replicas answered, and none came into the group."""

    async def join(self, names: Sequence[str]) -> Failures:
        """Set up the group of exactly these replicas, in this order, unless it stands. ``CannotJoin`` if at the first
        update nobody comes, twice."""
        failures = {} if self._order is not None and names == self._names else await self._meet(names)
        is_alone = len(failures) == len(names) and set(failures.values()) == {"refused"}  # all answered: the network
        self._num_refused = self._num_refused + 1 if is_alone else 0
        if self._num_refused >= FIRST_ATTEMPTS and not self._has_sent:
            raise CannotJoin(self._why_nobody_came())
        return failures

    async def send(self, *, verify: bool) -> Mapping[str, float]:
        """Have the ranks send; return rates and durations, none if they could not."""
        skipped = self._num_constants if self._have_constants else 0
        self._has_sent, began = True, time.monotonic()
        options = {"verify": verify, "checks_values": self._checks_values, "num_skipped": skipped}
        sent = await self._ask("send_weights", **options)
        if sent is None:
            self._order = None  # the ranks have closed the group
            return {}
        self._have_constants = True  # a replica without them is in no group
        num_bytes = sum(meta.num_bytes for meta in self._metas[skipped:])
        return {
            "timing/weights_gather_s": sent["gather_s"],
            "timing/weights_send_s": sent["send_s"],
            "rate/weights_mib_per_s": num_bytes / 2**20 / (time.monotonic() - began),
        }

    def send_constants(self) -> None:
        """Send the constants again with the next update: they may be others now."""
        self._have_constants = False

    async def close(self) -> None:
        """Have the ranks leave the group, until the next update makes another."""
        self._order = None
        if self._has_met:
            self._has_met = False
            await self._ask("leave_weights")

    async def _meet(self, names: Sequence[str]) -> Failures:
        """Leave the group before, and set up one of these replicas; return who failed to join."""
        await self.close()
        timeout_s = self._cfg.timeout_s
        workers = await self._targets.workers(names, timeout_s=timeout_s)
        if gone := [name for name in names if name not in workers]:
            return dict.fromkeys(gone, "lost") | dict.fromkeys(workers, "refused")
        store = self._open_store(timeout_s)
        self._stores.append(store)
        self._has_met = True
        num_receivers = sum(workers.values())
        order = GroupOrder(
            group_id=secrets.token_hex(8),
            host=store.host,
            port=store.port,
            interface=self._cfg.interface or "",
            num_senders=self._num_senders,
            num_receivers=num_receivers,
            bucket_bytes=self._bucket_bytes,
            large_bytes=self._large_bytes,
            timeout_s=timeout_s,
            secret=secrets.token_hex(32),
            memory=await self._share_memory(num_receivers),
        )
        given_up = threading.Event()
        deciding = asyncio.ensure_future(asyncio.to_thread(store.decide, order, given_up))
        joining = asyncio.ensure_future(self._ask("join_weights", order=asdict(order), tensors=self._tensors))
        failures: Failures | None = None
        try:
            failures = await self._targets.join(workers, order, self._tensors.encode())
        finally:
            if failures != {}:
                given_up.set()  # those that came hear that the others will not, and the ranks wait no longer
            await deciding
        if not await joining or failures:
            await self.close()
            return failures or dict.fromkeys(names, "refused")
        self._order, self._names, self._have_constants = order, names, False
        return {}

    def _open_store(self, timeout_s: float) -> GroupStore:
        """Open the store at the address that leads to the engines and the ranks, on this machine's own if none is
        elsewhere.

        Raises:
            CannotJoin: there is no such address.
        """
        try:
            if self._cfg.interface:
                return GroupStore(interface_address(self._cfg.interface), timeout_s)
            hosts = [*self._targets.hosts(), *([self._host] if self._host else [])]
            ways = [address_towards(host, PROBED_PORT) for host in hosts]
            beyond = [way for way in ways if not ipaddress.ip_address(way).is_loopback]
            return GroupStore(beyond[0] if beyond else LOOPBACK, timeout_s)
        except OSError as error:
            raise CannotJoin(
                f"no address for the weights' way to the rollout: {error}; set weight_sync.interface, or "
                "weight_sync.type: http"
            ) from error

    def _why_nobody_came(self) -> str:
        return (
            f"no rollout engine came into a process group with the student at {self._stores[-1].host}, in "
            f"{FIRST_ATTEMPTS} attempts: let all ports through between the machines, set weight_sync.interface to the "
            "network that joins them, or weight_sync.type: http"
        )

    async def _share_memory(self, num_receivers: int) -> str:
        """Return handles of rank 0's memory where engines map it, else an empty text."""
        if not isinstance(self._cfg, IpcConfig):
            return ""
        metas = self._metas, self._metas[self._num_constants :]
        size = max(part_memory_bytes(announced, self._bucket_bytes) for announced in metas)
        handles: str = await self._ask("share_memory", num_bytes=size, num_receivers=num_receivers)
        return handles
