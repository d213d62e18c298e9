"""One update of the rollout's weights: the order of its steps, whatever carries the tensors (``Transfer``), and the
carriers: ``HttpTransfer``, which works everywhere, and ``GroupTransfer``, a process group of the student's ranks and
all engine workers, whose tensors go from the ranks to the engines (``mopd.student.sending``).

::

    who lacks them? ──> join ──> start (they stop) ──> send ──> finish (the new weights answer)
      ▲
      └── some failed: those that answered are tried again, the others are left to ``Repair``

    carrier    together         join                        send
    a group    all replicas     they and the ranks meet     ranks ── parts ──> engines' workers
    HTTP       each by itself   parts follow, aside         nothing is left
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from mopd.base.types import UserError
from mopd.config.weights import BucketsConfig, IpcConfig
from mopd.engines.concurrency import all_or_none
from mopd.engines.wire.weights import StagedWeights, WeightVersion
from mopd.orchestrator.weights.targets import Failures, TransferTargets
from mopd.weights.addresses import address_towards, interface_address
from mopd.weights.carrying import part_memory_bytes
from mopd.weights.group import GroupOrder, GroupStore
from mopd.weights.parts import from_json

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Tries of one update; a replica that fails in all of them is left without the weights."""


class Transfer(ABC):
    """Brings weights to the replicas that have older ones, one update at a time. Belongs to the orchestrator's event
    loop."""

    is_together = False
    """Whether all replicas of an update take each step at the same time: none has the weights if one fails."""

    def __init__(self, targets: TransferTargets, *, verify_every: int = 1) -> None:
        self._targets, self._verify_every = targets, verify_every
        self._order: GroupOrder | None = None
        """Order of what the replicas join, once there is one."""
        self._num_updates = 0
        self._numbers: dict[str, float] = {}

    @property
    def order(self) -> GroupOrder:
        """Order of what the replicas have joined."""
        assert self._order is not None
        return self._order

    def take_numbers(self) -> dict[str, float]:
        """Return the metrics of the last update since the last call; by HTTP there are none."""
        numbers, self._numbers = self._numbers, {}
        return numbers

    async def publish(self, weight_version: int, *, asked: int | None = None) -> None:
        """Return when every replica that can answers with these weights, and have requests ask for those of ``asked``
        from now on (default: these). Replicas that have those of ``asked`` get none.

        Raises:
            UserError: a replica's model has other weights.
            CannotJoin: at the first update nobody came into a group, twice.
        """
        asked, lost, began = weight_version if asked is None else asked, set[str](), time.monotonic()
        for attempt in range(MAX_ATTEMPTS):
            names = [name for name in self._targets.lacking(asked) if name not in lost]
            if not names:
                break
            verify = attempt > 0 or self._num_updates % self._verify_every == 0
            update = partial(self._attempt, weight_version=weight_version, verify=verify)
            found = await all_or_none(map(update, [names] if self.is_together else [[name] for name in names]))
            failures = {name: kind for failed in found for name, kind in failed.items()}
            lost |= {name for name, kind in failures.items() if kind == "lost"}
            if failures:
                await self.close()
        if left := {*self._targets.lacking(asked), *lost}:
            logger.warning("weights %d did not reach %s", weight_version, ", ".join(sorted(left)))
        self._num_updates += 1
        if self._numbers:
            self._numbers["timing/weights_update_s"] = time.monotonic() - began
        self._targets.router.set_weight_version(asked)

    async def _attempt(self, names: Sequence[str], weight_version: int, verify: bool) -> Failures:
        """Try one update of replicas that go together; return those that have not got it."""
        targets = self._targets
        if failures := await self.join(names):
            return failures
        order = self.order
        if failures := await targets.start(names, order, weight_version, verify=verify):
            return failures
        numbers = await self.send(verify=verify)
        failures, load_s = await targets.finish(names, order, weight_version)
        self._numbers = {**numbers, "timing/weights_load_s": load_s} if numbers else {}
        return failures

    @abstractmethod
    async def join(self, names: Sequence[str]) -> Failures:
        """Do all that comes before these replicas stop, and set ``_order``; return those that cannot go on."""

    def offer(self, newest: int) -> tuple[int, int]:
        """Return the version that can be sent now, where the student has the ``newest``, and the oldest one that a
        replica needs not be sent it for."""
        return newest, self._targets.router.weight_version

    async def send(self, *, verify: bool) -> Mapping[str, float]:
        """Bring the tensors to the replicas that joined, which wait for them; return metrics, if there are any. By HTTP
        the parts are there, and each was compared with its digest when it came."""
        return {}

    def send_constants(self) -> None:  # noqa: B027 - by HTTP every update has them
        """Send what no step changes again with the next update."""

    async def close(self) -> None:  # noqa: B027 - by HTTP nobody is in a group
        """Leave what was joined, until the next update joins anew."""


class HttpTransfer(Transfer):
    """From host memory here to each replica by itself, at its own pace, while the ranks and the engines go on."""

    staged: StagedWeights | None = None
    """The weights that are sent; ``None``: there are none yet."""

    def offer(self, newest: int) -> tuple[int, int]:
        """What is staged, to replicas that have older weights."""
        version = -1 if self.staged is None else self.staged.weight_version
        return version, version

    async def join(self, names: Sequence[str]) -> Failures:
        """Send the list of tensors and all parts, which the server keeps aside."""
        assert self.staged is not None
        staged, timeout_s = self.staged, self._targets.router.request_timeout_s
        self._order = replace(staged.order, timeout_s=timeout_s)
        failures = await self._targets.join(dict.fromkeys(names, 1), self._order, staged.tensors)
        for body in staged.bodies:
            if failures:
                break
            failures, _ = await self._targets.tell("part", dict.fromkeys(names, body), WeightVersion, timeout_s)
        return failures


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
