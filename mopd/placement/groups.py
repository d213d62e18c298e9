"""All groups of a run: planned together, started together, ended together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mopd.base.files.temporary import TemporaryFolder
from mopd.base.types import UserError
from mopd.config.groups import VllmEngineConfig, hosts_of
from mopd.config.machine.places import engine_groups
from mopd.config.placements import ExternalConfig, InProcessConfig, LocalConfig, RayConfig, RegisteredConfig
from mopd.config.schema import Recipe
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.clients.sglang import SglangClient
from mopd.engines.concurrency import all_or_none
from mopd.engines.interface import EngineError, EngineInfo, EngineRejected, EngineUnavailable
from mopd.engines.replicas.identity import Needs
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.engines.torch.loading import read_config
from mopd.placement.engine_file import rollout_file, teacher_file
from mopd.placement.engine_loading import load_engine
from mopd.placement.gpus import places_here
from mopd.placement.interface import ROLLOUT, GroupPlan, Placement, WeightSource, WeightWatch
from mopd.placement.registered import RegisteredGroup
from mopd.placement.server_group import LocalLauncher, ServerGroup
from mopd.placement.sharing.pool import SharedPool
from mopd.placement.sharing.rollout import RolloutMemory
from mopd.placement.sharing.turns import GpuTurns, MemoryHolder
from mopd.report.run_files import RunFiles
from mopd.serving.address import read_token_file

if TYPE_CHECKING:
    from mopd.placement.ray.cluster import RayCluster

HEAD_START_S = 0.05
"""Loading blocks the event loop: groups with processes of their own start these first."""
PAUSE_S = 0.5
PROBE_TIMEOUT_S = 10.0


def plan_groups(recipe: Recipe, only: Sequence[str] | None = None) -> dict[str, GroupPlan]:
    """The groups of a recipe by key, the rollout first; ``only`` picks some keys."""
    plans: dict[str, GroupPlan] = {}
    for key, group in engine_groups(recipe).items():
        if only is not None and key not in only and not any(f"teachers.{own}" in only for own in _of(recipe, key)):
            continue
        count = 0 if isinstance(group.placement, (ExternalConfig, RegisteredConfig)) else group.replicas
        is_rollout = key == ROLLOUT
        name = key.removeprefix("teachers.")
        model = recipe.student.model if is_rollout else recipe.teachers[name].model
        plans[key] = GroupPlan(
            key=key,
            kind="rollout" if is_rollout else "teacher",
            name=name,
            model=model,
            group=group,
            needs=Needs.of(recipe, None) if is_rollout else Needs.of_all(recipe, recipe.on_group_of(name)),
            files=tuple(rollout_file(recipe, i) if is_rollout else teacher_file(recipe, name, i) for i in range(count)),
        )
    return plans


def _of(recipe: Recipe, key: str) -> tuple[str, ...]:
    """Return the teachers that a group answers for."""
    return () if key == ROLLOUT else recipe.on_group_of(key.removeprefix("teachers."))


class Groups:
    """Replicas of every group of a recipe. An asynchronous context manager: ``start`` and ``close``.

    Example::

        async with Groups(recipe, log_dir=run.logs, device=device) as groups:
            routers = {key: Router(...groups.replicas(key)...) for key in groups.keys}
            groups.watch(routers, {ROLLOUT: weights})
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        log_dir: Path | None,
        device: torch.device,
        only: Sequence[str] | None = None,
        student: MemoryHolder | None = None,
    ) -> None:
        """Starts nothing. Raises ``UserError`` where GPUs do not suffice.

        Args:
            log_dir: for the servers' logs; ``None``: a temporary folder that goes with ``close``.
            device: of ``torch`` engines in this process.
            only: keys of the groups that are wanted; ``None``: all. Some may be shared.
            student: gives back the GPUs that the rollout shares; ``None``: they are free.
        """
        self.plans = plan_groups(recipe, only)
        self.teachers, self.hosts = recipe.teachers, hosts_of(recipe.teachers)
        """The recipe's teachers, and of each the one whose group of replicas answers for it."""
        self._places = places_here({key: plan.group for key, plan in self.plans.items()}).require()
        self._log_dir, self._device = log_dir, device
        self._registered = RunFiles(Path(recipe.run_dir)).replicas
        self._temporary: TemporaryFolder | None = None
        self._placements: dict[str, Placement] = {}
        self._replicas: dict[str, list[Replica]] = {}
        self._weight_watches: list[WeightWatch] = []
        self._cluster: RayCluster | None = None
        self._pools: dict[str, SharedPool] = {}
        self._rollout_memory = RolloutMemory()
        self.turns: GpuTurns | None = None
        """Turns of student and rollout, where they share GPUs."""
        if ROLLOUT in self.plans and recipe.shares_gpus and student is not None:
            self.turns = GpuTurns(student, self._rollout_memory)

    @property
    def keys(self) -> tuple[str, ...]:
        """``rollout`` and ``teachers.NAME``, as wanted."""
        return tuple(self.plans)

    def replicas(self, key: str) -> list[Replica]:
        """The replicas that ``start`` brought up."""
        return list(self._replicas[key])

    def kept_awake(self, key: str) -> AbstractAsyncContextManager[None]:
        """To be held while a group's router works: the group is awake within (``shared_pool``, ``share_gpus_with``)."""
        if key == ROLLOUT and self.turns is not None:
            return self.turns.kept_awake(ROLLOUT)
        placement = self.plans[key].group.placement
        if isinstance(placement, RayConfig) and placement.shared_pool is not None:
            return self._pools[placement.shared_pool].kept_awake(key)
        return contextlib.nullcontext()

    async def start(self) -> None:
        """Start every group at once.

        Raises:
            UserError: a plan does not fit, or a replica cannot be started; nothing is left running.
        """
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def __aenter__(self) -> Groups:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def watch(self, routers: Mapping[str, Router], weights: Mapping[str, WeightSource]) -> None:
        """Begin to restart replicas that die. Those that lack the weights that their group's source in ``weights`` sent
        last get them once more."""
        for key, router in routers.items():
            self._placements[key].watch(router)
        if ROLLOUT in weights and self.turns is not None:
            self._rollout_memory.weights = weights[ROLLOUT]
            weights[ROLLOUT].kept_awake = functools.partial(self.kept_awake, ROLLOUT)
        for key, source in weights.items():
            group, placement = self.plans[key].group, self._placements[key]
            if not isinstance(group.placement, InProcessConfig):
                give_up = placement.lose if isinstance(placement, RegisteredGroup) else routers[key].give_up
                self._weight_watches.append(source.watch(give_up, patience_s=group.routing.request_timeout_s))

    async def close(self) -> None:
        """End every replica that was started; may be called twice."""
        if self.turns is not None:
            await self.turns.close()
        watches, self._weight_watches = self._weight_watches, []
        for watch in watches:
            await watch.close()
        placements, self._placements = self._placements, {}
        outcomes = await asyncio.gather(*(p.close() for p in placements.values()), return_exceptions=True)
        cluster, self._cluster = self._cluster, None  # before it ends: one that fails to must not be ended again
        if cluster is not None:
            outcomes += await asyncio.gather(cluster.close(), return_exceptions=True)
        if self._temporary is not None:
            self._temporary.close()
            self._temporary = None
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _start(self) -> None:
        if self._log_dir is None:
            self._temporary = TemporaryFolder("mopd-logs-")
            self._log_dir = self._temporary.path
        self._share_pools()
        on_ray = [plan for plan in self.plans.values() if isinstance(plan.group.placement, RayConfig)]
        if on_ray:
            from mopd.placement.ray.cluster import RayCluster

            self._cluster = await RayCluster.open(on_ray, log_dir=self._log_dir, gpus=self._places.ray_gpus)
        for key, plan in self.plans.items():
            self._placements[key] = self._place(plan, self._log_dir)
        replicas = await all_or_none(placement.start() for placement in self._placements.values())
        self._replicas = dict(zip(self._placements, replicas, strict=True))

    def _place(self, plan: GroupPlan, log_dir: Path) -> Placement:
        placement = plan.group.placement
        if isinstance(placement, InProcessConfig):
            return InProcessGroup(plan, self._device)
        if isinstance(placement, ExternalConfig):
            return ExternalGroup(plan)
        if isinstance(placement, RegisteredConfig):
            return RegisteredGroup(plan, self._registered)
        if isinstance(placement, LocalConfig):
            gpus = [tenant.gpus for tenant in self._places.of(plan.key)]
            group = ServerGroup(
                plan, LocalLauncher(plan, log_dir=log_dir, gpus=gpus), kept_awake=lambda: self.kept_awake(plan.key)
            )
            if plan.group.shares_gpus:
                self._rollout_memory.group = group
            return group
        assert self._cluster is not None
        return ServerGroup(plan, self._cluster.launcher(plan), kept_awake=lambda: self.kept_awake(plan.key))

    def _share_pools(self) -> None:
        """Join groups with one ``shared_pool``."""
        for key, plan in self.plans.items():
            placement, engine = plan.group.placement, plan.group.engine
            if not isinstance(placement, RayConfig) or placement.shared_pool is None:
                continue
            assert isinstance(engine, VllmEngineConfig)
            pool = self._pools.setdefault(placement.shared_pool, SharedPool(placement.shared_pool))
            sleep, wake = (functools.partial(self._all, key, act) for act in (RemoteEngine.sleep, RemoteEngine.wake_up))
            pool.add(key, share=engine.gpu_memory_utilization, sleep=sleep, wake=wake)

    async def _all(self, key: str, act: Callable[[RemoteEngine], Awaitable[None]]) -> None:
        """``act`` on every replica of a group that works."""
        placement = self._placements[key]
        assert isinstance(placement, ServerGroup)
        await asyncio.gather(*map(act, placement.engines))


