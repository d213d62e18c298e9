"""The student's weights for the rollout's replicas, wherever they run, and for those that came back without.

::

    stage ─┬─ by a group:      ranks ── parts (``Transfer``) ──> engines' workers           nothing is left to send
           ├─ by HTTP:         ranks ── parts ──> host memory here ─┬─ send_staged ──> every replica without them
           └─ in_process:      ranks ── parts ──> host memory here ─┘                  or the engines here
    then the router asks for them; ``Repair`` sends them again, by the same way, to replicas that lack them
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor

from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.config.schema import Recipe
from mopd.config.weights import BucketsConfig, CollectiveConfig
from mopd.engines.clients.remote import RemoteEngine, push_staged
from mopd.engines.interface import EngineRejected, EngineUnavailable, EngineUnreachable, OnRunning, TakesWeights
from mopd.engines.replicas.router import Router
from mopd.engines.wire.weights import StagedWeights, stage_updates
from mopd.launch.failure import rank_0_host
from mopd.orchestrator.ranks import Ranks
from mopd.orchestrator.weights.targets import TransferTargets
from mopd.orchestrator.weights.transfer import CannotJoin, Transfer
from mopd.placement.interface import KeptAwake

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
LONGEST_PAUSE_S = 30.0
AWAY_PAUSE_S, HEALTH_TIMEOUT_S = 5.0, 10.0
"""Between pushes to a server that takes no requests, and for it to say whether it does."""
MAX_PUSHES = 4
"""To one replica in a row, as many as a request gets attempts."""


class GroupWeightSync:
    """Gives versions of the weights to every replica that is up and has older ones, at once, by the way that the recipe
    names. Replicas in this process are loaded directly; servers get what was staged, or what a group brings.

    A server that fails gets no work until a repair reaches it (``Repair``). That every one fails is then no error of
    the push: the requests that follow wait for the repair, and fail with its reason if there is none.
    """

    def __init__(self, router: Router, *, on_running: OnRunning = "finish") -> None:
        """``on_running``: what becomes of responses that are under way (``rollout.on_new_weights``)."""
        self._router, self._on_running = router, on_running
        self._ranks: Ranks | None = None
        self._tensors = ""
        """JSON of what the ranks send."""
        self._transfer: Transfer | None = None
        """Way of the weights by a group of ranks and engines; ``None``: they go by HTTP, or into this process."""
        self._or_http = self._takes_turns = False
        self._newest: Callable[[], int] = lambda: -1
        self._rest: Callable[[], Awaitable[None]] | None = None
        """Rest of an update that ``stage`` has begun."""
        self._turn = asyncio.Lock()
        self.kept_awake: KeptAwake = contextlib.nullcontext
        """Context that is held while weights are sent."""
        self._is_stopped = False
        self._sent: StagedWeights | None = None
        """Weights that the router asks for."""

    def attach(
        self,
        ranks: Ranks,
        recipe: Recipe,
        announced: Mapping[str, Any],
        *,
        takes_turns: bool,
        newest: Callable[[], int],
    ) -> None:
        """Say where weights come from; by ``recipe.weight_sync`` they go.

        Args:
            announced: what the ranks will send (``mopd.student.sending.announced``).
            takes_turns: student and rollout share GPUs: replicas are given their weights when they wake.
            newest: returns the version of the ranks' weights, which may be newer than what the router asks for.
        """
        self._ranks, self._takes_turns, self._newest = ranks, takes_turns, newest
        cfg, self._tensors = recipe.weight_sync, announced["tensors"]
        if isinstance(cfg, BucketsConfig):
            drain_s = recipe.rollout.routing.request_timeout_s
            targets = TransferTargets(self._router, on_running=self._on_running, drain_s=drain_s)
            self._transfer = Transfer(targets, cfg, ranks.ask, host=rank_0_host() or "", **announced)
            self._or_http = isinstance(cfg, CollectiveConfig) and cfg.or_http

    async def stage(self, weight_version: int) -> None:
        """Take the weights over into this process, or send them all the way by a group; replicas on shared GPUs are
        given theirs when they wake. The student is free then. Raises as ``Transfer.publish``."""
        assert self._ranks is not None
        async with self._ranks.turn:
            if self._transfer is None:
                await self._take_over(self._ranks, weight_version)
            elif self._takes_turns:
                self._rest = partial(self._ask_for, weight_version)
            else:
                await self._send_by_group(self._ranks, self._transfer, weight_version)

    async def send_staged(self) -> None:
        """Return when every replica that can has what was staged. The student may work meanwhile."""
        rest, self._rest = self._rest, None
        if rest is not None:
            await rest()

    def send_constants(self) -> None:
        """Send what no step changes with the next update too: it may be something else now."""
        if self._transfer is not None:
            self._transfer.send_constants()

    def take_numbers(self) -> dict[str, float]:
        """Return the metrics of the last update by a group since the last call."""
        return {} if self._transfer is None else self._transfer.take_numbers()

    async def close(self) -> None:
        """Have the ranks leave the group."""
        if self._transfer is not None:
            await self._transfer.close()

    async def publish(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """``stage_updates`` and ``send``."""
        await self.send(stage_updates(weights, weight_version))

    async def send(self, staged: StagedWeights) -> None:
        """Returns when every replica that can answer has these weights; until then the others answer with theirs.

        Raises a server's refusal (names, shapes, values) as ``UserError``.
        """
        if not all(isinstance(replica.engine, RemoteEngine) for replica in self._router.replicas):
            await self._load(staged)
            return
        async with self._turn:
            self._sent = staged  # first: those before it are the size of a model
        async with self.kept_awake(), self._turn:
            await self._push(staged, self._router.lacking(staged.weight_version))

    async def send_again(self) -> Sequence[str]:
        """Send the weights that the router asks for to replicas without them; returns whom. Raises as ``send``."""
        async with self._turn:
            if self._is_stopped:
                return ()
            if self._transfer is not None:
                return await self._send_again_by_group(self._transfer)
            lacking = self._router.needs_weights
            if self._sent is None or not lacking:
                return ()
            await self._push(self._sent, lacking)
            return lacking

    async def _ask_for(self, weight_version: int) -> None:
        """Have requests ask for these weights, which the student has and replicas that wake are given. Returns when
        every replica that can has them."""
        async with self._turn:
            self._router.set_weight_version(weight_version)
        async with self.kept_awake():
            await self.send_again()

    async def stop(self) -> None:
        """Send no weights from now on: the replicas sleep, and lose theirs."""
        async with self._turn:
            self._is_stopped = True

    async def go_on(self) -> int | None:
        """The replicas are awake, and are sent what was sent last, or the student has; the version that is asked for,
        if there is one. Raises as ``send``."""
        async with self._turn:
            self._is_stopped = False
            if self._transfer is not None:
                await self._send_again_by_group(self._transfer)
                return self._router.weight_version if self._router.weight_version >= 0 else None
            if self._sent is None:
                return None
            await self._push(self._sent, self._router.lacking(self._sent.weight_version))
            return self._sent.weight_version

    def watch(self, give_up: Callable[..., None], *, patience_s: float) -> Repair:
        """Begin to watch the group; see ``Repair``."""
        return Repair(self._router, self, give_up, patience_s=patience_s)

    async def _take_over(self, ranks: Ranks, weight_version: int) -> None:
        """Take the parts over that rank 0 hands on. They become messages when the student is free."""
        tensors, frames = await ranks.ask_for_frames("weights", tensors=self._tensors)

        async def pack_and_send() -> None:
            await self.send(await asyncio.to_thread(StagedWeights.pack, weight_version, tensors.encode(), frames))

        self._rest = pack_and_send

    async def _send_by_group(self, ranks: Ranks, transfer: Transfer, weight_version: int) -> None:
        """Send by the group; where nobody can come into it and the recipe allows it, by HTTP from now on."""
        try:
            await transfer.publish(weight_version)
        except CannotJoin as error:
            if not self._or_http:
                raise
            logger.warning("the weights go by HTTP, about 0.5 GB/s, from now on: %s", error)
            self._transfer = None
            await self._take_over(ranks, weight_version)

    async def _send_again_by_group(self, transfer: Transfer) -> Sequence[str]:
        """Send the student's weights of the moment to replicas without those that are asked for; return whom."""
        assert self._ranks is not None
        lacking = await transfer.missing()
        if lacking:
            async with self._ranks.turn:
                if self._transfer is transfer:  # else the weights go by HTTP since, and the next look sends them
                    await transfer.publish(self._newest(), only_missing=True)
        return lacking

    async def _load(self, staged: StagedWeights) -> None:
        """Into engines of this process, without a message."""
        engines = [cast(TakesWeights, replica.engine) for replica in self._router.replicas]
        # Each holds the whole set before it replaces a weight; several share one, which is unpacked once.
        stream = staged.unpacked() if staged.bodies else ()
        weights = stream if len(engines) == 1 else list(stream)
        for engine in engines:
            await engine.load_weights(weights, staged.weight_version)
            if engine.weight_version != staged.weight_version:
                raise RuntimeError(
                    f"a rollout replica answers with weights {engine.weight_version} after {staged.weight_version} was "
                    "sent"
                )
        self._router.set_weight_version(staged.weight_version)

    async def _push(self, staged: StagedWeights, names: Sequence[str]) -> None:
        """Send to replicas, log those that fail, and have the router ask for these weights from now on."""
        replicas: list[Any] = [replica.engine for replica in self._router.replicas if replica.name in names]
        errors = await push_staged(replicas, staged, on_running=self._on_running)
        version = staged.weight_version
        for replica, error in zip(replicas, errors, strict=True):
            if error is not None:
                logger.warning("rollout replica %s did not take weights %d: %s", replica.name, version, error)
        if errors and all(errors):
            logger.warning("no rollout replica took weights %d", version)
        for error in errors:
            if isinstance(error, EngineRejected):
                raise UserError(f"weights {version} of the student were refused: {error}") from error
            if error is not None and not isinstance(error, EngineUnavailable):
                raise error
        self._router.set_weight_version(version)


