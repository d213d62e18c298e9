"""Servers that the run does not start. They are asked whether they are there, then left to the router's breakers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from mopd.base.types import UserError
from mopd.config.placements import ExternalConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.concurrency import all_or_none
from mopd.engines.interface import EngineError, EngineInfo, EngineRejected, EngineUnavailable
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.engines.torch.loading import read_config
from mopd.placement.interface import GroupPlan
from mopd.serving.address import read_token_file

PAUSE_S = 0.5
PROBE_TIMEOUT_S = 10.0


class ExternalGroup:
    """Implements ``Placement`` for URLs."""

    def __init__(self, plan: GroupPlan) -> None:
        assert isinstance(plan.group.placement, ExternalConfig)
        self.plan = plan
        self.cfg = plan.group.placement
        self._engines: list[Any] = []

    async def start(self) -> list[Replica]:
        """Connect to every server, and wait for those that are still loading."""
        token = None if self.cfg.token_file is None else read_token_file(Path(self.cfg.token_file))
        self._engines = [self._connect(i, url, token) for i, url in enumerate(self.cfg.urls)]
        infos = await all_or_none(map(self._wait_for, self._engines))
        return [
            Replica(name=self.plan.replica_name(i), engine=engine, limits=info.limits)
            for i, (engine, info) in enumerate(zip(self._engines, infos, strict=True))
        ]

    def watch(self, router: Router) -> None:
        """Do nothing: the servers are watched where they were started."""

    async def close(self) -> None:
        """Close connections; the servers go on."""
        engines, self._engines = self._engines, []
        for engine in engines:
            await engine.close()

    def _connect(self, index: int, url: str, token: str | None) -> Any:
        routing = self.plan.group.routing
        name = self.plan.replica_name(index)
        if self.cfg.protocol == "mopd":
            return RemoteEngine(url, token=token, timeout_s=routing.request_timeout_s, name=name)
        from mopd.engines.clients.openai import OpenAIScorer

        config = read_config(Path(self.plan.model)).get_text_config()
        return OpenAIScorer(
            url,
            served_model_name=self.cfg.served_model_name,
            vocab_size=int(config.vocab_size),
            max_positions=int(config.max_position_embeddings),
            token=token,
            timeout_s=routing.request_timeout_s,
            name=name,
        )

    async def _wait_for(self, engine: Any) -> EngineInfo:
        """Wait until the server is healthy, and return what it says of itself."""
        timeout_s = self.cfg.startup_timeout_s
        deadline = time.monotonic() + timeout_s
        where = f"{self.plan.key}.placement.urls: {engine.url}"
        while True:
            try:
                await engine.health(timeout_s=min(PROBE_TIMEOUT_S, timeout_s))
                info: EngineInfo = await engine.info()
                return info
            except EngineRejected as error:
                raise UserError(f"{where} answers, but refuses: {error}: check the URL and token_file") from error
            except EngineUnavailable as error:
                if time.monotonic() + PAUSE_S > deadline:
                    raise UserError(
                        f"{where} is not healthy after {timeout_s:g} s: {error}: start the server, correct the URL, or "
                        "raise placement.startup_timeout_s"
                    ) from error
            except EngineError as error:
                raise UserError(f"{where}: {error}") from error
            await asyncio.sleep(PAUSE_S)
