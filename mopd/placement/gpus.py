"""Which GPU belongs to whom on this machine: decided once for the whole recipe, before anything is started.

::

    trainer ranks   GPU 0, 1, ...  by local rank; engines in_process share rank 0's
    local groups    the ones that ``gpus`` names, else the lowest that are free, in the recipe's order
    ray             what is left, on a cluster of this machine

A GPU has one owner. Sharing is asked for by a placement that shares: ``in_process`` (with rank 0), ``local`` with
``share_gpus_with`` (the trainer ranks', by turns) or, on Ray, a ``shared_pool``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mopd.config.groups import EngineGroupConfig
from mopd.config.load import Loaded
from mopd.config.placements import InProcessConfig, LocalConfig
from mopd.config.schema import Recipe
from mopd.types import UserError

MAX_SHOWN = 8
"""Lines of the table of owners in an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this machine has and who is on it already."""

    num_gpus: int
    """CUDA devices that this process sees; 0 without CUDA."""
    num_ranks: int
    """Trainer ranks on this machine; 0 where only engines run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Whose GPU is which, by number as this process counts them."""

    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    """Key of a ``local`` group -> GPUs of each replica; empty tuples without CUDA."""
    rest: tuple[int, ...]
    """Nobody's: for a Ray cluster of this machine."""


def this_machine(*, num_ranks: int | None = None) -> Machine:
    """Of the process that asks. ``num_ranks`` is known before the ranks are started; later torchrun says it."""
    if num_ranks is None:
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    import torch  # the checks that need no torch give their own description of the machine

    return Machine(num_gpus=torch.cuda.device_count(), num_ranks=num_ranks)


def local_rank() -> int | None:
    """This rank's number among those of its machine; None outside torchrun."""
    own = os.environ.get("LOCAL_RANK")
    return None if own is None else int(own)


