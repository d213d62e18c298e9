"""The student's weights for a group of rollout replicas, wherever they run, and for those that came back without."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from torch import Tensor

from mopd.engines.clients.remote import RemoteEngine, push_weights
from mopd.engines.interface import EngineRejected, EngineUnavailable
from mopd.replicas.router import Router
from mopd.types import UserError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
LONGEST_PAUSE_S = 30.0
MAX_PUSHES = 4
"""To one replica in a row, as many as a request gets attempts."""

Republish = Callable[[Callable[[], bool]], Awaitable[None]]
"""``republish(is_needed)``: asks when the student is free, and if so sends its published weights once more. Does
nothing when newer ones are about to be published."""


class GroupWeightSync:
    """Publishes one version of the weights to every replica that is up and lacks it, at once. Knows names and tensors,
    not where they come from.

    A server that fails gets no work until a repair reaches it (``Repair``). That every one fails is then no error of
    the push: the requests that follow wait for the repair, and fail with its reason if there is none.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    async def publish(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """Returns when every replica that can answer has ``weight_version``; reads the stream to its end.

        Raises an engine's refusal (names, shapes, values, a broken update rule); that of a server as ``UserError``.
        """
        # First: requests from now on are for this version, whichever replica has it when.
        self._router.set_weight_version(weight_version)
        lacking = set(self._router.needs_weights)
        engines: list[Any] = [replica.engine for replica in self._router.replicas if replica.name in lacking]
        if not engines:
            for _ in weights:  # a collective operation: the other ranks take part
                pass
        elif isinstance(engines[0], RemoteEngine):
            await _push(engines, weights, weight_version)
        else:
            # Each holds the whole set before it replaces a weight; several share one, as a stream is read once.
            source = weights if len(engines) == 1 else list(weights)
            for engine in engines:
                await engine.load_weights(source, weight_version)
                if engine.weight_version != weight_version:
                    raise RuntimeError(
                        f"a rollout replica answers with weights {engine.weight_version} after {weight_version} "
                        "was sent"
                    )
        self._router.set_weight_version(weight_version)


async def _push(replicas: list[RemoteEngine], weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
    errors = await push_weights(replicas, weights, weight_version)
    for replica, error in zip(replicas, errors, strict=True):
        if error is not None:
            logger.warning("rollout replica %s did not take weights %d: %s", replica.name, weight_version, error)
    if all(errors):
        logger.warning("no rollout replica took weights %d", weight_version)
    for error in errors:
        if isinstance(error, EngineRejected):
            raise UserError(f"weights {weight_version} of the student were refused: {error}") from error
        if error is not None and not isinstance(error, EngineUnavailable):
            raise error


class Repair:
    """Watches a rollout group for replicas without the current weights, and has them sent once more."""

    def __init__(self, router: Router, republish: Republish) -> None:
        """A replica that ``MAX_PUSHES`` in a row did not reach is removed."""
        self._router, self._republish = router, republish
        self._push: asyncio.Future[None] | None = None
        self._was_sent = False
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, but let a push that has begun end: other ranks take part in it."""
        self._task.cancel()
        waited = [self._task] if self._push is None else [self._task, self._push]
        for outcome in await asyncio.gather(*waited, return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.error("weights could not be sent again", exc_info=outcome)

    async def _run(self) -> None:
        failures: dict[str, int] = {}
        pause_s = LOOK_EVERY_S
        while True:
            await asyncio.sleep(pause_s)
            lacking = self._lacking()
            failures = {name: failures.get(name, 0) for name in lacking}
            pause_s = LOOK_EVERY_S
            if not lacking:
                continue
            self._was_sent = False
            self._push = asyncio.ensure_future(self._republish(self._is_needed))
            try:
                await asyncio.shield(self._push)
            except Exception as error:
                for name in lacking:
                    self._router.remove(name, reason=f"the weights could not be sent again: {error}")
                raise
            if not self._was_sent:  # a publish was under way, or is about to be
                continue
            for name in set(self._lacking()) & set(lacking):
                failures[name] += 1
                if failures[name] >= MAX_PUSHES:
                    self._router.remove(name, reason=f"{failures[name]} pushes of the weights did not reach it")
                pause_s = min(2.0 ** failures[name] * LOOK_EVERY_S, LONGEST_PAUSE_S)
            for replica in self._router.replicas:
                engine: Any = replica.engine
                if replica.name in lacking and engine.weight_version == self._router.weight_version:
                    logger.warning("%s has weights %d again", replica.name, engine.weight_version)

    def _is_needed(self) -> bool:
        """Asked when the student is free: a publish that was under way may have done the work."""
        self._was_sent = bool(self._lacking())
        return self._was_sent

    def _lacking(self) -> tuple[str, ...]:
        return self._router.needs_weights if self._router.weight_version >= 0 else ()
