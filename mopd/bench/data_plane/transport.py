"""A step's samples from those that make them to a rank: the two data planes, Ray's object store, pickled lists.

::

    transfer_queue      producer ── storage units ──> consumer
    local               the storage's own process ──> consumer            producers work beside the storage in a run
    ray_object_store    producer ── driver ──> consumer                   every object passes the driver
    pickled_lists       producer ──> consumer                             nested lists of numbers on a socket

Producer and consumer are one process each for all contenders (actors). Samples travel in units; each ends in padded
tensors, as a micro-batch does, so that nobody's bytes stay unread. The contenders take turns within a round.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch

from mopd.bench.data_plane.steps import StepData, checksum, make_step, padded
from mopd.config.data import TransferQueueConfig
from mopd.data_plane.interface import Storage
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.queue_plane import QueuePlane
from mopd.data_plane.reading import open_reader
from mopd.files.temporary import TemporaryFolder
from mopd.placement.ray.connection import connect, disconnect
from mopd.placement.storage import open_queue
from mopd.types import LOSS_FIELDS

TIMEOUT_S = 600.0
MAX_LIST_BYTES = 2**28
"""Of a step above which pickled lists, a minute for a GiB, take part in the first round only."""


@dataclass(kw_only=True)
class Carrier:
    """One contender at one size, in the order of the rounds."""

    name: str
    put_s: list[float] = field(default_factory=list)
    """Until all can be read; 0 where both ends work at the same time."""
    get_s: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Put and get together."""
        return [put + get for put, get in zip(self.put_s, self.get_s, strict=True)]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def ratio_to(self, other: Carrier) -> float:
        """Median over their common rounds of this one's seconds over the other's."""
        num = min(len(self.seconds), len(other.seconds))
        return statistics.median(a / b for a, b in zip(self.seconds[:num], other.seconds[:num], strict=True))


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """All contenders at one size."""

    num_bytes: int
    num_samples: int
    carriers: dict[str, Carrier]


class Producer:
    """The process that makes samples."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._loop = asyncio.new_event_loop()

    def make(self, num_bytes: int, top_k: int) -> None:
        """Have a step ready."""
        self._step = make_step(num_bytes, top_k=top_k)

    def open(self, address: dict[str, Any]) -> None:
        """Connect to TransferQueue as a run's producer does."""
        self._queue = QueuePlane(address, timeout_s=TIMEOUT_S, end=lambda: None)

    def put(self) -> None:
        """The step into TransferQueue."""
        self._loop.run_until_complete(put_units(self._queue, self._step))

    def clear(self) -> None:
        """The step is trained."""
        self._loop.run_until_complete(self._queue.discard([meta.sample_id for meta in self._step.metas]))

    def unit(self, number: int) -> dict[str, list[torch.Tensor]]:
        """A unit by value."""
        place = self._step.units()[number]
        return {name: values[place] for name, values in self._step.fields.items()}

    def send_lists(self, path: str) -> None:
        """The step as lists to whoever listens."""
        with Client(path, "AF_UNIX") as connection:
            for number in range(len(self._step.units())):
                unit = self.unit(number)
                connection.send({name: [tensor.tolist() for tensor in unit[name]] for name in unit})


class Consumer:
    """The process at the other end; its methods return seconds and a checksum of all that arrived."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._readers: dict[str, Any] = {}
        self._batches: list[dict[str, torch.Tensor]] = []

    def open(self, name: str, address: dict[str, Any]) -> None:
        """Connect to a data plane."""
        self._readers[name] = open_reader(address, timeout_s=TIMEOUT_S)

    def read(self, name: str, units: Sequence[Sequence[int]]) -> tuple[float, int]:
        """Through a data plane."""
        started = time.perf_counter()
        total = sum(checksum(padded(self._readers[name].fetch(ids, LOSS_FIELDS))) for ids in units)
        return time.perf_counter() - started, total

    def read_references(self, ray: Any, references: Sequence[Any]) -> tuple[float, int]:
        """Through Ray's object store."""
        started = time.perf_counter()
        total = sum(checksum(padded(ray.get(reference))) for reference in references)
        return time.perf_counter() - started, total

    def receive(self, path: str, num_units: int) -> tuple[float, int]:
        """From a socket on which Python pickles what it is given."""
        with Listener(path, "AF_UNIX") as listener, listener.accept() as connection:
            started = time.perf_counter()
            total = 0
            for _ in range(num_units):
                lists = connection.recv()
                total += checksum(padded({name: _tensors(name, lists[name]) for name in lists}))
            return time.perf_counter() - started, total


DTYPES = dict(zip(LOSS_FIELDS, (torch.int64, torch.bool, *(3 * (torch.float32,)), torch.float32), strict=True)) | {
    "teacher_ids": torch.int32
}


def _tensors(name: str, lists: Sequence[list[Any]]) -> list[torch.Tensor]:
    return [torch.tensor(values, dtype=DTYPES[name]) for values in lists]


