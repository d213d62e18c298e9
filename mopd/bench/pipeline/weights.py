"""Real weights for a scenario that moves some: copied, unpacked and checked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch
from torch import Tensor

from mopd.engines.interface import OnRunning
from mopd.placement.weights import GroupWeightSync
from mopd.replicas.router import Router
from mopd.wire.messages import decode
from mopd.wire.weights import StagedWeights, Staging, WeightChunk, stage_updates

TENSOR_MB = 4


def make_weights(num_mb: int) -> dict[str, Tensor]:
    """fp32 tensors of ``TENSOR_MB`` megabytes each, ``num_mb`` together, touched."""
    size = TENSOR_MB * 10**6 // 4
    return {f"layers.{i}.weight": torch.full((size,), float(i)) for i in range(num_mb // TENSOR_MB)}


class UnpackedWeights(GroupWeightSync):
    """The way of staged weights to stand-in engines: unpacked and checked as one server does it, then swapped in."""

    def __init__(self, router: Router, *, on_running: OnRunning, slots: Mapping[str, Tensor]) -> None:
        super().__init__(router, on_running=on_running)
        self._slots = slots

    async def send(self, staged: StagedWeights) -> None:
        """Returns when the engines draw with them."""
        await asyncio.to_thread(self._unpack, staged)
        await self.ask_for(staged.weight_version)

    async def ask_for(self, weight_version: int) -> None:
        """Have the engines draw as with weights of this version, without any bytes."""
        await super().send(stage_updates([], weight_version))

    def _unpack(self, staged: StagedWeights) -> None:
        staging = Staging(self._slots, staged.begin)
        for body in staged.bodies:
            staging.add(decode(body, WeightChunk))
        staging.finish(staged.commit("continue"))
