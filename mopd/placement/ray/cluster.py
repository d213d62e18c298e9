"""Servers on a Ray cluster: one placement group per group of replicas, one bundle (so one node) per replica.

::

    this process ──> agent (actor in a bundle, holds its CPUs and GPUs) ──> reaper ──> server
         └────────────── scores, samples and weights: HTTP, not Ray ─────────────────────┘

Groups that share a pool share its placement group and its agents.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.config.placements import RayConfig
from mopd.placement.ending import LAST_CALL_TIMEOUT_S
from mopd.placement.interface import GroupPlan
from mopd.placement.process import ServerCommand, ServerState
from mopd.placement.ray.agent import Agent
from mopd.placement.ray.connection import connect, disconnect
from mopd.text import last_line
from mopd.types import UserError

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
"""Of a call to an agent, which never waits for anything."""
CALLS = 2
"""Calls without an answer after which an agent is lost: one may be late because a training step blocks our own loop."""
RELEASE_S = 10.0
"""For a cluster to notice that what it shows as taken was given back: a run that ended just before."""
LAUNCHES = 2
"""Tries to start a server: the second one with a new agent, in the same bundle."""
LOST_CODE = 255
"""Exit code of a server whose agent cannot be reached."""


class RayCluster:
    """Connected, with room reserved for every group. One per process at a time: Ray's connection is global."""

    def __init__(self, ray: Any, needs: Mapping[str, Need], log_dir: Path) -> None:
        """Use ``open``."""
        self.ray = ray
        self.log_dir = log_dir
        self._needs = needs
        self._reserved: dict[str, Any] = {}
        self._agents: dict[tuple[str, int], Any] = {}
        self.nodes: dict[Any, str] = {}
        """Agent -> address of its node, once it has started a server."""

    @classmethod
    async def open(cls, plans: Sequence[GroupPlan], *, log_dir: Path, gpus: Sequence[int]) -> RayCluster:
        """Connect (or start a cluster of this machine) and check that the plans fit.

        Args:
            plans: groups on Ray.
            log_dir: for the servers' logs.
            gpus: of this machine, those that nobody else has: a cluster of this machine gets them.

        Raises:
            UserError: the package is missing, the cluster cannot be reached, or the plans do not fit.
        """
        needs = _needs(plans)
        ray = _connect(plans, gpus)
        cluster = cls(ray, needs, log_dir)
        try:
            await _wait_for_room(list(needs.values()), ray)
            log_dir.mkdir(parents=True, exist_ok=True)
        except BaseException:
            await cluster.close()
            raise
        return cluster

    def launcher(self, plan: GroupPlan) -> RayLauncher:
        """The launcher of one of the groups."""
        return RayLauncher(self, plan)

    async def reserve(self, plan: GroupPlan, timeout_s: float) -> None:
        """Wait for the placement group of a group, or of its pool. ``UserError`` if it does not come in time."""
        name = _reservation(plan)
        if name not in self._reserved:
            need = self._needs[name]
            bundle = {"CPU": need.num_cpus} | ({"GPU": need.num_gpus} if need.num_gpus else {})
            self._reserved[name] = self.ray.util.placement_group([bundle] * need.count, strategy="PACK")
        try:
            await self.ask(self._reserved[name].ready(), timeout_s)
        except asyncio.TimeoutError as error:
            raise UserError(
                f"{plan.key}: Ray did not give the placement group within {timeout_s:g} s: raise "
                "placement.startup_timeout_s, or free the cluster"
            ) from error

    async def agent(self, plan: GroupPlan, index: int) -> Any:
        """The actor that holds replica ``index``'s resources; a new one after the old one was lost."""
        key = (_reservation(plan), index)
        if key not in self._agents:
            need = self._needs[key[0]]
            strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._reserved[key[0]], placement_group_bundle_index=index
            )
            actor = self.ray.remote(Agent).options(
                num_cpus=need.num_cpus, num_gpus=need.num_gpus, scheduling_strategy=strategy, max_restarts=0
            )
            self._agents[key] = actor.remote(str(self.log_dir.resolve()))
        return self._agents[key]

    async def ask(self, reference: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The value of an object reference; ``asyncio.TimeoutError`` after the deadline."""
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)

    def lose(self, agent: Any) -> None:
        """End an agent that does not answer, and its servers with it."""
        self._agents = {key: other for key, other in self._agents.items() if other is not agent}
        self.ray.kill(agent)

    async def close(self) -> None:
        """Give everything back. A cluster that ``open`` started ends."""
        try:
            await asyncio.gather(*map(self._end, self._agents.values()))
            for reserved in self._reserved.values():
                self.ray.util.remove_placement_group(reserved)
        finally:
            self._agents, self._reserved = {}, {}
            disconnect()

    async def _end(self, agent: Any) -> None:
        try:
            if agent in self.nodes:  # else it has nothing, and may never begin
                await self.ask(agent.close.remote(), LAST_CALL_TIMEOUT_S)
        except asyncio.TimeoutError:
            logger.warning("node %s does not answer: what runs there is not ended in order", self.nodes[agent])
        except self.ray.exceptions.RayError as error:
            logger.warning("node %s: its agent was lost: %s", self.nodes[agent], last_line(error))
        self.ray.kill(agent)


class RayLauncher:
    """Implements ``Launcher`` through agents."""

    def __init__(self, cluster: RayCluster, plan: GroupPlan) -> None:
        assert isinstance(plan.group.placement, RayConfig)
        self._cluster, self._plan, self._cfg = cluster, plan, plan.group.placement
        self._numbers = itertools.count()

    async def prepare(self) -> None:
        """See ``Launcher.prepare``: the placement group is there."""
        await self._cluster.reserve(self._plan, self._cfg.startup_timeout_s)

    async def launch(self, index: int, token: str) -> RayServer:
        """See ``Launcher.launch``. A lost agent is replaced by one in the same bundle, on another node if need be."""
        name = f"{self._plan.file_name(index)}.{next(self._numbers)}"
        command = ServerCommand(
            engine_file=json.dumps(self._plan.files[index].to_json()),
            token=token,
            host="",  # the agent's
            environment={"OMP_NUM_THREADS": str(self._cfg.num_cpus)}
            # Ray hides no GPU from an actor that asked for none.
            | ({} if self._cfg.num_gpus else {"CUDA_VISIBLE_DEVICES": ""}),
        )
        log_name = f"{self._plan.file_name(index)}.log"
        errors = self._cluster.ray.exceptions
        for _ in range(LAUNCHES):
            agent = await self._cluster.agent(self._plan, index)
            try:
                launched = agent.launch.remote(name, log_name, command)
                self._cluster.nodes[agent] = await self._cluster.ask(launched, self._cfg.startup_timeout_s)
                return RayServer(self._cluster, agent, name)
            except errors.RayTaskError as error:
                raise UserError(f"{self._plan.key}: the agent on the node failed: {last_line(error)}") from error
            except (errors.RayError, asyncio.TimeoutError) as error:
                lost = error
                self._cluster.lose(agent)
        raise UserError(
            f"{self._plan.key}: Ray could not start an agent (is the same mopd installed on every node?): "
            f"{last_line(lost)}"
        )

    async def close(self) -> None:
        """See ``Launcher.close``. The cluster gives the resources back: groups may share them."""


class RayServer:
    """Implements ``Server`` on a node."""

    def __init__(self, cluster: RayCluster, agent: Any, name: str) -> None:
        self._cluster, self._agent, self._name = cluster, agent, name
        self._lost: str | None = None
        self._is_ending = False
        """Whether it was told to end. From then on one call without an answer loses its agent: the end of a run has no
        time for more."""

    async def state(self) -> ServerState:
        """See ``Server.state``."""
        state: ServerState | None = await self._ask("state")
        if state is not None:
            return state
        return ServerState(url=None, pid=None, exit_code=LOST_CODE, ending=f"was lost with node {self._node}")

    async def last_words(self) -> str:
        """See ``Server.last_words``."""
        words = await self._ask("last_words")
        return str(words) if words is not None else f"node {self._node}: {self._lost}"

    async def terminate(self) -> None:
        """See ``Server.terminate``."""
        self._is_ending = True
        await self._ask("terminate")

    async def kill(self) -> None:
        """See ``Server.kill``."""
        self._is_ending = True
        await self._ask("kill")

    @property
    def _node(self) -> str:
        return self._cluster.nodes[self._agent]

    async def _ask(self, method: str) -> Any:
        """The agent's answer; None once it has been lost. It is ended then, and its servers with it."""
        calls, timeout_s = (1, LAST_CALL_TIMEOUT_S) if self._is_ending else (CALLS, CALL_TIMEOUT_S)
        for _ in range(calls):
            if self._lost is not None:
                return None
            try:
                return await self._cluster.ask(self._agent.ask.remote(self._name, method), timeout_s)
            except asyncio.TimeoutError:
                continue
            except self._cluster.ray.exceptions.RayError as error:
                self._lose(last_line(error))
        self._lose(f"its agent did not answer within {calls} times {timeout_s:g} s")
        return None

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            logger.warning("node %s was lost: %s", self._node, reason)
            self._cluster.lose(self._agent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Equal bundles, each of which must lie on one node."""

    keys: tuple[str, ...]
    """Groups that use them, one after the other if several."""
    count: int
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What is free on one node."""

    address: str
    num_cpus: float
    num_gpus: float


def check_room(needs: Sequence[Need], nodes: Sequence[Node]) -> None:
    """Place the bundles, the largest first, each on the fullest node that still takes it.

    Raises:
        UserError: names the group that does not fit, what one of its replicas needs, and what is short.
    """
    free = [[node.num_gpus, node.num_cpus] for node in nodes]
    bundles = [need for need in needs for _ in range(need.count)]
    for need in sorted(bundles, key=lambda n: (n.num_gpus, n.num_cpus), reverse=True):
        fitting = [rest for rest in free if rest[0] >= need.num_gpus and rest[1] >= need.num_cpus]
        if not fitting:
            raise UserError(_shortage(need, needs, nodes))
        chosen = min(fitting)
        chosen[0] -= need.num_gpus
        chosen[1] -= need.num_cpus


def _shortage(need: Need, needs: Sequence[Need], nodes: Sequence[Node]) -> str:
    wanted_gpus = sum(n.count * n.num_gpus for n in needs)
    wanted_cpus = sum(n.count * n.num_cpus for n in needs)
    has_gpus, has_cpus = sum(n.num_gpus for n in nodes), sum(n.num_cpus for n in nodes)
    short = []
    if wanted_gpus > has_gpus:
        short.append(f"{wanted_gpus - has_gpus:g} GPUs")
    if wanted_cpus > has_cpus:
        short.append(f"{wanted_cpus - has_cpus:g} CPUs")
    lacks = f"{' and '.join(short)} are missing" if short else "no node has that much left in one place"
    free = ", ".join(f"{n.address} {n.num_gpus:g} GPUs {n.num_cpus:g} CPUs" for n in nodes) or "no node"
    keys = " and ".join(need.keys)
    return (
        f"{keys}: the Ray cluster has no room for {need.count} replicas of {need.num_gpus:g} GPUs and "
        f"{need.num_cpus:g} CPUs each; all groups together need {wanted_gpus:g} GPUs and {wanted_cpus:g} CPUs, and "
        f"it can give {has_gpus:g} and {has_cpus:g} ({free}): {lacks}; lower replicas, placement.num_gpus or "
        "placement.num_cpus, or add nodes"
    )


def _connect(plans: Sequence[GroupPlan], gpus: Sequence[int]) -> Any:
    """The ``ray`` module, connected."""
    addresses = {plan.group.placement.address for plan in plans if isinstance(plan.group.placement, RayConfig)}
    if len(addresses) > 1:
        names = ", ".join(str(address) for address in sorted(addresses, key=str))
        raise UserError(f"placement.address names several Ray clusters ({names}): one run uses one")
    (address,) = addresses
    wanted, cores = wanted_cpus(plans), os.cpu_count() or 1
    if address is None and wanted > cores:
        logger.warning("Ray replicas want %g CPUs and this machine has %d: they share them", wanted, cores)
    return connect("placement", address, num_cpus=wanted, gpus=gpus)


def wanted_cpus(plans: Sequence[GroupPlan]) -> float:
    """Logical CPUs of all replicas of groups on Ray."""
    return sum(need.count * need.num_cpus for need in _needs(plans).values())


def _reservation(plan: GroupPlan) -> str:
    """Name of the placement group that a group lives in: its own, or its pool's."""
    assert isinstance(plan.group.placement, RayConfig)
    pool = plan.group.placement.shared_pool
    return plan.key if pool is None else f"pool {pool}"


def _needs(plans: Sequence[GroupPlan]) -> dict[str, Need]:
    """One per placement group, by its name; groups of one pool need the most that any of them needs."""
    needs: dict[str, Need] = {}
    for plan in plans:
        cfg, name = plan.group.placement, _reservation(plan)
        assert isinstance(cfg, RayConfig)
        other = needs.get(name, Need(keys=(), count=0, num_cpus=0, num_gpus=0))
        needs[name] = Need(
            keys=(*other.keys, plan.key),
            count=max(other.count, len(plan.files)),
            num_cpus=max(other.num_cpus, cfg.num_cpus),
            num_gpus=max(other.num_gpus, cfg.num_gpus),
        )
    return needs


async def _wait_for_room(needs: Sequence[Need], ray: Any) -> None:
    """``UserError`` as ``check_room``: at once where the needs exceed the whole cluster, else after ``RELEASE_S``."""
    check_room(needs, _nodes(ray, {node["NodeID"]: node["Resources"] for node in ray.nodes()}))
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            check_room(needs, _nodes(ray, ray._private.state.available_resources_per_node()))
            return
        except UserError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.5)


def _nodes(ray: Any, resources: Mapping[str, Mapping[str, float]]) -> list[Node]:
    """The living nodes, with what ``resources`` says of them by node id."""
    nodes = [(node["NodeManagerAddress"], resources.get(node["NodeID"], {})) for node in ray.nodes() if node["Alive"]]
    return [
        Node(address=address, num_cpus=given.get("CPU", 0.0), num_gpus=given.get("GPU", 0.0))
        for address, given in nodes
    ]
