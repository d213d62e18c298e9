"""One update of the rollout's weights: the order of its steps, whatever carries the tensors (``Transfer``), and the
carrier that works everywhere (``HttpTransfer``; the other one: ``mopd.orchestrator.weights.meeting``).

::

    who lacks them? ──> join ──> start (they stop) ──> send ──> finish (the new weights answer)
      ▲
      └── some failed: those that answered are tried again, the others are left to ``Repair``

    carrier    together         join                        send
    a group    all replicas     they and the ranks meet     ranks ── parts ──> engines' workers
    HTTP       each by itself   parts follow, aside         nothing is left
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from mopd.engines.concurrency import all_or_none
from mopd.engines.wire.transfer import WeightVersion
from mopd.engines.wire.weights import StagedWeights
from mopd.orchestrator.weights.targets import Failures, TransferTargets
from mopd.weights.group import GroupOrder

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

    @abstractmethod
    async def send(self, *, verify: bool) -> Mapping[str, float]:
        """Bring the tensors to the replicas that joined, which wait for them; return metrics, if there are any."""

    @abstractmethod
    async def close(self) -> None:
        """Leave what was joined, until the next update joins anew."""


class HttpTransfer(Transfer):
    """From host memory here to each replica by itself, at its own pace, while the ranks and the engines go on."""

    staged: StagedWeights | None = None
    """The weights that are sent; ``None``: there are none yet."""

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

    async def send(self, *, verify: bool) -> Mapping[str, float]:
        """Do nothing: the parts are there, and each was compared with its digest when it came."""
        return {}

    async def close(self) -> None:
        """Do nothing: nobody is in a group."""