def visible_gpus(gpus: Sequence[int]) -> list[str]:
    """Names of GPUs for a child's CUDA_VISIBLE_DEVICES, when this process itself may see only some."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return [str(gpu) for gpu in gpus]
    names = [name.strip() for name in shown.split(",")]
    return [names[gpu] for gpu in gpus]


def engine_groups(recipe: Recipe) -> dict[str, EngineGroupConfig]:
    """The groups of a recipe by key, the rollout first."""
    return {"rollout": recipe.rollout, **{f"teachers.{name}": group for name, group in recipe.teachers.items()}}


def share_gpus(groups: Mapping[str, EngineGroupConfig], machine: Machine) -> Shares:
    """Give every trainer rank and every replica of a ``local`` group GPUs of its own.

    Raises:
        UserError: one line with the table of who wants what: too few GPUs, one that two want, or that is not there.
    """
    local = {key: group for key, group in groups.items() if isinstance(group.placement, LocalConfig)}
    if machine.num_gpus == 0:
        for key, group in local.items():
            if _named(group):
                raise UserError(
                    f"{key}.placement.gpus is {list(_named(group))}, but this machine has no CUDA device: remove gpus"
                )
        return Shares(groups={key: ((),) * group.replicas for key, group in local.items()}, rest=())
    owners = _of_trainer(groups, machine)
    for key, group in local.items():
        for gpu in _named(group):
            _take(owners, gpu, f"{key}.placement.gpus", groups, machine)
    shares: dict[str, tuple[tuple[int, ...], ...]] = {}
    for key, group in local.items():
        size, own = group.gpus_per_replica, list(_named(group))
        if group.shares_gpus:
            own = _of_ranks(key, size * group.replicas, machine)
            for gpu in own:
                owners.setdefault(gpu, key)
        elif not own:
            free = [gpu for gpu in range(machine.num_gpus) if gpu not in owners]
            own = free[: size * group.replicas]
            if len(own) < size * group.replicas:
                raise UserError(
                    f"{key}.placement: {group.replicas} replicas of {size} GPUs need {size * group.replicas} and "
                    f"{len(free)} are free ({_table(groups, machine)}): lower replicas, use a machine with more GPUs, "
                    "or set placement: {type: in_process} to share trainer rank 0's GPU"
                )
            for gpu in own:
                owners[gpu] = key
        shares[key] = tuple(tuple(own[i * size : (i + 1) * size]) for i in range(group.replicas))
    rest = tuple(gpu for gpu in range(machine.num_gpus) if gpu not in owners)
    return Shares(groups=shares, rest=rest)


def check_gpus(loaded: Loaded, keys: Sequence[str] | None = None, *, num_nodes: int = 1) -> None:
    """``share_gpus`` for this node's share of the ranks and the groups ``keys`` (all), before anything starts."""
    recipe = loaded.recipe
    groups = {key: group for key, group in engine_groups(recipe).items() if keys is None or key in keys}
    try:
        share_gpus(groups, this_machine(num_ranks=recipe.student.parallel.world_size // num_nodes))
    except UserError as error:
        raise UserError(f"{loaded.path}: {error}") from None


def _of_trainer(groups: Mapping[str, EngineGroupConfig], machine: Machine) -> dict[int, str]:
    """GPU -> owner, for the trainer ranks and what runs in rank 0's process."""
    if machine.num_ranks > machine.num_gpus:
        raise UserError(
            f"student.parallel: {machine.num_ranks} trainer ranks run on this machine and each sees {machine.num_gpus} "
            "GPUs: start as many ranks as there are GPUs, and show every rank all of them (CUDA_VISIBLE_DEVICES)"
        )
    owners = {rank: f"trainer rank {rank}" for rank in range(machine.num_ranks)}
    for key, group in groups.items():
        if not isinstance(group.placement, InProcessConfig):
            continue
        for gpu in range(group.gpus_per_replica):
            # Rank 0's GPU is shared on purpose, and so are those of several engines in its process.
            if gpu > 0 and not owners.get(gpu, "").startswith("in_process"):
                _take(
                    owners,
                    gpu,
                    f"{key}.engine.tensor_parallel_size {group.gpus_per_replica} in_process",
                    groups,
                    machine,
                )
                owners[gpu] = "in_process"
            owners.setdefault(gpu, "in_process")
    return owners


def _of_ranks(key: str, count: int, machine: Machine) -> list[int]:
    """GPUs of trainer ranks for a group that shares them; where none is a rank (an engine alone), any."""
    most = machine.num_ranks or machine.num_gpus
    if count > most:
        raise UserError(
            f"{key}.placement.share_gpus_with: its replicas need {count} GPUs, and {most} of this machine are trainer "
            "ranks': lower replicas"
        )
    return list(range(count))


def _take(
    owners: dict[int, str], gpu: int, key: str, groups: Mapping[str, EngineGroupConfig], machine: Machine
) -> None:
    if not 0 <= gpu < machine.num_gpus:
        raise UserError(
            f"{key}: GPU {gpu} is not there, this machine shows {machine.num_gpus} ({_table(groups, machine)}): name "
            f"GPUs from 0 to {machine.num_gpus - 1}"
        )
    if gpu in owners:
        raise UserError(
            f"{key}: GPU {gpu} belongs to {owners[gpu]} ({_table(groups, machine)}): give each its own, or remove gpus "
            "to have them shared out"
        )
    owners[gpu] = key


def _named(group: EngineGroupConfig) -> tuple[int, ...]:
    return group.placement.gpus if isinstance(group.placement, LocalConfig) else ()


def _table(groups: Mapping[str, EngineGroupConfig], machine: Machine) -> str:
    """Who wants what, on one line."""
    rows = [f"trainer ranks: {_numbers(range(machine.num_ranks))}"] if machine.num_ranks else []
    for key, group in groups.items():
        if isinstance(group.placement, InProcessConfig):
            rows.append(f"{key}: {_numbers(range(group.gpus_per_replica))} in_process")
        elif isinstance(group.placement, LocalConfig):
            wanted = f"{group.replicas} x {group.gpus_per_replica}"
            shared = f"{key}: {wanted} of the ranks'"
            free = f"{key}: {_numbers(_named(group))}" if _named(group) else f"{key}: any {wanted}"
            rows.append(shared if group.shares_gpus else free)
    more = [f"and {len(rows) - MAX_SHOWN} more"] if len(rows) > MAX_SHOWN else []
    return "; ".join([f"{machine.num_gpus} GPUs here", *itertools.islice(rows, MAX_SHOWN), *more])


def _numbers(gpus: Sequence[int]) -> str:
    named = ", ".join(map(str, itertools.islice(gpus, MAX_SHOWN)))
    return f"GPU {named}" + (", ..." if len(gpus) > MAX_SHOWN else "")
