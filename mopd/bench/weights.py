"""``mopd bench weights``: a student's weights to servers of torch engines: by a collective, by HTTP, and as a bare
broadcast, in turns.

::

    bare broadcast   gloo (on CUDA NCCL), as many bytes, bucket by bucket, from and into the same two buckets
    collective, ipc  student ── calls ──> the process that makes samples ── HTTP ──> servers, and the tensors from the
                     student to the servers
    http             student ── staged weights ──> the process that makes samples ── HTTP, in pieces ──> servers

Student, process and servers are a run's, and the same for both ways; who takes part in the bare broadcast is a process
of its own. After each update every server must answer as after the other way's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd import cpu_shim
from mopd.bench.harness import BenchReport, Comparison, Goals, Others, at_least, at_most, ratio, rounds, rows, say
from mopd.bench.hop import Hop, Makers, hop
from mopd.bench.models import make_recipe, qwen3, write_model
from mopd.bench.processes import TIMEOUT_S, TOKEN, DevicePeaks, HostPeaks, children, family_busy_s, received, servers
from mopd.config.groups import RoutingConfig
from mopd.config.student import ParallelConfig, StudentConfig
from mopd.config.weights import MAX_BUCKET_MIB, CollectiveConfig, IpcConfig
from mopd.conversion.models.reading import read_dims
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import SamplingParams
from mopd.files.temporary import TemporaryFolder
from mopd.placement.engine_file import rollout_file
from mopd.placement.weights import GroupWeightSync
from mopd.replicas.interface import Replica
from mopd.replicas.router import Router
from mopd.replicas.transfer import TransferTargets
from mopd.student import parallel
from mopd.student.model.gpt import build_model
from mopd.student.weights import hf_tensors, iter_hf_weights
from mopd.transfer.buckets import TensorMeta
from mopd.transfer.group import GroupOrder, GroupStore, Pending, TransferGroup
from mopd.types import UserError

MIB = 2**20
BARE, HTTP = "bare broadcast", "http"
WAYS: dict[str, type[CollectiveConfig] | type[IpcConfig]] = {"collective": CollectiveConfig, "ipc": IpcConfig}
"""Ways that are measured beside both; one at a time, as an engine is in one group."""
LEAST_OF_BARE, LEAST_OVER_HTTP = 0.7, 3.0
"""Goals relative to the bare broadcast's rate, and to HTTP's."""
MOST_BUCKETS = 2.0
"""Buckets of memory beyond the models', on either side."""
MOST_CLAIM_S = 0.05
"""Longest wait of the student for the data plane while its weights travel by HTTP."""
LIMITS = {"mb": 100_000, "replicas": 64, "bucket_mib": MAX_BUCKET_MIB, "rounds": 1000}
SMALL_BYTES = 2**27
"""A student below has narrow layers, so that there are several."""
VOCAB_SIZE, STD = 4096, 0.02
SAMPLING = SamplingParams(max_new_tokens=4)
CLAIM_EVERY_S = 0.005


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure and print; the exit code.

    Raises:
        UserError: an impossible option, a server did not start, or servers answer otherwise after one way than after
            the other.
    """
    for name, most in LIMITS.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if not 1 <= value <= most:
                raise UserError(f"--{name.replace('_', '-')} is {value}: set 1 to {most}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and (args.way == "ipc" or torch.cuda.device_count() <= max(args.replicas)):
        raise UserError(
            f"bench weights: student and replicas have a GPU each, by --way collective, and this machine has "
            f"{torch.cuda.device_count()}: set --replicas lower, or CUDA_VISIBLE_DEVICES= for the CPU (ipc on one GPU: "
            "tools/gpu_student.py --stages ipc)"
        )
    report = BenchReport(benchmark="weights", arguments=arguments, as_json=args.json, device=device)
    for mb, replicas in itertools.product(args.mb, args.replicas):
        asyncio.run(measure(report, mb * 10**6, replicas, args.way, args.bucket_mib, args.rounds))
    return report.finish()


async def measure(
    report: BenchReport, num_bytes: int, num_replicas: int, way: str, bucket_mib: int, count: int
) -> None:
    """Take a warm-up, then ``count`` rounds of the bare broadcast, ``way`` (of ``WAYS``) and HTTP."""
    with TemporaryFolder("mopd-bench-") as folder, bench_student(Path(folder) / "model", num_bytes) as student:
        environments = [
            {"OMP_NUM_THREADS": "1", **({"CUDA_VISIBLE_DEVICES": str(1 + i)} if student.device.type == "cuda" else {})}
            for i in range(num_replicas)
        ]
        engine_file = rollout_file(make_recipe(Path(folder) / "model", longest=256))
        size = sum(meta.num_bytes for meta in student.metas)
        async with (
            servers(Path(folder), engine_file, environments) as pids,
            hop(makers, tuple(pids), TOKEN) as through,
        ):
            say(f"weights: {size / 1e9:.2f} GB, {num_replicas} replicas, warming up")
            updates = Updates(student, through, list(pids.values()), way, bucket_mib)
            try:
                with bare_broadcast(size, bucket_mib * MIB, num_replicas, student.device) as bare:
                    await updates.begin()
                    await asyncio.to_thread(bare)
                    seconds: dict[str, list[float]] = {name: [] for name in (BARE, way, HTTP)}
                    others = Others(family_busy_s)
                    for order in rounds(seconds, count):
                        student.change()
                        for name in order:
                            took = await (asyncio.to_thread(bare) if name == BARE else updates.publish(name))
                            seconds[name].append(took)
                        await updates.compare()
                        say(", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items()))
                    report.others_cores = cores = others.cores()
            finally:
                await updates.close()
    facts: dict[str, Any] = {
        "way": way,
        "num_bytes": size,
        "num_replicas": num_replicas,
        "bucket_bytes": bucket_mib * MIB,
    }
    facts["others_cores"] = cores
    report.add(*result(seconds, facts, updates))


def result(
    seconds: Mapping[str, Sequence[float]], facts: Mapping[str, Any], updates: Updates
) -> tuple[Comparison, Goals]:
    """The table, and the goals of one student and one number of replicas."""
    way, size, taken = facts["way"], facts["num_bytes"], updates.extra_bytes

    def figures(name: str, median_s: float) -> dict[str, Any]:
        return {"gb_per_s": size / 1e9 / median_s, **{side: most / MIB for side, most in taken.get(name, {}).items()}}

    columns = {"s": "median_s:.2f", "GB/s": "gb_per_s:.2f", "x bare": "ratio:.2f"}
    columns |= {f"{side} MiB": f"{side}:,.0f" for side in taken[way]}
    phases = {key: statistics.median(phase[key] for phase in updates.phases) for key in updates.phases[0]}
    title = f"{size / 1e9:.2f} GB to {facts['num_replicas']}"
    goals = {
        "of_bare_broadcast": at_least(ratio(seconds, BARE, way), LEAST_OF_BARE),
        "over_http": at_least(ratio(seconds, HTTP, way), LEAST_OVER_HTTP),
        "extra_buckets": at_most(max(taken[way].values()) / facts["bucket_bytes"], MOST_BUCKETS),
        "claim_s": at_most(statistics.median(updates.claim_s), MOST_CLAIM_S),
    }
    facts = {**facts, "phases": phases, "extra_bytes": taken, "claim_s": updates.claim_s}
    remarks = [", ".join(f"{key.removeprefix('timing/')} {value:.2f}" for key, value in phases.items())]
    part = Comparison(title=title, columns=columns, rows=rows(seconds, BARE, figures), facts=facts, remarks=remarks)
    return part, {f"{title}/{name}": goal for name, goal in goals.items()}


class Updates:
    """Both ways to the same servers."""

    def __init__(self, student: BenchStudent, through: Hop, pids: Sequence[int], way: str, bucket_mib: int) -> None:
        self._student, self._through, self._way = student, through, way
        is_cuda = student.device.type == "cuda"
        self._peaks = DevicePeaks if is_cuda else HostPeaks
        holders = range(1 + len(pids)) if is_cuda else (os.getpid(), *pids)
        self._holders = {f"receiver {i}" if i else "sender": holder for i, holder in enumerate(holders)}
        if not is_cuda:
            self._holders["producer"] = through.pid
        cfg = WAYS[way](type=way, bucket_mib=bucket_mib)  # type: ignore[arg-type]
        self._transfer = through.transfer(cfg, student.metas, student.device)
        self._thread = ThreadPoolExecutor(1)
        self._version = -1
        self._answers: list[Any] = []
        self.phases: list[dict[str, float]] = []
        """Metrics of each update by ``way``: see ``Transfer.take_numbers``."""
        sides = [name.split()[0] for name in self._holders]
        self.extra_bytes: dict[str, dict[str, int]] = {name: dict.fromkeys(sides, 0) for name in (way, HTTP)}
        """Most memory, by way, that the sender, the process and any receiver took above what they had."""
        self.claim_s: list[float] = []
        """The longest wait for an answer to a claim, of each update by HTTP."""

    async def begin(self) -> None:
        """Measure the memory that updates take. On a CPU the first one says nothing: engines without weights have never
        touched their own; and what is freed after one by HTTP may be taken again unseen."""
        self._student.change()
        if self._student.device.type == "cpu":
            await self.publish(self._way)
        for way, most in self.extra_bytes.items():
            peaks = self._peaks(self._holders)
            await self.publish(way)
            for name, extra in peaks.extra_bytes().items():
                side = name.split()[0]
                most[side] = max(most[side], extra)
        await self.compare()
        self.phases, self.claim_s = [], []

    async def publish(self, way: str) -> float:
        """Seconds of an update; what every server then draws is kept."""
        self._version += 1
        started = time.perf_counter()
        if way == HTTP:
            weights = self._through.weights
            staged = await self._in_thread(lambda: weights.stage(self._student.read(in_place=False), self._version))
            is_over = asyncio.Event()
            claims = asyncio.ensure_future(self._longest_claim_s(is_over))
            try:
                await weights.send(staged)
            finally:
                is_over.set()
                self.claim_s.append(await claims)
        else:
            await self._transfer.publish(self._version, lambda: self._student.read(in_place=True), self._in_thread)
            self.phases.append(self._transfer.take_numbers())
        seconds = time.perf_counter() - started
        self._answers += await self._through.call("answers")
        return seconds

    async def compare(self) -> None:
        """``UserError`` if the answers since the last call differ."""
        answers, self._answers = self._answers, []
        if any(answer != answers[0] for answer in answers):
            raise UserError("bench weights: engines answer otherwise after one way than after the other")

    async def close(self) -> None:
        """Leave the group."""
        await self._transfer.close()
        self._thread.shutdown()

    async def _longest_claim_s(self, is_over: asyncio.Event) -> float:
        """Claim from the data plane every few milliseconds; the longest wait for an answer."""
        longest_s = 0.0
        while not is_over.is_set():
            began = time.perf_counter()
            await self._through.workers.claim([], [])
            longest_s = max(longest_s, time.perf_counter() - began)
            await asyncio.sleep(CLAIM_EVERY_S)
        return longest_s

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@asynccontextmanager
async def makers(urls: Sequence[str], token: str) -> AsyncIterator[Makers]:
    """Router and clients of the servers, and an empty data plane."""
    engines = [
        RemoteEngine(url, token=token, timeout_s=TIMEOUT_S, name=f"rollout.{number}") for number, url in enumerate(urls)
    ]
    router = Router("bench", [Replica(name=one.name, engine=one) for one in engines], RoutingConfig(), kind="rollout")
    targets = TransferTargets(router, num_workers=1, on_running="finish", drain_s=TIMEOUT_S)

    async def answers() -> list[Any]:
        """Tokens and log-probs that each server draws."""
        drawn = [await engine.generate([[3, 4, 5]], SAMPLING, [0]) for engine in engines]
        return [[generation.tokens.tolist(), generation.logprobs.tolist()] for (generation,) in drawn]

    yield Makers(sync=GroupWeightSync(router, targets=targets), plane=LocalDataPlane(), calls={"answers": answers})
    await router.close()
    for engine in engines:
        await engine.close()


class BenchStudent:
    """A Megatron model of a given size on one rank, without gradients and optimizer."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)  # as beside as many busy engines
        self._dims = read_dims(folder)
        self._layout = parallel.initialize(ParallelConfig(), timeout_s=TIMEOUT_S, seed=0)
        self.device = self._layout.device
        with cpu_shim.activate():
            cfg = StudentConfig(model=str(folder), dtype="float32")
            self._model = build_model(cfg, self._dims, self._layout).requires_grad_(False)
        for parameter in self._model.parameters():
            parameter.normal_(std=STD)
        self.metas = [TensorMeta(*tensor) for tensor in hf_tensors(self._dims, torch.float32)]

    def change(self) -> None:
        """Other weights, as after a step."""
        self._model.decoder.final_layernorm.weight.mul_(1.5)

    def read(self, *, in_place: bool) -> Iterator[tuple[str, Tensor]]:
        """All weights by their names in the engines' checkpoint."""
        return iter_hf_weights([self._model], self._dims, self._layout, in_place=in_place, by_stage=False)


