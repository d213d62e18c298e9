"""The student's weights for the rollout's replicas, wherever they run, and for those that came back without.

::

    stage ─┬─ by a group:      ranks ── parts (``GroupTransfer``) ──> engines' workers           nothing is left to send
           ├─ by HTTP:         ranks ── parts ──> host memory here ─┬─ send_staged: ``HttpTransfer`` ──> every replica
           └─ in_process:      ranks ── parts ──> host memory here ─┘                                or the engines here
    then the router asks for them; ``Repair`` sends them again, by the same way, to replicas that lack them
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from mopd.config.schema import Recipe
from mopd.config.weights import BucketsConfig, CollectiveConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import OnRunning
from mopd.engines.replicas.router import Router
from mopd.engines.wire.weights import StagedWeights, load_staged, stage_updates
from mopd.launch.failure import rank_0_host
from mopd.orchestrator.ranks import Ranks
from mopd.orchestrator.weights.targets import TransferTargets
from mopd.orchestrator.weights.transfer import CannotJoin, GroupTransfer, HttpTransfer, Transfer
from mopd.placement.interface import KeptAwake

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
LONGEST_PAUSE_S = 30.0
AWAY_PAUSE_S = 5.0
"""Between two looks for a server that takes no requests."""
MAX_PUSHES = 4
"""To one replica in a row, as many as a request gets attempts."""


class GroupWeightSync:
    """Gives versions of the weights to every replica that is up and has older ones, by the way that the recipe names.
    Replicas in this process are loaded directly; servers get what was staged, or what a group brings.

    A server that fails gets no work until a repair reaches it (``Repair``). That every one fails is then no error of
    the update: the requests that follow wait for the repair, and fail with its reason if there is none.
    """

    def __init__(self, router: Router, *, on_running: OnRunning = "finish") -> None:
        """``on_running``: what becomes of responses that are under way (``rollout.on_new_weights``)."""
        self._router = router
        self.targets = TransferTargets(router, on_running=on_running)
        self._http = HttpTransfer(self.targets)
        self._transfer: Transfer = self._http
        self._ranks: Ranks | None = None
        self._tensors = ""
        """JSON of what the ranks send."""
        self._or_http = self._takes_turns = False
        self._newest: Callable[[], int] = lambda: -1
        self._rest: Callable[[], Awaitable[None]] | None = None
        """Rest of an update that ``stage`` has begun."""
        self._turn = asyncio.Lock()
        self.kept_awake: KeptAwake = contextlib.nullcontext
        """Context that is held while weights are sent."""
        self._is_stopped = False

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
            self._transfer = GroupTransfer(self.targets, cfg, ranks.ask, host=rank_0_host() or "", **announced)
            self._or_http = isinstance(cfg, CollectiveConfig) and cfg.or_http

    async def stage(self, weight_version: int) -> None:
        """Take the weights over into this process, or send them all the way by a group; replicas on shared GPUs are
        given theirs when they wake. The student is free then. Raises as ``Transfer.publish``."""
        assert self._ranks is not None
        async with self._ranks.turn:
            if self._transfer.is_together:
                if self._takes_turns:
                    self._rest = partial(self._ask_for, weight_version)
                    return
                try:
                    return await self._transfer.publish(weight_version)
                except CannotJoin as error:
                    if not self._or_http:
                        raise
                    logger.warning("the weights go by HTTP, which is slower, from now on: %s", error)
                    self._transfer = self._http
            # the parts become messages when the student is free
            tensors, frames = await self._ranks.ask_for_frames("weights", tensors=self._tensors)
        self._rest = partial(self._pack_and_send, weight_version, tensors, frames)

    async def send_staged(self) -> None:
        """Return when every replica that can has what was staged. The student may work meanwhile."""
        rest, self._rest = self._rest, None
        if rest is not None:
            await rest()

    def send_constants(self) -> None:
        """Send what no step changes with the next update too: it may be something else now."""
        self._transfer.send_constants()

    def take_numbers(self) -> dict[str, float]:
        """Return the metrics of the last update by a group since the last call."""
        return self._transfer.take_numbers()

    async def close(self) -> None:
        """Have the ranks leave the group."""
        await self._transfer.close()

    async def publish(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """``stage_updates``, in the dtypes of an engine of this process where there is one, and ``send``."""
        here = [engine for engine in self.targets.engines.values() if not isinstance(engine, RemoteEngine)]
        into = here[0].weight_slots if here else {}
        await self.send(stage_updates(weights, weight_version, into=into))

    async def send(self, staged: StagedWeights) -> None:
        """Send by HTTP, or load here. Returns when every replica that can answer has these weights; until then the
        others answer with theirs. Raises as ``Transfer.publish``."""
        if not all(isinstance(engine, RemoteEngine) for engine in self.targets.engines.values()):
            for engine in self.targets.engines.values():
                await load_staged(engine, staged)
            self._router.set_weight_version(staged.weight_version)
            return
        async with self._turn:
            self._http.staged = staged  # first: those before it are the size of a model
        async with self.kept_awake(), self._turn:
            await self._http.publish(staged.weight_version)

    async def send_again(self) -> Sequence[str]:
        """Send the weights of the moment to replicas without those that the router asks for; return whom, without
        those that are away (``TransferTargets.away``). Raises as ``Transfer.publish``."""
        async with self._turn:
            return () if self._is_stopped else await self._repair()

    async def stop(self) -> None:
        """Send no weights from now on: the replicas sleep, and lose theirs."""
        async with self._turn:
            self._is_stopped = True

    async def go_on(self) -> int | None:
        """The replicas are awake, and are sent what was sent last, or the student has; the version that is asked for,
        if there is one. Raises as ``Transfer.publish``."""
        async with self._turn:
            self._is_stopped = False
            await self._repair()
            return self._router.weight_version if self._router.weight_version >= 0 else None

    def watch(self, give_up: Callable[..., None], *, patience_s: float) -> Repair:
        """Begin to watch the group; see ``Repair``."""
        return Repair(self._router, self, give_up, patience_s=patience_s)

    async def _ask_for(self, weight_version: int) -> None:
        """Have requests ask for these weights, which the student has and replicas that wake are given. Returns when
        every replica that can has them."""
        async with self._turn:
            self._router.set_weight_version(weight_version)
        async with self.kept_awake():
            await self.send_again()

    async def _pack_and_send(self, weight_version: int, tensors: str, frames: list[bytes]) -> None:
        await self.send(await asyncio.to_thread(StagedWeights.pack, weight_version, tensors.encode(), frames))

    async def _repair(self) -> Sequence[str]:
        """Send what there is to replicas that need it, between two of the student's commands where its ranks send;
        return whom."""
        await self.targets.hear()
        transfer, ranks = self._transfer, self._ranks
        if not self.targets.lacking(transfer.offer(self._newest())[1]):
            return ()
        async with ranks.turn if ranks is not None and transfer.is_together else contextlib.nullcontext():
            version, asked = transfer.offer(self._newest())
            # where the weights go by another way since, the next look sends them
            lacking = self.targets.lacking(asked) if self._transfer is transfer else ()
            if lacking:
                await transfer.publish(version, asked=asked)
        return lacking


class Repair:
    """Watches a rollout group for replicas without the current weights, and sends these once more."""

    def __init__(
        self, router: Router, sync: GroupWeightSync, give_up: Callable[..., None], *, patience_s: float
    ) -> None:
        """``give_up`` is ``Router.give_up``, or what a placement does instead. It is called for a replica that
        ``MAX_PUSHES`` in a row did not reach, or that takes no requests for ``patience_s``."""
        self._router, self._sync, self._give_up, self._patience_s = router, sync, give_up, patience_s
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop. Servers forget an update that does not end."""
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
            pause_s, lacking = LOOK_EVERY_S, self._lacking()
            failures = {name: failures.get(name, 0) for name in lacking}
            if not lacking:
                away_since = {}
                continue
            try:
                tried = await self._sync.send_again()
            except Exception as error:
                for name in lacking:
                    self._give_up(name, reason=f"the weights could not be sent again: {error}")
                raise
            self._report(tried)
            lacking, now = self._lacking(), asyncio.get_running_loop().time()
            away = {name: reason for name, reason in self._sync.targets.away.items() if name in lacking}
            away_since = {name: away_since.get(name, now) for name in away}
            for name, reason in away.items():
                pause_s = max(pause_s, AWAY_PAUSE_S)
                if now - away_since[name] >= self._patience_s:
                    self._give_up(name, reason=f"{reason}, for {self._patience_s:g} s")
            for name in set(tried) & set(lacking):
                failures[name] = failures.get(name, 0) + 1
                pause_s = max(pause_s, min(2.0 ** failures[name] * LOOK_EVERY_S, LONGEST_PAUSE_S))
                if failures[name] >= MAX_PUSHES:
                    self._give_up(name, reason=f"{failures[name]} pushes of the weights did not reach it")

    def _report(self, tried: Sequence[str]) -> None:
        """Name the replicas that have got the weights."""
        version, engines = self._router.weight_version, self._sync.targets.engines
        for name in tried:
            if name in engines and engines[name].weight_version == version:
                logger.warning("%s has weights %d again", name, version)

    def _lacking(self) -> tuple[str, ...]:
        return self._router.needs_weights if self._router.weight_version >= 0 else ()
