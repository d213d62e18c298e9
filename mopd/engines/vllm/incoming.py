"""Reception of weights into a vLLM engine's workers, by vLLM's weight-transfer protocol."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mopd.engines.interface import Reception, WeightsLost
from mopd.weights.group import GroupOrder
from mopd.weights.parts import TensorMeta, to_json

if TYPE_CHECKING:
    from mopd.engines.vllm.engine import VllmEngine


class VllmIncoming:
    """Implements ``Incoming`` (``mopd.engines.interface``) for ``VllmEngine``."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    async def join(self, order: GroupOrder, first_rank: int, metas: Sequence[TensorMeta]) -> None:
        """Let the workers enter a new group. Running requests wait until the group has met."""
        self._engine.require_alive()
        told = {"order": dataclasses.asdict(order), "first_rank": first_rank, "tensors": json.loads(to_json(metas))}
        await self._engine.workers.tell("init_weight_transfer_engine", init_info=told)
        await self._require_success()

    async def receive(
        self, weight_version: int, *, verify: bool, patience_s: float, ready: Callable[[], object]
    ) -> Reception:
        """Replace all weights by what the group sends. Running requests are frozen; after a failure they stay frozen
        until weights arrive."""
        self._engine.require_alive()
        work = self._receive(weight_version, {"verify": verify, "patience_s": patience_s}, ready)
        return await self._engine.replace_weights(work, weight_version)

    async def leave(self) -> None:
        """Do nothing: workers that wait hear no call, and leave the group when vLLM's processes end."""

    async def _receive(self, weight_version: int, told: dict[str, Any], ready: Callable[[], object]) -> Reception:
        engine = self._engine
        await engine.workers.halt()
        # vLLM's protocol: start, update, finish. A worker's error is read afterwards, see
        # `mopd.engines.vllm.worker`.
        await engine.workers.tell("start_weight_update")
        ready()
        await engine.workers.tell("update_weights", update_info=told)
        await engine.workers.tell("finish_weight_update")
        await self._require_success()
        receptions = [Reception(**given) for given in await engine.workers.tell("mopd_received")]
        await engine.workers.go_on(str(weight_version))
        return max(receptions, key=lambda reception: reception.load_s)

    async def _require_success(self) -> None:
        failures = [failure for failure in await self._engine.workers.tell("mopd_transfer_failure") if failure]
        if failures:
            raise WeightsLost(f"{self._engine.name}: {failures[0]}")
