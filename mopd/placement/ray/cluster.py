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

from mopd.base.text import last_line
from mopd.base.types import UserError
from mopd.config.machine.places import RayRequest, bundles, fullest, ray_requests
from mopd.config.placements import RayConfig
from mopd.placement.ending import LAST_CALL_TIMEOUT_S
from mopd.placement.interface import GroupPlan
from mopd.placement.process import ServerCommand, ServerState
from mopd.placement.ray.agent import Agent
from mopd.placement.ray.connection import RELEASE_S, connect, disconnect

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
"""Deadline of a call to an agent, whose methods return at once."""
CALLS = 2
"""Calls without an answer after which an agent is lost: one may be late because a training step blocks our own loop."""
LAUNCHES = 2
"""Tries to start a server: the second one with a new agent, in the same bundle."""
LOST_CODE = 255
"""Exit code of a server whose agent cannot be reached."""


class RayCluster:
    """Connected, with room reserved for every group. One per process at a time: Ray's connection is global."""

    def __init__(self, ray: Any, requests: Sequence[RayRequest], log_dir: Path) -> None:
        """Use ``open``."""
        self.ray = ray
        self.log_dir = log_dir
        self._requests = {key: request for request in requests for key in request.keys}
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
            gpus: of this machine: a cluster of this machine gets them (``Places.ray_gpus``).

        Raises:
            UserError: the package is missing, the cluster cannot be reached, or the plans do not fit.
        """
        requests = ray_requests({plan.key: plan.group for plan in plans})
        ray = _connect(plans, gpus)
        cluster = cls(ray, requests, log_dir)
        try:
            await _wait_for_room(requests, ray)
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
        request = self._requests[plan.key]
        if request.name not in self._reserved:
            bundle = {"CPU": request.num_cpus} | ({"GPU": request.num_gpus} if request.num_gpus else {})
            self._reserved[request.name] = self.ray.util.placement_group([bundle] * request.count, strategy="PACK")
        try:
            await self.ask(self._reserved[request.name].ready(), timeout_s)
        except asyncio.TimeoutError as error:
            raise UserError(
                f"{plan.key}: Ray did not give the placement group within {timeout_s:g} s: raise "
                "placement.startup_timeout_s, or free the cluster"
            ) from error

    async def agent(self, plan: GroupPlan, index: int) -> Any:
        """The actor that holds replica ``index``'s resources; a new one after the old one was lost."""
        request = self._requests[plan.key]
        key = (request.name, index)
        if key not in self._agents:
            strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._reserved[request.name], placement_group_bundle_index=index
            )
            actor = self.ray.remote(Agent).options(
                num_cpus=request.num_cpus, num_gpus=request.num_gpus, scheduling_strategy=strategy, max_restarts=0
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
        """Reserve the placement group."""
        await self._cluster.reserve(self._plan, self._cfg.startup_timeout_s)

    async def launch(self, index: int, token: str) -> RayServer:
        """Start a server. A lost agent is replaced by one in the same bundle, on another node if need be."""
        name = f"{self._plan.file_name(index)}.{next(self._numbers)}"
        command = ServerCommand(
            engine_file=json.dumps(self._plan.files[index].to_json()),
            token=token,
            host="",  # the agent's
            python=self._cfg.python,
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
        """Keep the resources: the cluster gives them back, as groups may share them."""


class RayServer:
    """Implements ``Server`` on a node."""

    def __init__(self, cluster: RayCluster, agent: Any, name: str) -> None:
        self._cluster, self._agent, self._name = cluster, agent, name
        self._lost: str | None = None
        self._is_ending = False
        """Whether it was asked to end. From then on one call without an answer loses its agent: the end of a run has no
        time for more."""

    async def state(self) -> ServerState:
        state: ServerState | None = await self._ask("state")
        if state is not None:
            return state
        return ServerState(url=None, pid=None, exit_code=LOST_CODE, ending=f"was lost with node {self._node}")

    async def last_words(self) -> str:
        words = await self._ask("last_words")
        return str(words) if words is not None else f"node {self._node}: {self._lost}"

    async def terminate(self) -> None:
        self._is_ending = True
        await self._ask("terminate")

    async def kill(self) -> None:
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
class Node:
    """Free resources of one node."""

    address: str
    num_cpus: float
    num_gpus: float


def check_room(requests: Sequence[RayRequest], nodes: Sequence[Node]) -> None:
    """Try the bundles as a plan does (``config/machine/places.py``), on what Ray says is free.

    Raises:
        UserError: names the group that does not fit, what one of its replicas needs, and what is short.
    """
    free = [(node.num_gpus, node.num_cpus) for node in nodes]
    for request, _ in bundles(requests):
        node = fullest(free, request)
        if node is None:
            raise UserError(_shortage(request, requests, nodes))
        free[node] = (free[node][0] - request.num_gpus, free[node][1] - request.num_cpus)


def _shortage(request: RayRequest, requests: Sequence[RayRequest], nodes: Sequence[Node]) -> str:
    wanted_gpus = sum(n.count * n.num_gpus for n in requests)
    wanted_cpus = sum(n.count * n.num_cpus for n in requests)
    has_gpus, has_cpus = sum(n.num_gpus for n in nodes), sum(n.num_cpus for n in nodes)
    short = []
    if wanted_gpus > has_gpus:
        short.append(f"{wanted_gpus - has_gpus:g} GPUs")
    if wanted_cpus > has_cpus:
        short.append(f"{wanted_cpus - has_cpus:g} CPUs")
    lacks = f"{' and '.join(short)} are missing" if short else "no node has that much left in one place"
    free = ", ".join(f"{n.address} {n.num_gpus:g} GPUs {n.num_cpus:g} CPUs" for n in nodes) or "no node"
    keys = " and ".join(request.keys)
    return (
        f"{keys}: the Ray cluster has no room for {request.count} replicas of {request.num_gpus:g} GPUs and "
        f"{request.num_cpus:g} CPUs each; all groups together need {wanted_gpus:g} GPUs and {wanted_cpus:g} CPUs, and "
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
    requests = ray_requests({plan.key: plan.group for plan in plans})
    return sum(request.count * request.num_cpus for request in requests)


async def _wait_for_room(requests: Sequence[RayRequest], ray: Any) -> None:
    """``UserError`` as ``check_room``: at once where they exceed the whole cluster, else after ``RELEASE_S``."""
    check_room(requests, _nodes(ray, {node["NodeID"]: node["Resources"] for node in ray.nodes()}))
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            check_room(requests, _nodes(ray, ray._private.state.available_resources_per_node()))
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
