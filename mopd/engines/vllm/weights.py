"""Commands to vLLM's worker processes that change their weights, and reception of weights by vLLM's weight-transfer
protocol (its other side: ``mopd.engines.vllm.worker``)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mopd.engines.interface import Reception, WeightsLost
from mopd.engines.vllm.adapters import STUDENT_ID
from mopd.weights.group import GroupOrder
from mopd.weights.parts import TensorMeta, to_json

if TYPE_CHECKING:
    from mopd.engines.vllm.engine import VllmEngine


class VllmWorkers:
    """Worker processes of one ``AsyncLLM``."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._sleeping: Literal["no", "cache", "all"] = "no"

    @property
    def is_asleep(self) -> bool:
        """Whether the cache or all memory sleeps. Nothing runs then; ``wake_up`` lets requests run again."""
        return self._sleeping != "no"

    async def sleep(self, *, keeps_weights: bool) -> None:
        """Release the GPU memory; the weights move to host memory or are dropped."""
        self._sleeping = "all"
        await self._llm.sleep(level=1 if keeps_weights else 2)

    async def wake_up(self, *, weights_only: bool) -> None:
        """Allocate all memory that sleeps; with ``weights_only`` that of the weights first."""
        tags = ["weights"] if weights_only else ["kv_cache"] if self._sleeping == "cache" else None
        await self._llm.wake_up(tags)
        self._sleeping = "cache" if weights_only else "no"

    async def score_given(self) -> None:
        """Let the workers answer requests for log-probs at given ids and for hidden states."""
        await self._llm.collective_rpc("mopd_score_given")

    async def take_hidden(self, name: str) -> bytes | None:
        """Return and forget the hidden states of a request; ``None`` if no worker has any."""
        found = await self.tell("mopd_take_hidden", name=name)
        return next((own for own in found if own is not None), None)

    async def tell(self, method: str, **arguments: Any) -> list[Any]:
        """Call ``method`` in every worker and return their answers."""
        return list(await self._llm.collective_rpc(method, kwargs=arguments))

    async def halt(self) -> None:
        """Freeze running requests and drop their keys and values."""
        if not self.is_asleep:
            await self._llm.pause_generation(mode="keep", clear_cache=True)

    async def go_on(self, label: str) -> None:
        """Undo ``halt`` under new weights; tokens drawn from now on carry ``label``."""
        if not await self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache")
        await self._llm.reset_encoder_cache()  # its image features were made by the old weights
        await self._llm.update_weight_version(label)
        if not self.is_asleep:
            await self._llm.resume_generation()


class VllmIncoming:
    """Implements ``Incoming`` (``mopd.engines.interface``) for ``VllmEngine``."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    async def join(self, order: GroupOrder, first_rank: int, metas: Sequence[TensorMeta]) -> None:
        """Let the workers enter a new group. Running requests wait until the group has met."""
        self._engine.require_alive()
        told = {"order": dataclasses.asdict(order), "first_rank": first_rank, "tensors": json.loads(to_json(metas))}
        await self._engine.workers.tell("init_weight_transfer_engine", init_info=told)
        await self._outcomes()

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
        if engine.student_adapter is not None:
            await engine.workers.tell("mopd_put_adapter", lora_id=STUDENT_ID, config=engine.student_adapter.peft_config)
        receptions = await self._outcomes()
        await engine.workers.go_on(str(weight_version))
        return max(receptions, key=lambda reception: reception.load_s)

    async def _outcomes(self) -> list[Reception]:
        """Return the durations of the last update; ``WeightsLost`` if it or a ``join`` failed in a worker."""
        outcomes = await self._engine.workers.tell("mopd_outcome")
        for failure in (outcome.pop("failure") for outcome in outcomes):
            if failure:
                raise WeightsLost(f"{self._engine.name}: {failure}")
        return [Reception(**outcome) for outcome in outcomes]
