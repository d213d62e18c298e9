"""Does the plan fit the cluster? Answered before anything is started, and without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mopd.types import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Equal bundles, each of which must lie on one node."""

    keys: tuple[str, ...]
    """Groups that use them, by turns if several."""
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
        f"{has_gpus:g} and {has_cpus:g} are free ({free}): {lacks}; lower replicas, placement.num_gpus or "
        "placement.num_cpus, or add nodes"
    )
