"""The storage of a recipe's data plane: in this process, or as TransferQueue's actors on a Ray cluster."""

from __future__ import annotations

import time
from typing import Any

from mopd.config.schema import LocalPlaneConfig, TransferQueueConfig
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.queue_plane import QueuePlane
from mopd.data_plane.transfer_queue import end_actors, start_actors
from mopd.placement.ray.connection import connect, disconnect
from mopd.types import UserError

RELEASE_S = 10.0
"""For a cluster to notice that what it shows as taken was given back: a run that ended just before."""


def open_storage(
    config: LocalPlaneConfig | TransferQueueConfig, *, host: str | None, timeout_s: float
) -> LocalDataPlane | QueuePlane:
    """Open it for readers on this machine, or on others too, which call this one ``host``. Replicas on Ray come first:
    their cluster is used.

    Raises:
        UserError: nothing can listen, or the cluster cannot be reached or has no room.
    """
    if isinstance(config, LocalPlaneConfig):
        plane = LocalDataPlane()
        plane.serve(host=host)
        return plane
    ray = connect("data_plane", config.address, num_cpus=1, gpus=())
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
