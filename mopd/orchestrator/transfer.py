"""The student's weights to the rollout's engines over process groups that the student's ranks lead.

::

    lacking? ──> same replicas as last time: the group stays; others: a new store, join ∥ ranks join
      ▲            start (they stop) ──> ranks send buckets ──> finish (the new weights answer)
      └── some failed: the group is left, those that answered are tried again, the others are left to ``Repair``

This file holds the order of an update alone: tensors go from the ranks to the engines (``mopd.student.sending``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

from mopd.config.weights import BucketsConfig, IpcConfig
from mopd.engines.replicas.transfer import TransferTargets
from mopd.weights.buckets import from_json
from mopd.weights.group import GroupOrder, GroupStore
from mopd.weights.mapped import mapped_bytes
from mopd.weights.stages import SenderSignals

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Tries of one update; a replica that fails in all of them is left without the weights."""
Ask = Callable[..., Awaitable[Any]]
"""Function that has all ranks execute a command (``Ranks.ask``)."""


class Transfer:
    """One update at a time. Belongs to the orchestrator's event loop."""

    def __init__(
        self,
        targets: TransferTargets,
        cfg: BucketsConfig,
        ask: Ask,
        *,
        num_workers: int,
        tensors: str,
        num_constants: int = 0,
        shares: Sequence[int] = (),
        checks_values: bool = True,
    ) -> None:
        """Set up.

        Args:
            num_workers: processes of one replica, each a member of the group.
            tensors: ``to_json`` of every weight of the student, as it will travel.
            num_constants: number of the first of ``tensors`` that no step changes.
            shares: number of ``tensors`` that each pipeline stage sends, where each sends its own.
            checks_values: look for NaN in every update; a verified one always does.
        """
        self._targets, self._cfg, self._ask, self._num_workers = targets, cfg, ask, num_workers
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
        self._num_updates = self._num_sends = 0
        self._num_constants, self._have_constants = num_constants, False
        self._shares = tuple(shares)
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
        if left := await self._targets.lacking(asked):
            logger.warning("weights %d did not reach %s", weight_version, ", ".join(left))
        self._num_updates += 1
        if self._numbers:
            self._numbers["timing/weights_update_s"] = time.monotonic() - began
        await self._targets.published(asked)

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
        self._num_sends += 1
        began = time.monotonic()
        options = {"verify": verify, "checks_values": self._checks_values, "num_skipped": skipped}
        sent = await self._ask("send_weights", update=self._num_sends, **options)
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
        store = GroupStore(timeout_s)
        self._stores.append(store)
        self._has_met = True
        num_receivers = len(names) * self._num_workers
        order = GroupOrder(
            group_id=secrets.token_hex(8),
            port=store.port,
            world_size=1 + num_receivers,
            bucket_bytes=self._bucket_bytes,
            timeout_s=timeout_s,
            secret=secrets.token_hex(32),
            memory=await self._share_memory(num_receivers),
            shares=self._shares,
        )
        words, told = SenderSignals(order, store), asdict(order)
        joining = asyncio.ensure_future(self._ask("join_weights", order=told, tensors=self._tensors))
        failures: dict[str, str] | None = None
        try:
            failures = await self._targets.join(names, told, self._tensors.encode())
        finally:
            if failures != {}:
                words.call_off()  # those that came hear that the others will not, and the ranks wait no longer
        if not await joining or failures:
            await self.close()
            return failures or dict.fromkeys(names, "refused")
        self._order, self._names, self._have_constants = order, names, False
        return {}

    async def _share_memory(self, num_receivers: int) -> str:
        """Return handles of rank 0's memory where engines map it, else an empty text."""
        if not isinstance(self._cfg, IpcConfig):
            return ""
        metas = self._metas, self._metas[self._num_constants :]
        size = max(mapped_bytes(announced, self._bucket_bytes) for announced in metas)
        handles: str = await self._ask("share_memory", num_bytes=size, num_receivers=num_receivers)
        return handles
