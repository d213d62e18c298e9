"""Who has which GPU: the one decision that ``mopd plan``, ``mopd slurm``, ``mopd check`` and a run make from a recipe.

::

    trainer ranks      the first GPUs of the student's nodes, equally many on each; local rank i has GPU i
    in_process         rank 0's GPU, and those behind it where a replica takes several
    share_gpus_with    the ranks' GPUs on node 0, replica after replica
    local              those that ``gpus`` names, else the lowest free ones of node 0, in the recipe's order
    auto               none until it is settled (``auto.py``): ``local`` where what the trainer sees of node 0 has room
    ray, no address    the lowest free ones of node 0 after these: a cluster of that machine alone
    registered         the lowest free ones of the first node with room, in the recipe's order; or nodes of their own
    ray, an address    nodes of that cluster, the largest replicas first, each on the fullest node that takes it

Everything down to Ray's own cluster starts with the trainer. On each node these processes have the first GPUs without a
gap, so that a process that sees only them (a step of a Slurm job) counts them alike. A GPU has one owner unless a
placement asks for sharing. A replica's GPUs are on one node, or those of a registered teacher that is larger on whole
nodes with nothing beside it.

Where Ray schedules, the decision is a request (``RayRequest``: so many GPUs at a time on one node) and whether it can
be met. The nodes and GPUs of these replicas show one way; Ray may choose another.

It stands below all of them, in ``config``, because what ``auto`` becomes depends on it; it looks at no machine and
imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mopd.base.types import UserError
from mopd.config.groups import EngineGroupConfig, hosts_of
from mopd.config.placements import (
    AutoPlacementConfig,
    ExternalConfig,
    InProcessConfig,
    LocalConfig,
    RayConfig,
    RegisteredConfig,
)
from mopd.config.reading.tree import dotted
from mopd.config.schema import Recipe

STUDENT = "student"
IN_PROCESS = "in_process"
MAX_SHOWN = 8
"""Lines of the table of owners in an error, and numbers in a line."""
Path_ = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePool:
    """The nodes that a recipe is placed on, numbered from 0; equal but for ``components``."""

    gpus_per_node: int
    """0 without CUDA."""
    num_nodes: int | None = 1
    """Number of nodes; ``None``: as few as hold everything."""
    student_nodes: int | None = None
    """Nodes of the trainer ranks (``slurm.student_nodes``); ``None``: as few as hold them evenly, without CUDA all."""
    components: Mapping[str, int] | None = None
    """Key of each registered group -> GPUs of a node of its own (a heterogeneous job); ``None``: no such nodes."""
    has_ray: bool = True
    """Ray clusters that groups name by ``address`` are of these nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A trainer rank or a replica, and its GPUs."""

    key: str
    """``student``, or the group's: ``rollout``, ``teachers.math``."""
    number: int
    """Number of the rank, or of the replica in its group."""
    component: int = 0
    """0: the student's; others in the order of ``NodePool.components``."""
    node: int
    """Among its component's."""
    gpus: tuple[int, ...]
    """Numbers on the node; none without CUDA."""
    num_nodes: int = 1
    """Nodes from ``node`` on, with the same ``gpus`` of each."""
    is_fixed: bool = True
    """False where Ray chooses: then node and GPUs are one way in which the replica fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Every rank's and replica's place, and why some have none."""

    tenants: tuple[Tenant, ...]
    elsewhere: tuple[str, ...]
    """Groups on nodes that are not the pool's: ``external``, or another Ray cluster."""
    problems: tuple[tuple[Path_, str], ...]
    """Key of the recipe, and what is wrong with it."""
    num_nodes: tuple[int, ...]
    """Nodes of each component, the student's first."""
    student_nodes: int
    """The first ones of the first component."""
    ranks_per_node: int
    reserved: tuple[int, ...]
    """GPUs, from 0 on, that processes that start with the trainer have on each of the student's nodes."""

    def of(self, key: str) -> tuple[Tenant, ...]:
        """The tenants of a key, by number."""
        return tuple(tenant for tenant in self.tenants if tenant.key == key)

    @property
    def ray_gpus(self) -> tuple[int, ...]:
        """GPUs of node 0 for a Ray cluster of that machine alone, which shares them out among its replicas."""
        own = [tenant.gpus for tenant in self.tenants if not tenant.is_fixed and tenant.node == 0]
        return tuple(sorted(set(itertools.chain(*own))))

    def require(self, where: Callable[..., str] | None = None) -> Places:
        """These places, if nothing is wrong with them.

        Args:
            where: begins the line by the parts of a key (``Loaded.where``); ``None``: the key alone does.

        Raises:
            UserError: the first problem.
        """
        for path, problem in self.problems:
            raise UserError(f"{dotted(path) if where is None else where(*path)}: {problem}")
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class RayRequest:
    """A request to Ray: equal bundles, each of which must lie on one node."""

    name: str
    """Name of the placement group: the group's key, or ``pool NAME``."""
    keys: tuple[str, ...]
    """Groups that use the bundles, by turns if several; replica i of each has bundle i."""
    count: int
    num_cpus: float
    num_gpus: float


