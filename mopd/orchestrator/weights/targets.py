"""The rollout's replicas as receivers of a process group: which of them lack weights, and the messages to each.

Handles names, numbers and texts only: the ranks, which have the weights, are other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import EngineBusy, EngineError, EngineRejected, OnRunning, StaleWeights
from mopd.engines.replicas.router import Router
from mopd.engines.wire.messages import Message, MessageT, encode
from mopd.engines.wire.transfer import WeightFinish, WeightJoin, WeightReceived, WeightStart, WeightVersion

logger = logging.getLogger(__name__)

ANSWER_BYTES = 2**16
HEAR_S = 2.0
"""Seconds for a lost replica to answer that it is there."""
MARGIN_S = 5.0
"""Seconds for an answer to come back beyond the deadline that its message carries."""
Failures = dict[str, str]
"""Replica -> ``refused`` (it answered, and can be asked anew) or ``lost``."""


class TransferTargets:
    """Receivers of weight updates. Belongs to the router's event loop."""

    def __init__(self, router: Router, *, on_running: OnRunning, drain_s: float) -> None:
        """Set up. ``drain_s``: longest time that running responses may take."""
        self._router, self._on_running = router, on_running
        self._drain_s = drain_s if on_running == "finish" else 0.0
        self.is_updating = False
        """Whether an update is in progress: replicas without weights are about to get them."""
        self._silent: set[RemoteEngine] = set()
        """Replicas lost in an update that have not answered since: each would cost the student a deadline again."""

    async def lacking(self, weight_version: int | None) -> list[str]:
        """Return the replicas with weights older than these (``None``: than those the router requires), except those
        that are being restarted and those that were lost and not ``heard`` again. Replicas of one machine are
        neighbours, so that a chain through all enters each machine once."""
        names = self._router.needs_weights if weight_version is None else self._router.lacking(weight_version)
        engines = {replica.name: replica.engine for replica in self._router.replicas}
        known = [name for name in names if engines[name] not in self._silent]
        return sorted(known, key=lambda name: host_of(engines[name]))

    async def hear(self) -> None:
        """Ask lost replicas whether they are there again."""
        self._silent.intersection_update(self._engines([replica.name for replica in self._router.replicas]))

        async def ask(engine: RemoteEngine) -> None:
            with contextlib.suppress(EngineError):  # still silent
                await engine.health(timeout_s=HEAR_S)
                self._silent.discard(engine)

        await asyncio.gather(*map(ask, tuple(self._silent)))

    async def workers(self, names: Sequence[str], *, timeout_s: float) -> dict[str, int]:
        """Return the number of members that each of these replicas will be, in their order, without those that do not
        say so in time."""
        engines: dict[str, Any] = {replica.name: replica.engine for replica in self._router.replicas}

        async def ask(engine: RemoteEngine) -> int:
            try:
                async with asyncio.timeout(timeout_s):
                    return (await engine.info()).num_workers
            except (EngineError, TimeoutError) as error:
                logger.warning("weights to rollout replica %s: %s", engine.name, one_line(error) or "no answer")
                self._silent.add(engine)
                return 0

        there = [name for name in names if name in engines]
        counts = await asyncio.gather(*(ask(engines[name]) for name in there))
        return {name: count for name, count in zip(there, counts, strict=True) if count}

    async def join(self, workers: Mapping[str, int], order: Mapping[str, Any], tensors: bytes) -> Failures:
        """Let replicas into the group, in the order of ``workers`` behind the senders. ``order``: fields of
        ``WeightJoin``.

        Raises:
            UserError: a replica's model has other weights than ``tensors`` says.
        """
        self.is_updating = True
        array = np.frombuffer(tensors, dtype=np.uint8)
        before = [0, *itertools.accumulate(workers.values())]

        def message(place: int) -> WeightJoin:
            return WeightJoin(first_rank=order["num_senders"] + before[place], tensors=array, **order)

        failures, _ = await self._tell([*workers], "join", message, WeightVersion, order["timeout_s"])
        return failures

    async def start(self, names: Sequence[str], order: Mapping[str, Any]) -> Failures:
        """Stop these replicas and return when all that can wait for the first bucket. ``order``: ``group_id``,
        ``weight_version``, ``verify``, ``timeout_s``."""
        self.is_updating = True
        patience_s = self._drain_s + order["timeout_s"]
        message = WeightStart(
            group_id=order["group_id"],
            weight_version=order["weight_version"],
            verify=order["verify"],
            on_running=self._on_running,
            patience_s=patience_s,
        )
        for engine in self._engines(names):
            engine.allow(message.weight_version)
            engine.weight_version = -1  # the router gives it no work until it has the new ones
        failures, _ = await self._tell(names, "start", lambda place: message, WeightVersion, patience_s)
        return failures

    async def finish(self, names: Sequence[str], order: Mapping[str, Any]) -> tuple[Failures, float]:
        """Ask, after the last bucket, which replicas have the weights; those answer with them from now on.

        Returns the failures, and the longest time in seconds that a replica took to load. ``order``: ``group_id``,
        ``weight_version``, ``timeout_s``.
        """
        version = order["weight_version"]
        message = WeightFinish(group_id=order["group_id"], weight_version=version)
        failures, received = await self._tell(
            names, "finish", lambda place: message, WeightReceived, order["timeout_s"]
        )
        for engine in self._engines(received):
            engine.weight_version = version
        return failures, max((answer.load_s for answer in received.values()), default=0.0)

    async def published(self, weight_version: int | None) -> None:
        """End the update: requests now require these weights (``None``: those of before, which more replicas have)."""
        self.is_updating = False
        self._router.set_weight_version(self._router.weight_version if weight_version is None else weight_version)

    def hosts(self) -> list[str]:
        """Return the names or addresses of the replicas' machines, as their URLs say them."""
        return sorted({host_of(replica.engine) for replica in self._router.replicas})

    def _engines(self, names: Sequence[str] | Mapping[str, Any]) -> list[RemoteEngine]:
        engines: list[Any] = [replica.engine for replica in self._router.replicas if replica.name in names]
        return engines

    async def _tell(
        self,
        names: Sequence[str],
        step: str,
        message: Callable[[int], Message],
        answer: type[MessageT],
        timeout_s: float,
    ) -> tuple[Failures, dict[str, MessageT]]:
        """Send one message to each replica at the same time; a replica that is gone by now counts as lost."""
        engines: dict[str, Any] = {replica.name: replica.engine for replica in self._router.replicas}
        there = [(place, name) for place, name in enumerate(names) if name in engines]
        calls = [
            engines[name].post(
                f"/v1/weights/{step}", encode(message(place)), answer, ANSWER_BYTES, timeout_s=timeout_s + MARGIN_S
            )
            for place, name in there
        ]
        outcomes = await (_until_one_fails(calls) if step == "join" else asyncio.gather(*calls, return_exceptions=True))
        failures: Failures = dict.fromkeys(set(names) - engines.keys(), "lost")
        received: dict[str, MessageT] = {}
        for (_, name), outcome in zip(there, outcomes, strict=True):
            if isinstance(outcome, EngineRejected):
                raise UserError(f"the student's weights were refused: {outcome}") from outcome
            if isinstance(outcome, EngineError):
                logger.warning("weights to rollout replica %s, %s: %s", name, step, outcome)
                failures[name] = "refused" if isinstance(outcome, (StaleWeights, EngineBusy)) else "lost"
                if failures[name] == "lost":
                    self._silent.add(engines[name])
            elif isinstance(outcome, asyncio.CancelledError):
                failures[name] = "refused"
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                received[name] = outcome
        return failures, received


def host_of(engine: Any) -> str:
    """Return the host in a remote engine's URL."""
    return urlsplit(engine.url).hostname or ""


async def _until_one_fails(calls: Sequence[Coroutine[Any, Any, MessageT]]) -> list[MessageT | BaseException]:
    """Return the outcome of each call; ``CancelledError`` for those in progress when another failed, which would wait
    for it."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    if tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
