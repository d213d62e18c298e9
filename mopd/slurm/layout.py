"""What stands on which node of a job: the student's ranks, and every replica that the job starts.

::

    allocation      one component; ranks on its first nodes, replicas where GPUs are left, first come first served
    heterogeneous   ranks alone in the first component; each registered group in one of its own
    ray             one component; ranks on its first nodes, Ray has every GPU that is left

A GPU has one owner, and a replica's GPUs are on one node. Without GPUs replicas go to nodes in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from mopd.config.groups import EngineGroupConfig
from mopd.config.load import Loaded
from mopd.config.placements import LocalConfig, RayConfig, RegisteredConfig
from mopd.config.slurm import SlurmComponentConfig, SlurmConfig
from mopd.types import UserError

STUDENT = "student"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobComponent:
    """Nodes of one kind; a plain job has one such component."""

    key: str
    """``student``, or the group that it is for."""
    num_nodes: int
    gpus_per_node: int
    cpus_per_node: int | None
    """``None``: whole nodes."""
    partition: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobServer:
    """A replica that the job starts, and that registers with the run."""

    key: str
    """Its group: ``rollout``, ``teachers.math``."""
    number: int
    component: int
    node: int
    """Among its component's."""
    gpus: tuple[int, ...]
    """Among those that the job has on the node; none without GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLayout:
    """A whole job."""

    components: tuple[JobComponent, ...]
    """The student's first."""
    student_nodes: int
    """The first ones of the first component."""
    ranks_per_node: int
    student_gpus: tuple[int, ...]
    """On each of the student's nodes: the ranks', then those for ``local`` groups."""
    servers: tuple[JobServer, ...]


def lay_out(loaded: Loaded) -> JobLayout:
    """The layout of a recipe's job.

    Raises:
        UserError: file, line and key of what does not divide, straddles nodes or has no room.
    """
    config = slurm_of(loaded)
    _check_groups(loaded, config)
    student_nodes, ranks = _spread_student(loaded, config)
    if config.form == "heterogeneous":
        layout = _in_components(loaded, config, student_nodes, ranks)
    else:
        layout = _in_one(loaded, config, student_nodes, ranks)
    num_nodes = sum(component.num_nodes for component in layout.components)
    if config.nodes is not None and config.nodes < num_nodes:
        raise UserError(
            f"{loaded.where('slurm', 'nodes')} is {config.nodes}, but the job needs {num_nodes} ({_needs(layout)}): "
            f"set {num_nodes}"
        )
    if config.nodes is not None and config.nodes > num_nodes and config.form == "heterogeneous":
        raise UserError(
            f"{loaded.where('slurm', 'nodes')} is {config.nodes}, but the components have {num_nodes} "
            f"({_needs(layout)}): remove it, or raise student_nodes or a group's replicas"
        )
    return layout


def slurm_of(loaded: Loaded) -> SlurmConfig:
    """The recipe's section. ``UserError`` where it has none."""
    if loaded.recipe.slurm is None:
        raise UserError(
            f"{loaded.path}: slurm is absent: add the section, for example slurm: {{partition: NAME, nodes: 2}}"
        )
    return loaded.recipe.slurm


def groups_of(loaded: Loaded) -> dict[str, EngineGroupConfig]:
    """Every group by key, the rollout first."""
    recipe = loaded.recipe
    return {"rollout": recipe.rollout, **{f"teachers.{name}": group for name, group in recipe.teachers.items()}}


def _registered(loaded: Loaded) -> dict[str, EngineGroupConfig]:
    return {k: group for k, group in groups_of(loaded).items() if isinstance(group.placement, RegisteredConfig)}


def path_of(key: str) -> tuple[str, ...]:
    """A group's place in the recipe."""
    room, _, name = key.partition(".")
    return (room, name) if name else (room,)


