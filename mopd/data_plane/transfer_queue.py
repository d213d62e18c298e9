"""Access to the TransferQueue package: its actors, and calls of its client that always end.

::

    storage (writes, clears, claims) ──┐            ┌── controller (actor): keys, tags, which fields are there
    reader on a student rank ──────────┴── ZeroMQ ──┴── storage units (actors): tensors, a sample in one of them

The package's own ``init`` joins whatever queue it finds on the cluster, by the name of an actor. Ours have no names: no
other run finds them, and they end with the process that started them. Clients need addresses only, not Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor

from mopd.base.text import last_line
from mopd.base.types import UserError
from mopd.data_plane.interface import StorageEnded

T = TypeVar("T")

PARTITION = "samples"
"""Name of our partition of the queue, which may hold several."""
STARTUP_S = 120.0
"""Deadline for an actor to start and report its address."""
PROBE_EVERY_S = 2.0
"""Interval between checks that the actors still listen, during a call that has no answer yet."""
PROBE_TIMEOUT_S = 5.0
"""Deadline for the system to accept a connection, however busy the actor is."""
NUM_PROBES = 3
"""Number of checks without any answer after which a machine counts as gone."""

_numbers = itertools.count()


def start_actors(ray: Any, num_storage_units: int, *, num_cpus: float) -> tuple[list[Any], dict[str, Any]]:
    """Start a controller and storage units, of ``num_cpus`` each, on a connected Ray.

    Returns:
        The actors' handles, and the address for ``QueueClient``.

    Raises:
        UserError: the package is missing, or the actors did not start within ``STARTUP_S``.
    """
    _load()
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    options = {"num_cpus": num_cpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
    config = {"num_data_storage_units": num_storage_units, "total_storage_size": None}
    actors = [TransferQueueController.options(**options).remote()]
    actors += [SimpleStorageUnit.options(**options).remote(config=config) for _ in range(num_storage_units)]
    try:
        servers = ray.get([actor.get_zmq_server_info.remote() for actor in actors], timeout=STARTUP_S)
    except ray.exceptions.GetTimeoutError as error:
        end_actors(ray, actors)
        raise UserError(
            f"data_plane: TransferQueue's {len(actors)} actors did not start on the Ray cluster within {STARTUP_S:g} "
            "s: free the cluster, or lower data_plane.num_storage_units"
        ) from error
    except ray.exceptions.RayError as error:
        end_actors(ray, actors)
        raise UserError(
            "data_plane: TransferQueue's actors ended as they started (is the same mopd installed on every node?): "
            f"{last_line(error)}"
        ) from error
    shown = [{"id": server.id, "ip": server.ip, "ports": dict(server.ports)} for server in servers]
    return actors, {"type": "transfer_queue", "controller": shown[0], "units": shown[1:]}


def end_actors(ray: Any, actors: Sequence[Any]) -> None:
    """End the actors now; what they hold is lost."""
    for actor in actors:
        ray.kill(actor)


class QueueClient:
    """Connection of one process. Every call ends: with its result, at the deadline, or soon after an actor has ended.

    Calls run on one event loop at a time. Samples are given as a batch's metadata, which ``retrieve`` returns.
    """

    def __init__(self, address: Mapping[str, Any], *, timeout_s: float) -> None:
        """Connect; ``timeout_s`` is the deadline of each call.

        Raises:
            UserError: the package is missing, or the controller does not answer.
        """
        _load()
        from transfer_queue.client import AsyncTransferQueueClient
        from transfer_queue.utils.enum_utils import Role
        from transfer_queue.utils.zmq_utils import ZMQServerInfo

        self._timeout_s = timeout_s
        self.around_calls: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Entered around each call."""
        self.deadline = math.inf
        """Time of the event loop at which every call ends, if its own deadline has not passed before."""
        self._servers = {"controller": address["controller"]}
        self._servers |= {f"storage unit {i}": unit for i, unit in enumerate(address["units"])}
        name = f"mopd-{os.getpid()}-{next(_numbers)}"
        controller = ZMQServerInfo(role=Role.CONTROLLER, **address["controller"])
        # The order of units decides which one holds a sample, so every client must use the same.
        units = {unit["id"]: ZMQServerInfo(role=Role.STORAGE, **unit) for unit in address["units"]}
        self._client = AsyncTransferQueueClient(name, controller, zmq_io_threads=2)
        try:
            self._client.initialize_storage_manager("SimpleStorage", {"zmq_info": units})
        except TimeoutError as error:
            self._client.close()
            raise UserError(f"data plane: {self._shown('controller')} does not answer") from error

    def close(self) -> None:
        """End the connection. No call may be under way."""
        self._client.close()

    async def retrieve(self, sample_ids: Sequence[int], *, create: bool = False) -> Any:
        """Return the metadata of samples, in order; unknown ones are left out, or created."""
        keys = [str(i) for i in sample_ids]
        return await self._call(self._client.async_kv_retrieve_meta(keys, PARTITION, create=create))

    async def write(
        self, batch: Any, fields: Mapping[str, list[Tensor]], tags: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Add fields to samples, and set their tags."""
        await self._call(self._write(batch, fields))
        if tags is not None:
            batch.update_custom_meta([dict(tag) for tag in tags])
            await self._call(self._client.async_set_custom_meta(batch))

    async def read(self, batch: Any, names: Sequence[str]) -> dict[str, list[Tensor]]:
        """Return fields of samples, all of which must have them."""
        return await self._call(self._read(batch, list(names)))

    # The client's own ``async_put`` and ``async_get_data`` join each field's tensors into one nested tensor and take it
    # apart again, several times over, and change the process's number of threads meanwhile. ``_write`` and ``_read``
    # call the functions below them, which exchange single tensors with the storage units.

    async def _write(self, batch: Any, fields: Mapping[str, list[Tensor]]) -> None:
        """Send each storage unit its samples' tensors, then tell the controller that the fields exist."""
        manager = self._client.storage_manager
        await asyncio.gather(
            *(
                manager._put_to_single_storage_unit(
                    group.global_indexes,
                    {name: [values[place] for place in group.batch_positions] for name, values in fields.items()},
                    target_storage_unit=unit,
                )
                for unit, group in manager._group_by_hash(batch.global_indexes).items()
            )
        )
        schema = {  # the package's description of fields whose samples differ in shape
            name: {
                "dtype": values[0].dtype, "shape": values[0].shape, "is_nested": True, "is_non_tensor": False,
                "per_sample_shapes": [tuple(value.shape) for value in values],
            }
            for name, values in fields.items()
        }  # fmt: skip
        await manager.notify_data_update(PARTITION, batch.global_indexes, schema)

    async def _read(self, batch: Any, names: list[str]) -> dict[str, list[Tensor]]:
        """Return the tensors of fields, gathered from the storage units that hold them."""
        manager = self._client.storage_manager
        groups = manager._group_by_hash(batch.global_indexes)
        answers = await asyncio.gather(
            *(
                manager._get_from_single_storage_unit(group.global_indexes, names, target_storage_unit=unit)
                for unit, group in groups.items()
            )
        )
        found: dict[str, list[Any]] = {name: [None] * batch.size for name in names}
        for group, (_, data) in zip(groups.values(), answers, strict=True):
            for name in names:
                for place, tensor in zip(group.batch_positions, data[name], strict=True):
                    found[name][place] = tensor
        return found

    async def clear(self, batch: Any) -> None:
        """Forget samples."""
        await self._call(self._client.async_clear_samples(batch))

    async def sample_ids(self) -> list[int]:
        """Return the ids of all samples that are held."""
        listed = await self._call(self._client.async_kv_list(PARTITION))
        return sorted(int(key) for key in listed.get(PARTITION, {}))

    async def save(self, folder: str) -> None:
        """Write everything into a folder that every actor's machine sees."""
        await self._call(self._client.async_save_controller_checkpoint(f"{folder}/controller.pkl"))
        await self._call(self._client.async_save_storage_checkpoint(folder))

    async def load(self, folder: str) -> None:
        """Read what ``save`` wrote. The actors unpickle the files: the caller must know them to be its own."""
        await self._call(self._client.async_load_storage_checkpoint(folder))
        await self._call(self._client.async_load_controller_checkpoint(f"{folder}/controller.pkl"))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` until it ends, its deadline passes, or an actor is found to have ended."""
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        deadline = min(loop.time() + self._timeout_s, self.deadline)
        silent: Counter[str] = Counter()
        try:
            with self.around_calls():
                while True:
                    left = deadline - loop.time()
                    done, _ = await asyncio.wait({task}, timeout=max(0.0, min(PROBE_EVERY_S, left)))
                    if done:
                        return task.result()
                    if left <= 0:
                        limit = f"within {self._timeout_s:g} s (schedule.wait_timeout_s)"
                        raise UserError(f"data plane: TransferQueue did not answer {limit}")
                    await self._require_alive(silent)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"data plane: TransferQueue refused a call: {error}") from error
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _require_alive(self, silent: Counter[str]) -> None:
        """Raise ``StorageEnded`` if a server's machine refuses connections, or has been ``silent`` several times."""
        for name, server in self._servers.items():
            port = server["ports"].get("put_get_socket") or server["ports"]["request_handle_socket"]
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(server["ip"], port), PROBE_TIMEOUT_S)
                writer.close()
                silent[name] = 0
            except asyncio.TimeoutError:
                silent[name] += 1
            except OSError:
                # Refused or unreachable: nothing listens there any more, one look is enough.
                silent[name] = NUM_PROBES
            if silent[name] >= NUM_PROBES:
                raise StorageEnded(
                    f"data plane: {self._shown(name)} has ended, and the samples that it held with it: see Ray's logs"
                )

    def _shown(self, name: str) -> str:
        server = self._servers[name]
        return f"TransferQueue's {name} ({server['ip']}, ports {sorted(server['ports'].values())})"


def _load() -> None:
    """Import the package and silence its logging: its errors are raised all the same."""
    try:
        import transfer_queue  # noqa: F401
    except ImportError as error:
        raise UserError(
            "data_plane.type is transfer_queue, but the package is not installed: pip install 'mopd[ray]'"
        ) from error
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] == "transfer_queue":
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
