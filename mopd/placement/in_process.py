"""Engines in this process, on trainer rank 0. Nothing to watch: they end with the run."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from mopd.engines.torch.engine import TorchEngine
from mopd.placement.engine_loading import load_engine
from mopd.placement.interface import GroupPlan
from mopd.replicas.interface import Replica
from mopd.replicas.router import Router

HEAD_START_S = 0.05
"""Loading blocks the event loop: groups with processes of their own start these first."""


class InProcessGroup:
    """Implements ``Placement``."""

    def __init__(self, plan: GroupPlan, device: torch.device) -> None:
        self.plan = plan
        self._device = device
        self._engines: list[Any] = []

    async def start(self) -> list[Replica]:
        """See ``Placement.start``. ``UserError`` from an engine that cannot load its model."""
        await asyncio.sleep(HEAD_START_S)
        for file in self.plan.files:
            self._engines.append(await load_engine(file, self._device))
        return [Replica(name=self.plan.replica_name(i), engine=engine) for i, engine in enumerate(self._engines)]

    def watch(self, router: Router) -> None:
        """See ``Placement.watch``."""

    async def close(self) -> None:
        """See ``Placement.close``."""
        engines, self._engines = self._engines, []
        for engine in engines:
            if not isinstance(engine, TorchEngine):
                await engine.close()