class _Unwatched:
    """Engines that nothing here restarts."""

    def __init__(self, plan: GroupPlan) -> None:
        self.plan = plan
        self._engines: list[Any] = []

    def watch(self, router: Router) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Close the engines of this process, or the connections to servers, which go on."""
        engines, self._engines = self._engines, []
        for engine in engines:
            await engine.close()


class InProcessGroup(_Unwatched):
    """Implements ``Placement`` in this process. Nothing to watch: these engines end with the run."""

    def __init__(self, plan: GroupPlan, device: torch.device) -> None:
        super().__init__(plan)
        self._device = device

    async def start(self) -> list[Replica]:
        """Load every engine. ``UserError`` from one that cannot load its model."""
        await asyncio.sleep(HEAD_START_S)
        for file in self.plan.files:
            self._engines.append(await load_engine(file, self._device))
        # Without limits: an engine of this process gets whole batches, cut the same way in every run.
        return [
            Replica(name=self.plan.replica_name(i), engine=engine, tells=False)
            for i, engine in enumerate(self._engines)
        ]


class ExternalGroup(_Unwatched):
    """Implements ``Placement`` for URLs of servers that the run does not start. They are asked whether they are there,
    then left to the router's breakers, and watched where they were started."""

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan)
        assert isinstance(plan.group.placement, ExternalConfig)
        self.cfg = plan.group.placement

    async def start(self) -> list[Replica]:
        """Connect to every server, and wait for those that are still loading."""
        token = None if self.cfg.token_file is None else read_token_file(Path(self.cfg.token_file))
        self._engines = [self._connect(i, url, token) for i, url in enumerate(self.cfg.urls)]
        infos = await all_or_none(map(self._wait_for, self._engines))
        return [
            Replica(name=self.plan.replica_name(i), engine=engine, limits=info.limits)
            for i, (engine, info) in enumerate(zip(self._engines, infos, strict=True))
        ]

    def _connect(self, index: int, url: str, token: str | None) -> Any:
        routing = self.plan.group.routing
        name = self.plan.replica_name(index)
        if self.cfg.protocol == "mopd":
            return RemoteEngine(url, token=token, timeout_s=routing.request_timeout_s, name=name)
        if self.cfg.protocol == "sglang":
            folder = Path(self.plan.model)
            return SglangClient(url, folder, token=token, timeout_s=routing.request_timeout_s, name=name)
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
