"""A job's nodes, and which of their GPUs each of its steps sees.

::

    allocation      one component; ranks on its first nodes, replicas where GPUs are left, first come first served
    heterogeneous   ranks alone in the first component; each registered group in one of its own
    ray             one component; ranks on its first nodes, Ray has every GPU that is left

Who has which GPU is decided in ``config/machine/places.py``, from the nodes that the section ``slurm`` describes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from mopd.base.types import UserError
from mopd.config.groups import EngineGroupConfig
from mopd.config.load import Loaded
from mopd.config.machine.places import STUDENT, NodePool, Places, Tenant, engine_groups, place_recipe
from mopd.config.placements import RayConfig, RegisteredConfig
from mopd.config.slurm import SlurmComponentConfig, SlurmConfig

Group = TypeVar("Group", bound=EngineGroupConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobComponent:
    """A set of equal nodes of a job; only a heterogeneous job has more than one."""

    key: str
    """``student``, or the key of the group of replicas on it."""
    num_nodes: int
    gpus_per_node: int
    cpus_per_node: int | None
    """``None``: whole nodes."""
    partition: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLayout:
    """The components of a job, and what stands where."""

    components: tuple[JobComponent, ...]
    """Components, the student's first."""
    places: Places
    student_gpus: tuple[tuple[int, ...], ...]
    """GPUs that the launcher on each of the student's nodes sees: those of its ranks and of what it starts, then free
    ones. All nodes but the first see the same number."""
    servers: tuple[Tenant, ...]
    """Replicas that the job starts, and that register with the run."""


def lay_out(loaded: Loaded) -> JobLayout:
    """Lay out a recipe's job.

    Raises:
        UserError: file, line and key of what does not divide, straddles nodes or has no room.
    """
    loaded, config, pool = of_job(loaded), slurm_of(loaded), job_nodes(loaded)
    places = place_recipe(loaded.recipe, pool).require(loaded.where)
    registered = _keys_of(loaded, RegisteredConfig)
    keys = [STUDENT, *(registered if pool.components is not None else [])]
    components = [_component(config, pool, places, key, n) for key, n in zip(keys, places.num_nodes, strict=True)]
    servers = [tenant for key in registered for tenant in places.of(key)]
    return JobLayout(
        components=tuple(components), places=places, student_gpus=student_gpus(loaded, places), servers=tuple(servers)
    )


def slurm_of(loaded: Loaded) -> SlurmConfig:
    """Return the recipe's section ``slurm``. ``UserError`` where it has none."""
    if loaded.recipe.slurm is None:
        raise UserError(
            f"{loaded.path}: slurm is absent: add the section, for example slurm: {{partition: NAME, nodes: 2}}"
        )
    return loaded.recipe.slurm


def of_job(loaded: Loaded) -> Loaded:
    """Return the recipe as the job's run reads it: with ``form: ray`` groups on Ray name the job's own cluster."""
    recipe, config = loaded.recipe, loaded.recipe.slurm
    if config is None or config.form != "ray":
        return loaded
    rollout, teachers = _on_jobs_ray(recipe.rollout), {name: _on_jobs_ray(one) for name, one in recipe.teachers.items()}
    return replace(loaded, recipe=replace(recipe, rollout=rollout, teachers=teachers))


def _on_jobs_ray(group: Group) -> Group:
    if not isinstance(group.placement, RayConfig):
        return group
    return replace(group, placement=replace(group.placement, address="auto"))


def job_nodes(loaded: Loaded) -> NodePool:
    """Return the nodes that the section ``slurm`` describes.

    Raises:
        UserError: the form and the groups' placements do not go together.
    """
    config = slurm_of(loaded)
    _check_form(loaded, config)
    registered = _keys_of(loaded, RegisteredConfig)
    own = {key: config.components.get(key, SlurmComponentConfig()).gpus_per_node for key in registered}
    is_split = config.form == "heterogeneous"
    return NodePool(
        gpus_per_node=config.gpus_per_node,
        num_nodes=_without_spares(loaded, config, len(registered) if is_split else 1),
        student_nodes=config.student_nodes,
        components={k: config.gpus_per_node if n is None else n for k, n in own.items()} if is_split else None,
        has_ray=config.form == "ray",
    )


def _without_spares(loaded: Loaded, config: SlurmConfig, num_components: int) -> int | None:
    """Return the nodes on which something runs from the beginning; ``None``: as few as hold everything."""
    if config.nodes is None:
        return None
    left = config.nodes - config.spare_nodes * num_components
    if left < 1:
        raise UserError(
            f"{loaded.where('slurm', 'spare_nodes')}: {config.spare_nodes} for each of {num_components} components "
            f"leave none of slurm.nodes {config.nodes}: raise nodes, which counts them, or lower spare_nodes"
        )
    return left


def student_gpus(loaded: Loaded, places: Places) -> tuple[tuple[int, ...], ...]:
    """Return the GPUs that the launcher on each of the student's nodes sees (``JobLayout.student_gpus``)."""
    config = slurm_of(loaded)
    visible = list(places.reserved) if config.form == "ray" else [config.gpus_per_node] * places.student_nodes
    for server in (one for key in _keys_of(loaded, RegisteredConfig) for one in places.of(key) if one.gpus):
        if server.component == 0 and server.node < len(visible):
            visible[server.node] = min(visible[server.node], server.gpus[0])
    first, *others = visible
    return tuple(tuple(range(count)) for count in (first, *[min(others, default=0)] * len(others)))


def _keys_of(loaded: Loaded, kind: type) -> list[str]:
    return [key for key, group in engine_groups(loaded.recipe).items() if isinstance(group.placement, kind)]


def _check_form(loaded: Loaded, config: SlurmConfig) -> None:
    registered = _keys_of(loaded, RegisteredConfig)
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
    if config.spare_nodes and not registered:
        raise UserError(
            f"{loaded.where('slurm', 'spare_nodes')} is {config.spare_nodes}, but no group registers, and only such "
            "replicas move: remove it, or set placement: {type: registered}"
        )
    if config.form != "ray":
        return
    if registered:
        raise UserError(
            f"{loaded.where('slurm', 'form')} is 'ray', but {registered[0]}.placement.type is registered: set it to "
            "ray, or form: allocation"
        )
    if not _keys_of(loaded, RayConfig):
        raise UserError(
            f"{loaded.where('slurm', 'form')} is 'ray', but no group's placement.type is: set one, or form: allocation"
        )


def _component(config: SlurmConfig, pool: NodePool, places: Places, key: str, num_nodes: int) -> JobComponent:
    own, gpus = config.components.get(key, SlurmComponentConfig()), config.gpus_per_node
    has_spares = pool.components is None or key in pool.components
    if pool.components is not None and key in pool.components:
        # A component with fewer replicas than a node holds leaves the rest to others.
        gpus = min(pool.components[key], sum(len(one.gpus) for one in places.of(key)))
    return JobComponent(
        key=key,
        num_nodes=num_nodes + (config.spare_nodes if has_spares else 0),
        gpus_per_node=gpus,
        cpus_per_node=config.cpus_per_node if own.cpus_per_node is None else own.cpus_per_node,
        partition=config.partition if own.partition is None else own.partition,
    )
