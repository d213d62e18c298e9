"""The student's weights to the rollout's engines over process groups of the student's ranks and all engine workers.

::

    lacking? ──> same replicas as last time: the group stays; others: a new store, engines join ∥ ranks join
      ▲            start (they stop) ──> ranks send parts ──> finish (the new weights answer)
      └── some failed: the group is left, those that answered are tried again, the others are left to ``Repair``

This file holds the order of an update alone: tensors go from the ranks to the engines (``mopd.student.sending``).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

from mopd.base.types import UserError
from mopd.config.weights import BucketsConfig, IpcConfig
from mopd.orchestrator.weights.targets import TransferTargets
from mopd.weights.addresses import address_towards, interface_address
from mopd.weights.carrying import part_memory_bytes
from mopd.weights.group import GroupOrder, GroupStore
from mopd.weights.parts import from_json

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Tries of one update; a replica that fails in all of them is left without the weights."""
FIRST_ATTEMPTS = 2
"""Tries of a first update into whose group nobody comes."""
LOOPBACK = "127.0.0.1"
PROBED_PORT = 9
"""Port for looking up a route; nothing is sent to it."""
Ask = Callable[..., Awaitable[Any]]
"""Function that has all ranks execute a command (``Ranks.ask``)."""


class CannotJoin(UserError):
    """All replicas answer, and none came into a group with the student, or the student has no address for one."""


class Transfer:
    """One update at a time. Belongs to the orchestrator's event loop."""

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
        self._targets, self._cfg, self._ask = targets, cfg, ask
        self._tensors, self._metas = tensors, from_json(json.loads(tensors))
        self._order: GroupOrder | None = None
        self._stores = deque[GroupStore](maxlen=2)
        """Stores of the last two groups: a replica that is to hear that it was given up reads it there."""
        self._has_met = False
        """Whether the ranks were told to join a group, and not to leave it since."""
        self._bucket_bytes = cfg.bucket_mib * 2**20
        self._checks_values = checks_values
        self._names: list[str] = []
        """Members of the group behind the ranks, in its order."""
        self._num_updates, self._has_sent = 0, False
        self._num_constants, self._have_constants = num_constants, False
        self._num_senders, self._large_bytes, self._host = num_senders, large_bytes, host
        self._numbers: dict[str, float] = {}

    def take_numbers(self) -> dict[str, float]:
        """Return the metrics of the last update since the last call."""
        numbers, self._numbers = self._numbers, {}
        return numbers

    async def publish(self, weight_version: int, *, only_missing: bool = False) -> None:
        """Return when every replica that can answers with the student's weights. A group is sent only once what no step
        changes. ``only_missing``: send to those alone that have older weights than the router asks for.

        Raises:
            UserError: a replica's model has other weights.
            CannotJoin: at the first update nobody came into a group, twice.
        """
        asked = None if only_missing else weight_version
        lost: set[str] = set()
        began = time.monotonic()
        for attempt in range(MAX_ATTEMPTS):
            names = [name for name in await self._targets.lacking(asked) if name not in lost]
            if not names:
                break
            verify = attempt > 0 or self._num_updates % self._cfg.verify_every == 0
            failures = await self._attempt(names, weight_version, verify=verify, is_whole=only_missing)
            lost |= {name for name, kind in failures.items() if kind == "lost"}
            if failures:
                await self.close()
            is_alone = attempt + 1 >= FIRST_ATTEMPTS and not self._has_sent and len(failures) == len(names)
            if is_alone and set(failures.values()) == {"refused"}:  # all answered: it is the network
                raise CannotJoin(self._why_nobody_came())
        if left := await self._targets.lacking(asked):
            logger.warning("weights %d did not reach %s", weight_version, ", ".join(left))
        self._num_updates += 1
        if self._numbers:
            self._numbers["timing/weights_update_s"] = time.monotonic() - began
        await self._targets.published(asked)

    async def missing(self) -> Sequence[str]:
        """Return the replicas with older weights than the router asks for, unless an update is on its way to them."""
        await self._targets.hear()
        return [] if self._targets.is_updating else await self._targets.lacking(None)

    def send_constants(self) -> None:
        """Send the constants again with the next update: they may be others now."""
        self._have_constants = False

    async def close(self) -> None:
        """Have the ranks leave the group, until the next update makes another."""
        self._order = None
        if self._has_met:
            self._has_met = False
            await self._ask("leave_weights")

    async def _attempt(self, names: list[str], weight_version: int, *, verify: bool, is_whole: bool) -> dict[str, str]:
        """Try one update; return the replicas that have not got it, with ``refused`` or ``lost``."""
        if failures := await self._meet(names):
            return failures
        assert self._order is not None
        timeout_s = self._cfg.timeout_s
        order = {"group_id": self._order.group_id, "weight_version": weight_version, "timeout_s": timeout_s}
        if failures := await self._targets.start(names, {**order, "verify": verify}):
            return failures
        skipped = self._num_constants if self._have_constants and not is_whole else 0
        self._has_sent = True
        began = time.monotonic()
        options = {"verify": verify, "checks_values": self._checks_values, "num_skipped": skipped}
        sent = await self._ask("send_weights", **options)
        seconds = time.monotonic() - began
        failures, load_s = await self._targets.finish(names, order)
        self._have_constants = not failures
        if sent is None:
            self._order = None  # the ranks have closed it
        else:
            num_bytes = sum(meta.num_bytes for meta in self._metas[skipped:])
            self._numbers = {
                "timing/weights_gather_s": sent["gather_s"],
                "timing/weights_send_s": sent["send_s"],
                "timing/weights_load_s": load_s,
                "rate/weights_mib_per_s": num_bytes / 2**20 / seconds,
            }
        return failures

    async def _meet(self, names: list[str]) -> dict[str, str]:
        """Set up the group of exactly these replicas, in this order, unless it stands; return who failed to join."""
        if self._order is not None and names == self._names:
            return {}
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
        given_up, told = threading.Event(), asdict(order)
        deciding = asyncio.ensure_future(asyncio.to_thread(store.decide, order, given_up))
        joining = asyncio.ensure_future(self._ask("join_weights", order=told, tensors=self._tensors))
        failures: dict[str, str] | None = None
        try:
            failures = await self._targets.join(workers, told, self._tensors.encode())
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
        where = self._stores[-1].host if self._stores else "this machine"
        return (
            f"no rollout engine came into a process group with the student at {where}, in {FIRST_ATTEMPTS} attempts: "
            "let all ports through between the machines, set weight_sync.interface to the network that joins them, or "
            "weight_sync.type: http"
        )

    async def _share_memory(self, num_receivers: int) -> str:
        """Return handles of rank 0's memory where engines map it, else an empty text."""
        if not isinstance(self._cfg, IpcConfig):
            return ""
        metas = self._metas, self._metas[self._num_constants :]
        size = max(part_memory_bytes(announced, self._bucket_bytes) for announced in metas)
        handles: str = await self._ask("share_memory", num_bytes=size, num_receivers=num_receivers)
        return handles