def engine_groups(recipe: Recipe) -> dict[str, EngineGroupConfig]:
    """The groups of a recipe by key, the rollout first, where it needs one. Teachers that share one are on that of the
    first."""
    rollout = {"rollout": recipe.rollout} if recipe.needs_rollout else {}
    hosts = dict.fromkeys(hosts_of(recipe.teachers).values())
    return {**rollout, **{f"teachers.{name}": recipe.teachers[name] for name in hosts}}


def path_of(key: str) -> Path_:
    """A group's place in the recipe: ``teachers.a.b`` is teacher ``a.b``."""
    section, _, name = key.partition(".")
    return (section, name) if name else (section,)


def place(groups: Mapping[str, EngineGroupConfig], num_ranks: int, pool: NodePool) -> Places:
    """Place every trainer rank and every replica; what has no room is among the problems."""
    return _Placer(groups, num_ranks, pool).run()


def place_recipe(recipe: Recipe, pool: NodePool) -> Places:
    """Place all of a recipe, settled or not: groups of placement ``auto`` that can only be ``local`` are."""
    groups = engine_groups(recipe)
    if recipe.has_engines_beside:
        groups |= _autos(groups)
    return place(groups, recipe.student.parallel.world_size, pool)


def place_on_machine(groups: Mapping[str, EngineGroupConfig], num_ranks: int, num_gpus: int) -> Places:
    """Place what starts with the trainer on the machine of rank 0, or on the only one.

    Args:
        groups: those that register, or live elsewhere, are left out.
        num_ranks: on this machine; 0 where engines run alone.
        num_gpus: that a process here sees; 0 without CUDA.
    """
    own = {key: group for key, group in groups.items() if not isinstance(group.placement, RegisteredConfig)}
    return place(own, num_ranks, NodePool(gpus_per_node=num_gpus, has_ray=False))


def room_for_auto(groups: Mapping[str, EngineGroupConfig], num_ranks: int, num_gpus: int) -> tuple[int, int]:
    """Count the GPUs of rank 0's machine that are left for groups whose placement is ``auto``, and those that these
    want.

    None are left where the other groups do not fit.
    """
    autos = _autos(groups)
    wanted = sum(group.replicas * group.gpus_per_replica for group in autos.values())
    places = place_on_machine({key: group for key, group in groups.items() if key not in autos}, num_ranks, num_gpus)
    taken = {gpu for tenant in places.tenants for gpu in tenant.gpus}
    return 0 if places.problems else num_gpus - len(taken), wanted


def ray_requests(groups: Mapping[str, EngineGroupConfig]) -> list[RayRequest]:
    """One for each placement group; groups of one pool need the most that any of them needs."""
    found: dict[str, RayRequest] = {}
    for key, group in groups.items():
        cfg = group.placement
        if not isinstance(cfg, RayConfig):
            continue
        name = key if cfg.shared_pool is None else f"pool {cfg.shared_pool}"
        other = found.get(name, RayRequest(name=name, keys=(), count=0, num_cpus=0, num_gpus=0))
        found[name] = RayRequest(
            name=name,
            keys=(*other.keys, key),
            count=max(other.count, group.replicas),
            num_cpus=max(other.num_cpus, cfg.num_cpus),
            num_gpus=max(other.num_gpus, cfg.num_gpus),
        )
    return list(found.values())


