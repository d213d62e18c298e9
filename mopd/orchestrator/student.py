"""Student on all its ranks, as the controller, the checks and the checkpointer ask it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mopd.base.types import DomainSums, MicroBatchPlan, SampleMeta
from mopd.config.schema import Recipe
from mopd.config.views import RefreshConfig
from mopd.conversion.models.reading import read_dims
from mopd.data.packing import packing_rules
from mopd.engines.wire.weights import StagedWeights
from mopd.orchestrator.ranks import Ranks
from mopd.orchestrator.weights.sync import GroupWeightSync
from mopd.placement.sharing.turns import GpuTurns

logger = logging.getLogger(__name__)


class StudentGroup:
    """The student behind the link. Its weights go to the rollout as ``GroupWeightSync`` sends them."""

    def __init__(
        self,
        recipe: Recipe,
        ranks: Ranks,
        facts: Mapping[str, Any],
        weights: GroupWeightSync | None,
        turns: GpuTurns | None = None,
        *,
        refreshed: Mapping[str, GroupWeightSync] = MappingProxyType({}),
    ) -> None:
        """Set up. ``facts`` is rank 0's answer to ``join``; ``weights``: ``None`` without a rollout; ``turns``: of GPUs
        that student and rollout share; ``refreshed``: of the teachers of ``recipe.refreshed``."""
        dims = read_dims(Path(recipe.student.model))
        self.vocab_size = dims.vocab_size
        """Tokens of the model's vocabulary, without padding."""
        self.dp_size = recipe.student.parallel.data_parallel_size
        self.packing = packing_rules(recipe.student, dims, on_gpu=facts["is_on_gpu"])
        self.weight_version = 0
        """Optimizer steps so far."""
        self._ranks, self._weights, self._turns = ranks, weights, turns
        self._refreshed = {name: (recipe.refreshed[name], sync) for name, sync in refreshed.items()}
        self._tensors: str = facts["announced"]["tensors"] if refreshed else ""
        """JSON of what the ranks send to teachers."""
        if weights is not None:
            weights.attach(
                ranks,
                recipe,
                facts["announced"],
                takes_turns=turns is not None,
                newest=lambda: self.weight_version,
            )

    async def forward_backward(self, plan: MicroBatchPlan, *, diagnostics: bool) -> dict[str, DomainSums]:
        """Compute loss and gradients of one step; return sums per domain over all ranks. The student's turn on shared
        GPUs lasts until ``optim_step``."""
        if self._turns is not None:
            await self._turns.begin("student")
        sums = await self._ask("forward_backward", plan=plan.to_json(), diagnostics=diagnostics)
        return {domain: DomainSums(**one) for domain, one in sums.items()}

    async def optim_step(self) -> dict[str, float]:
        """Clip, check, step. Returns ``grad_norm``, ``lr``, rank 0's peak memory, and what the last update of the
        rollout's weights took where they go by a group."""
        answer = await self._ask("optim_step")
        self.weight_version = answer["weight_version"]
        if self._turns is not None:
            self._turns.end("student")
        values: dict[str, float] = answer["values"]
        return values if self._weights is None else values | self._weights.take_numbers()

    async def logprobs(self, samples: Sequence[SampleMeta], *, temperature: float) -> list[Tensor]:
        """Return the student's log-probs of each sample's response tokens, [R] fp32."""
        metas = [asdict(sample) for sample in samples]
        async with self._own_turn():
            _, rows = await self._ranks.ask_for_frames("logprobs", samples=metas, temperature=temperature)
        return [torch.frombuffer(bytearray(row), dtype=torch.float32) if row else torch.empty(0) for row in rows]

    async def expect_step(self) -> None:
        """Announce that all of a step's responses are drawn: shared GPUs may come back while they are scored."""
        if self._turns is not None:
            self._turns.expect("student")

    async def publish(self, weight_version: int) -> None:
        """Stage the weights and send them, to teachers that are the student too. Done once, as a run begins."""
        await self.stage(weight_version)
        await self.send()
        for name, (own, _) in self._refreshed.items():
            if every := weight_version % own.every_steps:
                logger.warning(
                    "teachers.%s goes on with the weights of step %d: those of step %d, which it had, are in no "
                    "checkpoint", name, weight_version, weight_version - every,
                )  # fmt: skip
        await self._give(weight_version, [*self._refreshed.values()])

    async def refresh(self, step: int) -> None:
        """Give the weights of ``step`` to the teachers whose turn it is (``refresh.every_steps``)."""
        await self._give(step, [one for one in self._refreshed.values() if step % one[0].every_steps == 0])

    async def _give(self, step: int, teachers: Sequence[tuple[RefreshConfig, GroupWeightSync]]) -> None:
        """Take the weights, and each average of them, over once, and send them to all of these teachers. They stay in
        host memory: a replica that is started again gets what the others have, while the ranks' weights are newer."""
        for ema in dict.fromkeys(own.ema for own, _ in teachers):
            async with self._ranks.turn:
                tensors, frames = await self._ranks.ask_for_frames("weights", tensors=self._tensors, ema=ema)
            staged = await asyncio.to_thread(StagedWeights.pack, step, tensors.encode(), frames)
            for own, sync in teachers:
                if own.ema == ema:
                    await sync.send(staged)

    async def stage(self, weight_version: int) -> None:
        """Take the weights over into this process, or send them all the way by a group; replicas on shared GPUs are
        given theirs when they wake. The student is free then. Without a rollout nothing is staged or sent."""
        if self._weights is not None:
            await self._weights.stage(weight_version)

    async def send(self) -> None:
        """Return when every rollout replica that can has the staged weights. The student may work meanwhile."""
        if self._weights is not None:
            await self._weights.send_staged()

    async def save(self, folder: Path, state: Mapping[str, Any], *, is_async: bool) -> None:
        """Write model, optimizer and schedule of all ranks into ``folder``, with the JSON-able ``state``; when
        ``is_async``, return once all is copied, and write beside what comes next."""
        async with self._own_turn():
            await self._ranks.ask("save", folder=str(folder), state=dict(state), is_async=is_async)

    async def is_saving(self) -> bool:
        """Return whether ``finish_save`` would wait."""
        return bool(await self._ask("is_saving"))

    async def finish_save(self) -> None:
        """Return when what an asynchronous ``save`` writes is whole; what went wrong ends the run, on every rank."""
        await self._ask("finish_save")

    async def load(self, folder: Path, *, cure: str = "") -> dict[str, Any]:
        """Read what ``save`` wrote, at this run's layout; returns its ``state``. ``cure`` ends the line of an error, on
        every rank."""
        async with self._own_turn():
            answer = await self._ranks.ask("load", folder=str(folder), cure=cure)
        self.weight_version = answer["weight_version"]
        if self._weights is not None:
            self._weights.send_constants()
        state: dict[str, Any] = answer["state"]
        return state

    async def save_hf(self, folder: Path) -> None:
        """Write the student as a Hugging Face folder. Raises as ``StudentWorker.save_hf``."""
        async with self._own_turn():
            await self._ranks.ask("save_hf", folder=str(folder))

    async def close(self) -> None:
        """Return when the ranks have executed their commands, and have left the group of the weights."""
        await self._ranks.settle()
        if self._weights is not None:
            await self._weights.close()

    async def _ask(self, name: str, **kwargs: Any) -> Any:
        async with self._ranks.turn:
            return await self._ranks.ask(name, **kwargs)

    @asynccontextmanager
    async def _own_turn(self) -> AsyncIterator[None]:
        """Keep the student's memory on shared GPUs, and other commands from coming between."""
        async with nullcontext() if self._turns is None else self._turns.kept_awake("student"), self._ranks.turn:
            yield