class Repair:
    """Watches a rollout group for replicas without the current weights, and sends these once more."""

    def __init__(
        self, router: Router, sync: GroupWeightSync, give_up: Callable[..., None], *, patience_s: float
    ) -> None:
        """``give_up`` is ``Router.remove``, or what a placement does instead. It is called for a replica that
        ``MAX_PUSHES`` in a row did not reach, or that takes no requests for ``patience_s``."""
        self._router, self._sync, self._give_up, self._patience_s = router, sync, give_up, patience_s
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop. Servers forget a push that does not end."""
        self._task.cancel()
        (outcome,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(outcome, Exception):
            logger.error("weights could not be sent again", exc_info=outcome)

    async def _run(self) -> None:
        failures: dict[str, int] = {}
        away_since: dict[str, float] = {}
        pause_s = LOOK_EVERY_S
        while True:
            await asyncio.sleep(pause_s)
            lacking = self._lacking()
            failures = {name: failures.get(name, 0) for name in lacking}
            pause_s = LOOK_EVERY_S
            if not lacking:
                away_since = {}
                continue
            try:
                tried = set(await self._sync.send_again())
            except Exception as error:
                for name in lacking:
                    self._give_up(name, reason=f"the weights could not be sent again: {error}")
                raise
            now, away = asyncio.get_running_loop().time(), await self._away(tried & set(self._lacking()))
            away_since = {name: away_since.get(name, now) for name in away}
            for name in tried & set(self._lacking()):
                if name in away:
                    if now - away_since[name] >= self._patience_s:
                        self._give_up(name, reason=f"{away[name]}, for {self._patience_s:g} s")
                    pause_s = max(pause_s, AWAY_PAUSE_S)
                    continue
                failures[name] = failures.get(name, 0) + 1
                if failures[name] >= MAX_PUSHES:
                    self._give_up(name, reason=f"{failures[name]} pushes of the weights did not reach it")
                pause_s = max(pause_s, min(2.0 ** failures[name] * LOOK_EVERY_S, LONGEST_PAUSE_S))
            for replica in self._router.replicas:
                engine: Any = replica.engine
                if replica.name in tried and engine.weight_version == self._router.weight_version:
                    logger.warning("%s has weights %d again", replica.name, engine.weight_version)

    async def _away(self, names: Collection[str]) -> dict[str, str]:
        """Return those of ``names`` that take no requests now, with their reasons."""
        found: dict[str, str] = {}

        async def look(name: str, engine: Any) -> None:
            try:
                await engine.health(timeout_s=HEALTH_TIMEOUT_S)
            except EngineUnreachable as error:
                found[name] = one_line(error)
            except EngineUnavailable:
                pass  # a push says more

        await asyncio.gather(*(look(one.name, one.engine) for one in self._router.replicas if one.name in names))
        return found

    def _lacking(self) -> tuple[str, ...]:
        return self._router.needs_weights if self._router.weight_version >= 0 else ()