def bundles(requests: Sequence[RayRequest]) -> Iterator[tuple[RayRequest, int]]:
    """Every bundle with its number, in the order in which they are tried: the largest first."""
    for request in sorted(requests, key=lambda one: (one.num_gpus, one.num_cpus), reverse=True):
        yield from ((request, number) for number in range(request.count))


def fullest(free: Sequence[tuple[float, float]], request: RayRequest) -> int | None:
    """The node with the fewest GPUs, then CPUs, free that takes a bundle; ``free`` are (GPUs, CPUs) by node."""
    fitting = [n for n, (gpus, cpus) in enumerate(free) if gpus >= request.num_gpus and cpus >= request.num_cpus]
    return min(fitting, key=lambda node: free[node], default=None)


class _Placer:
    """One call of ``place``."""

    def __init__(self, groups: Mapping[str, EngineGroupConfig], num_ranks: int, pool: NodePool) -> None:
        self._pool, self._gpus, self._num_ranks = pool, pool.gpus_per_node, num_ranks
        self._most = pool.num_nodes if pool.components is None else None
        """Nodes that ranks and replicas may take in the first component."""
        self._tenants: list[Tenant] = []
        self._problems: list[tuple[Path_, str]] = []
        self._student_nodes, self._ranks_per_node = self._spread()
        self._groups = groups
        self._owners: dict[int, str] = {}
        """GPU of node 0 -> what has it, among what starts with the trainer."""
        self._free: list[list[int]] = []
        """GPUs of each node for the others; nodes are added as they are needed."""
        self._lacks: tuple[Path_, str] | None = None
        """The first replica that wants a node beyond the pool's, and what it finds."""

    def run(self) -> Places:
        self._place_ranks()
        self._place_in_process()
        self._place_local()
        self._place_on_own_ray()
        on_others = self._ranks_per_node if self._gpus else 0
        reserved = [max(self._owners, default=-1) + 1, *[on_others] * (self._student_nodes - 1)]
        more = max(0, (self._most or 0) - self._student_nodes)
        self._free = [list(range(first, self._gpus)) for first in [*reserved, *[0] * more]]
        own_nodes = self._place_registered()
        self._place_on_ray()
        if self._lacks is not None:
            path, problem = self._lacks
            self._refuse(path, f"{problem}: lower replicas, or use {len(self._free)} nodes")
        own = (range(one.node, one.node + one.num_nodes) for one in self._tenants if not one.component)
        idle = set(range(self._most or 0)).difference(*own)
        if idle and self._most != 1 and not self._pool.has_ray and not self._problems:
            text = f"{self._pool.num_nodes}, and nothing would run on {len(idle)} of them: lower it, or set placement: "
            self._refuse(("slurm", "nodes"), f"{text}{{type: registered}} for groups that are to use them")
        num_nodes = (self._most or len(self._free), *own_nodes)
        if own_nodes and self._pool.num_nodes not in (None, sum(num_nodes)):
            text = f"{self._pool.num_nodes}, and the job's components have {' + '.join(map(str, num_nodes))} nodes"
            self._refuse(("slurm", "nodes"), f"{text}: remove it, or change student_nodes or a group's replicas")
        return Places(
            tenants=tuple(one for one in self._tenants if one.component or one.node < num_nodes[0]),
            elsewhere=tuple(key for key, group in self._groups.items() if self._is_elsewhere(group)),
            problems=tuple(self._problems),
            num_nodes=num_nodes,
            student_nodes=self._student_nodes,
            ranks_per_node=self._ranks_per_node,
            reserved=tuple(reserved),
        )

    def _spread(self) -> tuple[int, int]:
        """Nodes of the trainer ranks, and ranks on each; those of one full node where they cannot be placed."""
        ranks, gpus, most, nodes = self._num_ranks, self._gpus, self._most, self._pool.student_nodes
        if nodes is None and not gpus:
            nodes = most
        fewest = -(-ranks // gpus) if gpus else 1
        fitting = [n for n in range(max(fewest, 1), max(ranks, 1) + 1) if ranks % n == 0][:4]
        chosen = fitting[0] if nodes is None else nodes
        if ranks % chosen == 0 and chosen >= fewest and (most is None or chosen <= most):
            return chosen, ranks // chosen
        if nodes is None:
            self._refuse(
                (STUDENT, "parallel"),
                f"{ranks} trainer ranks do not fill whole nodes of {most} x {gpus} GPUs, equally many on each: use "
                f"{chosen} nodes, set data_parallel_size so that they do, or show every rank all GPUs of its node "
                "(CUDA_VISIBLE_DEVICES)",
            )
        else:
            there = f"{nodes} nodes{f' of {gpus} GPUs' if gpus else ''}"
            there += "" if most is None or nodes <= most else f", and there are {most}"
            counts = [n for n in fitting if most is None or n <= most] or fitting[:1]
            cure = f"set it to {' or '.join(map(str, counts))}"
            text = f"the {ranks} ranks of student.parallel do not divide equally over {there}: {cure}"
            self._refuse(("slurm", "student_nodes"), text)
        return 1, min(ranks, gpus or ranks)

    def _of(self, kind: type) -> list[tuple[str, EngineGroupConfig]]:
        return [(key, group) for key, group in self._groups.items() if isinstance(group.placement, kind)]

    def _place_ranks(self) -> None:
        for rank in range(0 if self._problems else self._num_ranks):
            node, gpu = divmod(rank, self._ranks_per_node)
            self._tenants.append(Tenant(key=STUDENT, number=rank, node=node, gpus=(gpu,) if self._gpus else ()))
            if self._gpus and node == 0:
                self._owners[gpu] = f"trainer rank {rank}"

    def _place_in_process(self) -> None:
        for key, group in self._of(InProcessConfig):
            own = range(group.gpus_per_replica if self._gpus else 0)
            for gpu in own:
                # Rank 0's GPU is shared on purpose, and so are those of several engines in its process.
                if gpu > 0 and self._owners.get(gpu) != IN_PROCESS:
                    self._take(gpu, (*path_of(key), "engine", "tensor_parallel_size"), IN_PROCESS)
                self._owners.setdefault(gpu, IN_PROCESS)
            self._give(key, [tuple(own)] * group.replicas)

    def _place_local(self) -> None:
        for key, group in self._of(LocalConfig):
            for gpu in _named(group):
                self._take(gpu, (*path_of(key), "placement", "gpus"), key)
        for key, group in self._of(LocalConfig):
            size, path = group.gpus_per_replica if self._gpus else 0, (*path_of(key), "placement")
            needed, free, most = size * group.replicas, self._nobodys(), self._ranks_per_node or self._gpus
            own = list(range(most)) if group.shares_gpus else list(_named(group)) or free
            if needed <= len(own):
                self._give(key, _shares(own, size, group.replicas))
                self._owners = dict.fromkeys(own[:needed], key) | self._owners
            elif group.shares_gpus:
                text = f"its replicas need {needed} GPUs, and {most} of node 0 are trainer ranks': lower replicas"
                self._refuse((*path, "share_gpus_with"), text)
            else:
                self._refuse(
                    path,
                    f"{group.replicas} replicas of {size} GPUs need {needed} and {len(free)} are free "
                    f"({self._table()}): lower replicas, use a machine with more GPUs, or set "
                    "placement: {type: in_process} to share trainer rank 0's GPU, {type: registered} for other nodes",
                )

    def _place_on_own_ray(self) -> None:
        """Groups without an address: a cluster of node 0, which gets just the GPUs that they ask for."""
        own = {key: group for key, group in self._of(RayConfig) if _has_own_ray(group)}
        for request in ray_requests(own):
            size, free = int(request.num_gpus), self._nobodys()
            if size * request.count > len(free):
                self._refuse(
                    (*path_of(request.keys[0]), "placement", "num_gpus"),
                    f"{request.count} replicas of {size} GPUs in node 0's own Ray cluster, and {len(free)} are free "
                    f"({self._table()}): lower it or replicas, or name a cluster that has them (address)",
                )
                continue
            for key in request.keys:
                self._give(key, _shares(free, size, own[key].replicas), is_fixed=False)
            self._owners |= dict.fromkeys(free[: size * request.count], "Ray")

    def _place_registered(self) -> list[int]:
        """Nodes of each component but the student's."""
        turns, own_nodes, components = itertools.count(), list[int](), self._pool.components
        for key, group in self._of(RegisteredConfig):
            gpus = self._gpus if components is None else components[key]
            size, nodes = group.gpus_per_replica if gpus else 0, 1
            if size > gpus and key != "rollout" and size % gpus == 0:
                size, nodes = gpus, size // gpus
            on_each = max(1, gpus // size) if size else group.replicas
            own_nodes += [] if components is None else [-(-group.replicas // on_each) * nodes]
            for number in range(group.replicas if self._is_on_one_node(size, gpus, key, group) else 0):
                if components is not None:
                    node, i = divmod(number * nodes, on_each)
                    own = tuple(range(i * size, (i + 1) * size))
                elif size:
                    node, own = self._taken(self._first_with(size, nodes), key, number, size)
                    for more in range(node + 1, node + nodes):
                        self._taken(more if more < len(self._free) else None, key, number, size)
                else:
                    node, own = next(turns) % len(self._free), ()
                component = len(own_nodes)
                self._tenants.append(
                    Tenant(key=key, number=number, component=component, node=node, gpus=own, num_nodes=nodes)
                )
        return own_nodes

    def _place_on_ray(self) -> None:
        """Groups whose cluster has these nodes: one way in which they fit."""
        there = {k: group for k, group in self._of(RayConfig) if not _has_own_ray(group) and self._pool.has_ray}
        for request, number in bundles(ray_requests(there)):
            size, first = int(request.num_gpus), request.keys[0]
            if not self._is_on_one_node(size, self._gpus, first, there[first]):
                continue
            fitting = fullest([(len(left), request.num_cpus) for left in self._free], request)
            node, own = self._taken(fitting, first, number, size) if size else (0, ())
            self._tenants += [
                Tenant(key=key, number=number, node=node, gpus=own, is_fixed=False)
                for key in request.keys
                if number < there[key].replicas
            ]

    def _is_elsewhere(self, group: EngineGroupConfig) -> bool:
        is_on_ray = isinstance(group.placement, RayConfig) and not _has_own_ray(group)
        return isinstance(group.placement, ExternalConfig) or (is_on_ray and not self._pool.has_ray)

    def _is_on_one_node(self, size: int, gpus: int, key: str, group: EngineGroupConfig) -> bool:
        """Whether ``size`` GPUs are on one node, or on each of several."""
        if size > gpus:
            is_on_ray, cure = isinstance(group.placement, RayConfig), f"set at most {gpus}"
            below = ("placement", "num_gpus") if is_on_ray else ("engine", "tensor_parallel_size")
            if key != "rollout":
                cure += f", or a multiple of {gpus}" + (" and placement.type: registered" if is_on_ray else "")
            text = f"{size} GPUs, and a node has {gpus}: only a registered teacher spans nodes, and takes whole ones"
            self._refuse((*path_of(key), *below), f"{text}: {cure}")
        return size <= gpus

    def _first_with(self, size: int, nodes: int) -> int | None:
        """The first of so many nodes, one after the other, that have ``size`` GPUs free, or can be added."""
        most = len(self._free) + (nodes - 1 if self._most is None else 0)
        for first in range(len(self._free)):
            own = self._free[first : first + nodes]
            if first + nodes <= most and all(len(left) >= size for left in own):
                return first
        return None

    def _nobodys(self) -> list[int]:
        """GPUs of node 0 that are left for what starts with the trainer."""
        return [gpu for gpu in range(self._gpus) if gpu not in self._owners]

    def _take(self, gpu: int, path: Path_, owner: str) -> None:
        """Give a GPU of node 0 that is asked for by its number, if it exists and has no owner."""
        if not self._gpus:
            self._refuse(path, f"names GPU {gpu}, but node 0 has no CUDA device: remove it")
        elif gpu >= self._gpus:
            self._refuse(path, f"GPU {gpu} is not there ({self._table()}): name GPUs from 0 to {self._gpus - 1}")
        elif gpu in self._owners:
            text = f"GPU {gpu} belongs to {self._owners[gpu]} ({self._table()}): give each its own, or name none"
            self._refuse(path, f"{text} to have them shared out")
        else:
            self._owners[gpu] = owner

    def _give(self, key: str, given: Sequence[tuple[int, ...]], *, is_fixed: bool = True) -> None:
        """Place a group's replicas on node 0."""
        self._tenants += [
            Tenant(key=key, number=number, node=0, gpus=own, is_fixed=is_fixed) for number, own in enumerate(given)
        ]

    def _taken(self, node: int | None, key: str, number: int, size: int) -> tuple[int, tuple[int, ...]]:
        """The GPUs of a replica on ``node``, or on another one where none has room."""
        if node is None:
            if self._lacks is None and self._most is not None:
                free = f"{sum(map(len, self._free))} of {self._most * self._gpus}"
                group = self._groups[key]
                nodes = max(1, group.gpus_per_replica // size)
                where = f"no {nodes} nodes in a row have" if nodes > 1 else "no node has"
                text = f"{group.replicas} replicas of {nodes * size} GPUs, and {where} {size} free for replica"
                self._lacks = (*path_of(key), "replicas"), f"{text} {number} ({free} are free)"
            node = len(self._free)
            self._free.append(list(range(self._gpus)))
        own, self._free[node] = tuple(self._free[node][:size]), self._free[node][size:]
        return node, own

    def _refuse(self, path: Path_, problem: str) -> None:
        if (path, problem) not in self._problems:
            self._problems.append((path, problem))

    def _table(self) -> str:
        """List on one line which GPUs of node 0 each owner wants."""
        rows = [f"trainer ranks: {_numbers(range(self._ranks_per_node))}"] if self._ranks_per_node else []
        for key, group in self._groups.items():
            wanted, placement = f"{group.replicas} x {group.gpus_per_replica}", group.placement
            if isinstance(placement, InProcessConfig):
                rows.append(f"{key}: {_numbers(range(group.gpus_per_replica))} in_process")
            elif isinstance(placement, LocalConfig):
                anywhere = f"{wanted} of the ranks'" if group.shares_gpus else f"any {wanted}"
                rows.append(f"{key}: {_numbers(placement.gpus) if placement.gpus else anywhere}")
            elif isinstance(placement, RayConfig) and placement.address is None:
                rows.append(f"{key}: {group.replicas} x {placement.num_gpus} on Ray")
        more = [f"and {len(rows) - MAX_SHOWN} more"] if len(rows) > MAX_SHOWN else []
        return "; ".join([f"{self._gpus} GPUs on node 0", *rows[:MAX_SHOWN], *more])


def _autos(groups: Mapping[str, EngineGroupConfig]) -> dict[str, EngineGroupConfig]:
    """Groups of placement ``auto``, as ``local`` ones."""
    autos = {key: group for key, group in groups.items() if isinstance(group.placement, AutoPlacementConfig)}
    return {key: replace(group, placement=LocalConfig(type="local")) for key, group in autos.items()}


def _has_own_ray(group: EngineGroupConfig) -> bool:
    return isinstance(group.placement, RayConfig) and group.placement.address is None


def _named(group: EngineGroupConfig) -> tuple[int, ...]:
    return group.placement.gpus if isinstance(group.placement, LocalConfig) else ()


def _shares(gpus: Sequence[int], size: int, count: int) -> list[tuple[int, ...]]:
    return [tuple(gpus[i * size : (i + 1) * size]) for i in range(count)]


def _numbers(gpus: Sequence[int]) -> str:
    return f"GPU {', '.join(map(str, gpus[:MAX_SHOWN]))}" + (", ..." if len(gpus) > MAX_SHOWN else "")