async def put_units(storage: Storage, step: StepData) -> None:
    """A step into a data plane, unit by unit."""
    for unit in step.units():
        await storage.put(step.metas[unit], {name: step.fields[name][unit] for name in step.fields})


class Bench:
    """The driver. Each way of carrying a step returns its seconds of put, of get, and the consumer's checksum."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._producer = ray.remote(Producer).options(num_cpus=0).remote()
        self._consumer = ray.remote(Consumer).options(num_cpus=0).remote()
        self._local = LocalDataPlane()
        self._local.serve(host=None)
        self._queue = open_queue(TransferQueueConfig(type="transfer_queue"), timeout_s=TIMEOUT_S)
        self._get(self._producer.open.remote(self._queue.address))
        for name, storage in (("local", self._local), ("transfer_queue", self._queue)):
            self._get(self._consumer.open.remote(name, storage.address))
        self.ways: dict[str, Callable[[StepData], tuple[float, float, int]]] = {
            "transfer_queue": self._through_queue,
            "local": self._through_local,
            "ray_object_store": self._through_driver,
            "pickled_lists": self._as_lists,
        }

    def make(self, num_bytes: int, top_k: int) -> StepData:
        """The same step here and in the producer."""
        self._get(self._producer.make.remote(num_bytes, top_k))
        return make_step(num_bytes, top_k=top_k)

    def close(self) -> None:
        """End the planes."""
        asyncio.run(self._local.close())
        asyncio.run(self._queue.close())

    def _get(self, reference: Any) -> Any:
        return self._ray.get(reference, timeout=TIMEOUT_S)

    def _through_queue(self, step: StepData) -> tuple[float, float, int]:
        started = time.perf_counter()
        self._get(self._producer.put.remote())
        put_s = time.perf_counter() - started
        get_s, total = self._get(self._consumer.read.remote("transfer_queue", _ids(step)))
        self._get(self._producer.clear.remote())
        return put_s, get_s, total

    def _through_local(self, step: StepData) -> tuple[float, float, int]:
        started = time.perf_counter()
        asyncio.run(put_units(self._local, step))
        put_s = time.perf_counter() - started
        get_s, total = self._get(self._consumer.read.remote("local", _ids(step)))
        asyncio.run(self._local.discard([meta.sample_id for meta in step.metas]))
        return put_s, get_s, total

    def _through_driver(self, step: StepData) -> tuple[float, float, int]:
        started = time.perf_counter()
        made = [self._producer.unit.remote(number) for number in range(len(step.units()))]
        references = [self._ray.put(self._get(one)) for one in made]
        put_s = time.perf_counter() - started
        get_s, total = self._get(self._consumer.read_references.remote(self._ray, references))
        return put_s, get_s, total

    def _as_lists(self, step: StepData) -> tuple[float, float, int]:
        with TemporaryFolder("mopd-bench-") as folder:
            path = str(Path(folder) / "socket")
            received = self._consumer.receive.remote(path, len(step.units()))
            while not Path(path).exists():
                time.sleep(0.01)
            started = time.perf_counter()
            sent = self._producer.send_lists.remote(path)
            _, total = self._get(received)
            self._get(sent)
            return 0.0, time.perf_counter() - started, total


def _ids(step: StepData) -> list[list[int]]:
    return [[meta.sample_id for meta in step.metas[unit]] for unit in step.units()]


def measure_transport(
    sizes: Sequence[int], *, top_k: int, num_rounds: int, progress: Callable[[str], None]
) -> list[SizeResult]:
    """Every contender at every size.

    Raises:
        UserError: a package is missing, or Ray does not start.
    """
    ray = connect("bench data_plane", None, num_cpus=1, gpus=())
    try:
        bench = Bench(ray)
        try:
            for size in (min(sizes) // 8, min(sizes)):  # until connections, memory and caches are as they stay
                _measure(bench, bench.make(size, top_k), 1)
            results = []
            for size in sizes:
                progress(f"data_plane: {size / 2**20:,.0f} MiB a step")
                results.append(_measure(bench, bench.make(size, top_k), num_rounds))
            return results
        finally:
            bench.close()
    finally:
        disconnect()


def _measure(bench: Bench, step: StepData, num_rounds: int) -> SizeResult:
    carriers = {name: Carrier(name=name) for name in bench.ways}
    expected = checksum(padded(step.fields))
    names = list(bench.ways)
    for number in range(num_rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            if name == "pickled_lists" and number and step.num_bytes > MAX_LIST_BYTES:
                continue
            put_s, get_s, total = bench.ways[name](step)
            if total != expected:
                raise RuntimeError(f"{name}: what arrived is not what was put")
            carriers[name].put_s.append(put_s)
            carriers[name].get_s.append(get_s)
    return SizeResult(num_bytes=step.num_bytes, num_samples=len(step.metas), carriers=carriers)