def _check_groups(loaded: Loaded, config: SlurmConfig) -> None:
    registered = _registered(loaded)
    if config.form == "heterogeneous" and not registered:
        raise UserError(
            f"{loaded.where('slurm', 'form')} is 'heterogeneous', but no group registers, so that there is one "
            "component only: set placement: {type: registered} for rollout or a teacher, or form: allocation"
        )
    for key in config.components:
        if key not in registered:
            there = ", ".join(registered)
            raise UserError(
                f"{loaded.where('slurm', 'components', key)}: no group of this name registers: name one of {there}"
            )
    if config.form != "ray":
        return
    if registered:
        raise UserError(
            f"{loaded.where('slurm', 'form')} is 'ray', but {next(iter(registered))}.placement.type is registered: set "
            "it to ray, or form: allocation"
        )
    if not any(isinstance(group.placement, RayConfig) for group in groups_of(loaded).values()):
        raise UserError(
            f"{loaded.where('slurm', 'form')} is 'ray', but no group's placement.type is: set one, or form: allocation"
        )


def _spread_student(loaded: Loaded, config: SlurmConfig) -> tuple[int, int]:
    """Nodes of the student, and ranks on each."""
    ranks, gpus = loaded.recipe.student.parallel.world_size, config.gpus_per_node
    fewest = -(-ranks // gpus) if gpus else 1
    if config.student_nodes is not None:
        nodes, key = config.student_nodes, "student_nodes"
    elif not gpus and config.form != "heterogeneous":
        nodes, key = config.nodes or 1, "nodes"
    else:
        nodes, key = next((n for n in range(fewest, ranks + 1) if ranks % n == 0), ranks), "student_nodes"
    if ranks % nodes:
        fitting = [n for n in range(1, ranks + 1) if ranks % n == 0 and n >= fewest]
        raise UserError(
            f"{loaded.where('slurm', key)} is {nodes}, and the {ranks} ranks of student.parallel do not divide "
            f"equally: set slurm.student_nodes to {' or '.join(map(str, fitting[:4]))}"
        )
    if gpus and ranks // nodes > gpus:
        raise UserError(
            f"{loaded.where('slurm', 'student_nodes')}: {ranks} ranks of student.parallel on {nodes} nodes are "
            f"{ranks // nodes} on each, and slurm.gpus_per_node is {gpus}: set student_nodes to {fewest} or more"
        )
    return nodes, ranks // nodes


def _gpus_of(group: EngineGroupConfig, gpus_per_node: int) -> int:
    """GPUs of one replica on nodes that have any."""
    return group.gpus_per_replica if gpus_per_node else 0


def _check_straddling(loaded: Loaded, key: str, group: EngineGroupConfig, size: int, gpus: int, gpus_key: str) -> None:
    if size > gpus:
        raise UserError(
            f"{loaded.where(*path_of(key), 'engine', 'tensor_parallel_size')} is {size}, and a node of the job has "
            f"{gpus} GPUs ({gpus_key}): a replica does not straddle nodes: set at most {gpus}"
        )


def _in_components(loaded: Loaded, config: SlurmConfig, student_nodes: int, ranks: int) -> JobLayout:
    _local_gpus(loaded, config, ranks)
    own = _of_student(loaded, config, student_nodes)
    components, servers = [own], []
    for index, (key, group) in enumerate(_registered(loaded).items(), start=1):
        differs = config.components.get(key, SlurmComponentConfig())
        gpus = config.gpus_per_node if differs.gpus_per_node is None else differs.gpus_per_node
        size = _gpus_of(group, gpus)
        gpus_key = "slurm.gpus_per_node" if differs.gpus_per_node is None else f"slurm.components.{key}.gpus_per_node"
        _check_straddling(loaded, key, group, size, gpus, gpus_key)
        on_each = gpus // size if size else group.num_replicas
        for number in range(group.num_replicas):
            node, place = divmod(number, on_each)
            taken = tuple(range(place * size, (place + 1) * size))
            servers.append(JobServer(key=key, number=number, component=index, node=node, gpus=taken))
        num_nodes = -(-group.num_replicas // on_each)
        components.append(
            JobComponent(
                key=key,
                num_nodes=num_nodes,
                # a component with fewer replicas than a node holds leaves the rest to others
                gpus_per_node=min(gpus, size * group.num_replicas),
                cpus_per_node=config.cpus_per_node if differs.cpus_per_node is None else differs.cpus_per_node,
                partition=config.partition if differs.partition is None else differs.partition,
            )
        )
    return JobLayout(
        components=tuple(components),
        student_nodes=student_nodes,
        ranks_per_node=ranks,
        student_gpus=tuple(range(own.gpus_per_node)),
        servers=tuple(servers),
    )


def _of_student(loaded: Loaded, config: SlurmConfig, num_nodes: int) -> JobComponent:
    return JobComponent(
        key=STUDENT,
        num_nodes=num_nodes,
        gpus_per_node=config.gpus_per_node,
        cpus_per_node=config.cpus_per_node,
        partition=config.partition,
    )


def _in_one(loaded: Loaded, config: SlurmConfig, student_nodes: int, ranks: int) -> JobLayout:
    gpus = config.gpus_per_node
    own = ranks + _local_gpus(loaded, config, ranks)  # the student has as many on each of its nodes
    num_nodes = max(student_nodes, config.nodes or 0)
    free = [list(range(own if node < student_nodes else 0, gpus)) for node in range(num_nodes)]
    """GPUs of each node that nobody has."""
    if config.form == "ray":
        _check_ray(loaded, config, free)
    servers, turn = [], 0
    for key, group in _registered(loaded).items():
        size = _gpus_of(group, gpus)
        _check_straddling(loaded, key, group, size, gpus, "slurm.gpus_per_node")
        for number in range(group.num_replicas):
            if size:
                node = next((i for i, left in enumerate(free) if len(left) >= size), len(free))
                if node == len(free):
                    free.append(list(range(gpus)))
            else:
                node, turn = turn % len(free), turn + 1
            taken, free[node] = tuple(free[node][:size]), free[node][size:]
            servers.append(JobServer(key=key, number=number, component=0, node=node, gpus=taken))
    first_taken = min((s.gpus[0] for s in servers if s.gpus and s.node < student_nodes), default=gpus)
    return JobLayout(
        components=(_of_student(loaded, config, len(free)),),
        student_nodes=student_nodes,
        ranks_per_node=ranks,
        student_gpus=tuple(range(ranks if config.form == "ray" and gpus else first_taken)),
        servers=tuple(servers),
    )


def _local_gpus(loaded: Loaded, config: SlurmConfig, ranks: int) -> int:
    """GPUs of the first node that ``local`` groups take beside the ranks."""
    if not config.gpus_per_node:
        return 0
    local = {key: group for key, group in groups_of(loaded).items() if isinstance(group.placement, LocalConfig)}
    wanted = 0
    for key, group in local.items():
        wanted += group.gpus_per_replica * group.num_replicas
        if ranks + wanted > config.gpus_per_node:
            raise UserError(
                f"{loaded.where(*path_of(key), 'replicas')}: {ranks} trainer ranks and the replicas of local groups up "
                f"to this one need {ranks + wanted} GPUs of the first node, which has {config.gpus_per_node} "
                "(slurm.gpus_per_node): set placement: {type: registered}, fewer replicas, or more student_nodes"
            )
    return wanted


def _check_ray(loaded: Loaded, config: SlurmConfig, free: list[list[int]]) -> None:
    """Every replica on Ray has room, the largest ones first; nodes are added where ``nodes`` is absent."""
    if not config.gpus_per_node:
        return
    left = [len(gpus) for gpus in free]
    needs = sorted(
        (
            (group.placement.num_gpus, key)
            for key, group in groups_of(loaded).items()
            if isinstance(group.placement, RayConfig) and group.placement.shared_pool is None
            for _ in range(group.num_replicas)
        ),
        reverse=True,
    )
    for size, key in needs:
        if size > config.gpus_per_node:
            raise UserError(
                f"{loaded.where(*path_of(key), 'placement', 'num_gpus')} is {size}, and a node of the job has "
                f"{config.gpus_per_node} GPUs (slurm.gpus_per_node): a replica does not straddle nodes: set at most "
                f"{config.gpus_per_node}"
            )
        node = next((i for i, number in enumerate(left) if number >= size), len(left))
        if node == len(left):
            left.append(config.gpus_per_node)
            free.append(list(range(config.gpus_per_node)))
        left[node] -= size


def _needs(layout: JobLayout) -> str:
    if len(layout.components) > 1:
        return ", ".join(f"{component.key} {component.num_nodes}" for component in layout.components)
    return f"{layout.student_nodes} for the student's ranks, and what the replicas take beyond"
