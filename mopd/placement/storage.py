"""The storage of a recipe's data plane: in this process, or as TransferQueue's actors on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mopd.base.types import UserError
from mopd.config.data import LocalPlaneConfig, TransferQueueConfig
from mopd.config.placements import RayConfig
from mopd.config.schema import Recipe
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.queue_plane import QueuePlane
from mopd.data_plane.transfer_queue import end_actors, start_actors
from mopd.placement.gpus import places_here
from mopd.placement.groups import plan_groups
from mopd.placement.ray.cluster import wanted_cpus
from mopd.placement.ray.connection import RELEASE_S, connect, disconnect


def open_storage(recipe: Recipe, *, host: str | None) -> LocalDataPlane | QueuePlane:
    """Open it for readers on this machine, or on others too, which call this one ``host``.

    A cluster of this machine alone, which replicas on Ray share, is started with room for them.

    Raises:
        UserError: nothing can listen, or the cluster cannot be reached or has no room.
    """
    config = recipe.data_plane
    if isinstance(config, LocalPlaneConfig):
        plane = LocalDataPlane()
        plane.serve(host=host)
        return plane
    plans = plan_groups(recipe)
    on_ray = [plan for plan in plans.values() if isinstance(plan.group.placement, RayConfig)]
    gpus = places_here({key: plan.group for key, plan in plans.items()}).require().ray_gpus if on_ray else ()
    return open_queue(config, timeout_s=recipe.schedule.wait_timeout_s, num_cpus=wanted_cpus(on_ray), gpus=gpus)


def open_queue(
    config: TransferQueueConfig, *, timeout_s: float, num_cpus: float = 0, gpus: Sequence[int] = ()
) -> QueuePlane:
    """A queue of our own on the cluster; one of this machine alone starts with ``num_cpus`` and ``gpus`` for others.

    Raises:
        UserError: see ``open_storage``.
    """
    ray = connect("data_plane", config.address, num_cpus=num_cpus, gpus=gpus)
    actors: list[Any] = []

    def end() -> None:
        end_actors(ray, actors)
        disconnect()

    try:
        if config.address is not None:
            _wait_for_room(ray, config)
        # A cluster of this machine alone has as many CPUs as replicas asked for, and shares them.
        started, address = start_actors(ray, config.num_storage_units, num_cpus=0 if config.address is None else 1)
        actors += started
        return QueuePlane(address, timeout_s=timeout_s, end=end)
    except BaseException:
        end()
        raise


def _wait_for_room(ray: Any, config: TransferQueueConfig) -> None:
    """``UserError`` unless the actors' CPUs are free, or become so within ``RELEASE_S``: Ray would wait for ever."""
    needed = 1 + config.num_storage_units
    deadline = time.monotonic() + RELEASE_S
    while (free := ray.available_resources().get("CPU", 0.0)) < needed:
        if time.monotonic() > deadline or ray.cluster_resources().get("CPU", 0.0) < needed:
            raise UserError(
                f"data_plane: TransferQueue needs {needed} free CPUs of the Ray cluster (one for its controller, one "
                f"for each of num_storage_units {config.num_storage_units}), and {free:g} are free: lower it, or add "
                "nodes"
            )
        time.sleep(0.5)
