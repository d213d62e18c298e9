"""The rollout's replicas as receivers of weight updates: which of them lack weights, and the messages to each
(``mopd.engines.wire.weights``), whatever carries the tensors."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import EngineBusy, EngineError, EngineRejected, OnRunning, StaleWeights
from mopd.engines.replicas.router import Router
from mopd.engines.wire.messages import MessageT, encode
from mopd.engines.wire.weights import (
    MAX_TIMEOUT_S,
    WeightFinish,
    WeightJoin,
    WeightReceived,
    WeightStart,
    WeightVersion,
)
from mopd.weights.group import GroupOrder

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

    def __init__(self, router: Router, *, on_running: OnRunning) -> None:
        """Set up. ``on_running``: what becomes of responses that are under way (``rollout.on_new_weights``)."""
        self.router, self._on_running = router, on_running
        self.away: dict[str, str] = {}
        """Lost replicas that did not answer in the last ``hear``, each with the reason."""
        self._silent: set[Any] = set()
        """Engines lost in an update that have not answered since: each would cost the others a deadline again."""

    @property
    def engines(self) -> dict[str, Any]:
        """Clients of all replicas that are not gone, by name."""
        return {replica.name: replica.engine for replica in self.router.replicas}

    def lacking(self, weight_version: int) -> list[str]:
        """Return the replicas with weights older than these, except those that are being restarted and those that were
        lost and not ``heard`` again. Replicas of one machine are neighbours, so that a chain through all enters each
        machine once."""
        engines = self.engines
        known = [name for name in self.router.lacking(weight_version) if engines[name] not in self._silent]
        return sorted(known, key=lambda name: _host_of(engines[name]))

    async def hear(self) -> None:
        """Ask lost replicas whether they are there again."""
        silent = {name: engine for name, engine in self.engines.items() if engine in self._silent}
        self._silent = set(silent.values())

        async def ask(engine: RemoteEngine) -> str:
            try:
                await engine.health(timeout_s=HEAR_S)
            except EngineError as error:
                return one_line(error) or "no answer"
            self._silent.discard(engine)
            return ""

        reasons = await asyncio.gather(*map(ask, silent.values()))
        self.away = {name: reason for name, reason in zip(silent, reasons, strict=True) if reason}

    async def workers(self, names: Sequence[str], *, timeout_s: float) -> dict[str, int]:
        """Return the number of members that each of these replicas will be, in their order, without those that do not
        say so in time."""
        engines = self.engines

        async def ask(engine: RemoteEngine) -> int:
            try:
                return (await asyncio.wait_for(engine.info(), timeout_s)).num_workers
            except (EngineError, asyncio.TimeoutError) as error:
                logger.warning("weights to rollout replica %s: %s", engine.name, one_line(error) or "no answer")
                self._silent.add(engine)
                return 0

        there = [name for name in names if name in engines]
        counts = await asyncio.gather(*(ask(engines[name]) for name in there))
        return {name: count for name, count in zip(there, counts, strict=True) if count}

    async def join(self, workers: Mapping[str, int], order: GroupOrder, tensors: bytes) -> Failures:
        """Announce ``tensors`` to replicas, which enter the group in the order of ``workers`` behind the senders.

        Raises:
            UserError: a replica's model has other weights than ``tensors`` says.
        """
        array = np.frombuffer(tensors, dtype=np.uint8)
        ranks = itertools.accumulate(workers.values(), initial=order.num_senders)
        bodies = {
            name: encode(WeightJoin(first_rank=rank, tensors=array, **asdict(order)))
            for name, rank in zip(workers, ranks, strict=False)
        }
        return (await self.tell("join", bodies, WeightVersion, order.timeout_s))[0]

    async def start(self, names: Sequence[str], order: GroupOrder, weight_version: int, *, verify: bool) -> Failures:
        """Stop these replicas and return when all that can wait for the first part. From then on the router gives them
        no work until they have the new weights."""
        drain_s = self.router.request_timeout_s if self._on_running == "finish" else 0.0
        patience_s = min(drain_s + order.timeout_s, MAX_TIMEOUT_S)
        message = WeightStart(
            group_id=order.group_id,
            weight_version=weight_version,
            verify=verify,
            on_running=self._on_running,
            patience_s=patience_s,
        )
        engines = self.engines
        for name in engines.keys() & set(names):
            engines[name].allow(weight_version)
            engines[name].weight_version = -1
        return (await self.tell("start", dict.fromkeys(names, encode(message)), WeightVersion, patience_s))[0]

    async def finish(self, names: Sequence[str], order: GroupOrder, weight_version: int) -> tuple[Failures, float]:
        """Ask, after the last part, which replicas have the weights; those answer with them from now on. Returns the
        failures, and the longest time in seconds that a replica took to load."""
        message = encode(WeightFinish(group_id=order.group_id, weight_version=weight_version))
        failures, received = await self.tell("finish", dict.fromkeys(names, message), WeightReceived, order.timeout_s)
        engines = self.engines
        for name in engines.keys() & received.keys():
            engines[name].weight_version = weight_version
        return failures, max((answer.load_s for answer in received.values()), default=0.0)

    def hosts(self) -> list[str]:
        """Return the names or addresses of the replicas' machines, as their URLs say them."""
        return sorted(set(map(_host_of, self.engines.values())))

    async def tell(
        self, step: str, bodies: Mapping[str, bytes], answer: type[MessageT], timeout_s: float
    ) -> tuple[Failures, dict[str, MessageT]]:
        """Send each replica its message of one step, all at the same time; return those that failed, and what the
        others answered. A replica that is gone by now counts as lost.

        Raises:
            UserError: a replica refuses the weights as such.
        """
        engines = self.engines
        there = [name for name in bodies if name in engines]
        calls = [
            engines[name].post(
                f"/v1/weights/{step}", bodies[name], answer, ANSWER_BYTES, timeout_s=timeout_s + MARGIN_S
            )
            for name in there
        ]
        outcomes = await (_until_one_fails(calls) if step == "join" else asyncio.gather(*calls, return_exceptions=True))
        failures: Failures = dict.fromkeys(bodies.keys() - engines.keys(), "lost")
        received: dict[str, MessageT] = {}
        for name, outcome in zip(there, outcomes, strict=True):
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


def _host_of(engine: Any) -> str:
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
