"""Which rank and which replica is on which GPU of which node.

Trainer ranks fill as few nodes as hold them evenly, from node 0 on; engines ``in_process`` share rank 0's GPU, a
rollout with ``share_gpus_with`` those of node 0's ranks; other ``local`` ones follow on node 0, and what registers or
lives on Ray takes GPUs that are left, each replica on one node. ``external`` servers are somebody else's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mopd.config.groups import EngineGroupConfig
from mopd.config.placements import ExternalConfig, InProcessConfig, LocalConfig, RayConfig
from mopd.planning.devices import Cluster

RANKS = "student"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A rank or a replica and its GPUs; none of its own where it shares rank 0's, or there are none."""

    key: str
    """``student`` or the group's: ``rollout``, ``teachers.math``."""
    number: int
    """Of the rank, or of the replica in its group."""
    node: int
    gpus: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Everybody's place, and why there is none for somebody."""

    tenants: tuple[Tenant, ...]
    elsewhere: tuple[str, ...]
    """Groups on servers that somebody else runs."""
    problems: tuple[tuple[str, str], ...]
    """Key of the recipe, and what is wrong with it."""
    ranks_per_node: int

    def of(self, key: str) -> tuple[Tenant, ...]:
        return tuple(tenant for tenant in self.tenants if tenant.key == key)


class _Free:
    """GPUs of each node that nobody has, lowest first."""

    def __init__(self, cluster: Cluster) -> None:
        self.nodes = [list(range(cluster.gpus_per_node)) for _ in range(cluster.nodes)]

    def take(self, node: int, count: int) -> tuple[int, ...]:
        own, self.nodes[node] = self.nodes[node][:count], self.nodes[node][count:]
        return tuple(own)

    def first_with(self, count: int) -> int | None:
        return next((node for node, free in enumerate(self.nodes) if len(free) >= count), None)

    def __len__(self) -> int:
        return sum(map(len, self.nodes))


def place_all(groups: Mapping[str, EngineGroupConfig], world_size: int, cluster: Cluster) -> Places:
    """Every rank and replica; those without a place are problems."""
    if cluster.gpus_per_node == 0:
        return _without_gpus(groups, world_size)
    free, problems = _Free(cluster), list[tuple[str, str]]()
    tenants, per_node = _ranks(world_size, cluster, free, problems)
    for key, group in groups.items():
        if isinstance(group.placement, InProcessConfig):
            tenants += [Tenant(key=key, number=i, node=0, gpus=(0,)) for i in range(group.replicas)]
        elif isinstance(group.placement, LocalConfig):
            for gpu in group.placement.gpus:
                if gpu in free.nodes[0]:
                    free.nodes[0].remove(gpu)
                else:
                    problems.append((f"{key}.placement.gpus", f"GPU {gpu} of node 0 is not free: name others"))
    for key, group in groups.items():
        if isinstance(group.placement, LocalConfig):
            tenants += _local(key, group, group.placement, cluster, free, problems)
    for key, group in groups.items():
        if not isinstance(group.placement, (InProcessConfig, LocalConfig, ExternalConfig)):
            tenants += _anywhere(key, group, cluster, free, problems)
    return Places(
        tenants=tuple(tenants), elsewhere=_elsewhere(groups), problems=tuple(problems), ranks_per_node=per_node
    )


def _ranks(world_size: int, cluster: Cluster, free: _Free, problems: list[tuple[str, str]]) -> tuple[list[Tenant], int]:
    nodes = next(
        (n for n in range(1, cluster.nodes + 1) if world_size % n == 0 and world_size // n <= cluster.gpus_per_node),
        None,
    )
    if nodes is None:
        problems.append(
            (
                "student.parallel",
                f"{world_size} trainer ranks do not fill whole nodes of {cluster.nodes} x {cluster.gpus_per_node} "
                "GPUs, equally many on each: set data_parallel_size so that they do, or give more --nodes",
            )
        )
        return [], min(world_size, cluster.gpus_per_node)
    each = world_size // nodes
    tenants = [
        Tenant(key=RANKS, number=rank, node=rank // each, gpus=free.take(rank // each, 1)) for rank in range(world_size)
    ]
    return tenants, each


def _local(
    key: str,
    group: EngineGroupConfig,
    placement: LocalConfig,
    cluster: Cluster,
    free: _Free,
    problems: list[tuple[str, str]],
) -> list[Tenant]:
    size, tenants = group.gpus_per_replica, []
    if group.shares_gpus:
        taken = [range(i * size, (i + 1) * size) for i in range(group.replicas)]
        return [Tenant(key=key, number=number, node=0, gpus=tuple(own)) for number, own in enumerate(taken)]
    for number in range(group.replicas):
        own = placement.gpus[number * size : (number + 1) * size]
        if not own and len(free.nodes[0]) < size:
            problems.append(
                (
                    f"{key}.placement",
                    f"local: {group.replicas} replicas of {size} GPUs, and {len(free.nodes[0])} of node 0's "
                    f"{cluster.gpus_per_node} are free for replica {number}: lower replicas, or let them register from "
                    "other nodes",
                )
            )
            break
        tenants.append(Tenant(key=key, number=number, node=0, gpus=own or free.take(0, size)))
    return tenants


def _anywhere(
    key: str, group: EngineGroupConfig, cluster: Cluster, free: _Free, problems: list[tuple[str, str]]
) -> list[Tenant]:
    size, tenants = group.gpus_per_replica, []
    if isinstance(group.placement, RayConfig):
        if group.placement.num_gpus == 0:
            return [Tenant(key=key, number=i, node=0, gpus=()) for i in range(group.num_replicas)]
        size = group.placement.num_gpus
    if size > cluster.gpus_per_node:
        problems.append(
            (
                f"{key}.engine.tensor_parallel_size",
                f"{size}: a replica does not straddle nodes of {cluster.gpus_per_node} GPUs: set at most "
                f"{cluster.gpus_per_node}",
            )
        )
        return []
    for number in range(group.num_replicas):
        node = free.first_with(size)
        if node is None:
            problems.append(
                (
                    f"{key}.replicas",
                    f"{group.num_replicas} replicas of {size} GPUs, and no node has {size} free for replica {number} "
                    f"({len(free)} of {cluster.num_gpus} are free): lower replicas or give more --nodes",
                )
            )
            break
        tenants.append(Tenant(key=key, number=number, node=node, gpus=free.take(node, size)))
    return tenants


def _without_gpus(groups: Mapping[str, EngineGroupConfig], world_size: int) -> Places:
    """All on node 0, whose cores they share."""
    tenants = [Tenant(key=RANKS, number=rank, node=0, gpus=()) for rank in range(world_size)]
    for key, group in groups.items():
        if not isinstance(group.placement, ExternalConfig):
            tenants += [Tenant(key=key, number=i, node=0, gpus=()) for i in range(group.num_replicas)]
    return Places(tenants=tuple(tenants), elsewhere=_elsewhere(groups), problems=(), ranks_per_node=world_size)


def _elsewhere(groups: Mapping[str, EngineGroupConfig]) -> tuple[str, ...]:
    return tuple(key for key, group in groups.items() if isinstance(group.placement, ExternalConfig))