@contextmanager
def bench_student(folder: Path, num_bytes: int) -> Iterator[BenchStudent]:
    """A student of about ``num_bytes`` in fp32, a Qwen3, while this process is its only rank."""
    hidden = 1024 if num_bytes >= SMALL_BYTES else 256
    layer = 4 * hidden * (3 * hidden + 3 * 4 * hidden)  # attention with half as many key heads, and the MLP
    num_layers = max(1, round((num_bytes - 4 * VOCAB_SIZE * hidden) / layer))
    shape = qwen3(hidden, 4 * hidden, num_layers, hidden // 64, hidden // 128, 64, vocab=VOCAB_SIZE)
    write_model(folder, shape, longest=256, with_values=False)
    threads = torch.get_num_threads()
    try:
        yield BenchStudent(folder)
    finally:
        torch.set_num_threads(threads)
        parallel.destroy()
        dist.destroy_process_group()


@contextmanager
def bare_broadcast(
    num_bytes: int, bucket_bytes: int, num_receivers: int, device: torch.device
) -> Iterator[Callable[[], float]]:
    """Seconds until all of so many processes have received so many bytes, from and into two buckets that every process
    allocated and wrote before the time begins."""
    store = GroupStore(TIMEOUT_S)
    common: dict[str, Any] = {
        "group_id": "bare",
        "bucket_bytes": bucket_bytes,
        "timeout_s": TIMEOUT_S,
        "secret": "bench",
    }
    order = GroupOrder(port=store.port, world_size=1 + num_receivers, **common)
    members = [(order, rank, num_bytes, device.type) for rank in range(1, order.world_size)]
    with children(_receive, members) as ends:
        group = TransferGroup(order, 0, store, device=device)
        buckets = _buckets(group, bucket_bytes)

        def send() -> float:
            started = time.perf_counter()
            for end in ends:
                end.send_bytes(b"go")
            _broadcast(group, num_bytes, buckets)
            for end in ends:
                received(end, "a receiver of the bare broadcast")
            return time.perf_counter() - started

        try:
            yield send
        finally:
            group.close()


def _receive(end: Connection, order: GroupOrder, rank: int, num_bytes: int, kind: str) -> None:
    """A receiver's whole life."""
    torch.set_num_threads(1)
    group = TransferGroup(order, rank, device=torch.device(f"cuda:{rank}" if kind == "cuda" else kind))
    buckets = _buckets(group, order.bucket_bytes)
    while True:
        end.recv_bytes()
        _broadcast(group, num_bytes, buckets)
        end.send_bytes(b"done")


def _buckets(group: TransferGroup, bucket_bytes: int) -> list[Tensor]:
    """Two of [bucket_bytes] uint8, whose pages are there."""
    return [torch.full((bucket_bytes,), number, dtype=torch.uint8, device=group.device) for number in range(2)]


def _broadcast(group: TransferGroup, num_bytes: int, buckets: Sequence[Tensor]) -> None:
    """Two buckets are on their way at a time."""
    flying = deque[Pending]()
    for number, start in enumerate(range(0, num_bytes, len(buckets[0]))):
        if len(flying) == 2:
            flying.popleft().wait()
        flying.append(group.broadcast(buckets[number % 2][: num_bytes - start]))
    for pending in flying:
        pending.wait()
