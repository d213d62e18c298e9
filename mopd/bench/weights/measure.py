"""A student's weights to servers of torch engines: by a collective, by HTTP, and as a bare broadcast, in turns.

::

    bare        a gloo broadcast of as many bytes, bucket by bucket, from and into the same two buckets
    collective  ``weight_sync: {type: collective}``, or ``ipc``: Transfer, servers' /v1/weights/join, start, finish
    http        ``weight_sync: {type: http}``: staged here, sent in pieces, swapped in

Student and servers are real and the same for both ways; who takes part in the bare broadcast is a process of its own.
After each update every server must answer as after the other way's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.bench.clock import Others, family_busy_s
from mopd.bench.weights.memory import DevicePeaks, HostPeaks
from mopd.bench.weights.student import BenchStudent, bench_student, forks, write_config
from mopd.config.groups import RoutingConfig, TorchEngineConfig
from mopd.config.weights import CollectiveConfig, IpcConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import SamplingParams
from mopd.files.temporary import TemporaryFolder
from mopd.launch.transfer import Transfer
from mopd.placement.engine_file import EngineFile
from mopd.placement.process import ServerCommand, ServerProcess
from mopd.placement.weights import GroupWeightSync
from mopd.replicas.interface import Replica
from mopd.replicas.router import Router
from mopd.replicas.transfer import TransferTargets
from mopd.transfer.group import GroupOrder, GroupStore, Pending, TransferGroup
from mopd.types import UserError

MIB = 2**20
BARE, HTTP = "bare broadcast", "http"
WAYS: dict[str, type[CollectiveConfig] | type[IpcConfig]] = {"collective": CollectiveConfig, "ipc": IpcConfig}
"""That are measured beside both; one at a time, as an engine is in one group."""
TIMEOUT_S = 300.0
LOOK_EVERY_S = 0.1
TOKEN = secrets.token_hex(16)
PROMPT = [3, 4, 5]
SAMPLING = SamplingParams(max_new_tokens=4)


@dataclass(frozen=True, kw_only=True)
class WeightContest:
    """One student and one number of replicas: values of each round, the warm-up left out."""

    way: str
    """Of ``WAYS``."""
    num_bytes: int
    num_replicas: int
    num_stages: int
    bucket_bytes: int
    seconds: dict[str, list[float]]
    phases: dict[str, float]
    """Medians of ``way``'s: see ``Transfer.take_numbers``."""
    extra_bytes: dict[str, dict[str, int]]
    """By way: the most memory that the ``sender`` and any ``receiver`` took above what they had."""
    others_cores: float | None

    def median_s(self, way: str) -> float:
        return statistics.median(self.seconds[way])

    def ratio(self, way: str, other: str) -> float:
        """Median over rounds of ``way``'s time over ``other``'s."""
        return statistics.median(a / b for a, b in zip(self.seconds[way], self.seconds[other], strict=True))

    def extra_buckets(self, way: str) -> float:
        """Of the side that took more."""
        return max(self.extra_bytes[way].values()) / self.bucket_bytes


async def measure(
    num_bytes: int,
    num_replicas: int,
    *,
    way: str,
    num_stages: int,
    bucket_mib: int,
    num_rounds: int,
    progress: Callable[[str], None],
) -> WeightContest:
    """A warm-up, then ``num_rounds`` rounds of the bare broadcast, ``way`` (of ``WAYS``) and HTTP.

    Raises:
        UserError: a server did not start, or answers otherwise after one way than after the other.
    """
    with TemporaryFolder("mopd-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        write_config(folder / "model", num_bytes, num_stages)
        student = stack.enter_context(bench_student(folder / "model", num_stages))
        require_gpus(student.device, num_replicas, way)
        size = sum(meta.num_bytes for meta in student.metas)
        bare = stack.enter_context(_bare(size, bucket_mib * MIB, num_replicas, student.device))
        async with _replicas(folder, num_replicas, student.device) as servers:
            progress(f"weights: {size / 1e9:.2f} GB, {num_replicas} replicas, warming up")
            rounds = Rounds(student, servers, bucket_mib, way)
            try:
                await rounds.begin()
                await asyncio.to_thread(bare)
                others = Others(family_busy_s)
                for _ in range(num_rounds):
                    took = {BARE: await asyncio.to_thread(bare), **await rounds.next()}
                    rounds.keep(took)
                    progress(", ".join(f"{way} {seconds:.2f} s" for way, seconds in took.items()))
                cores = others.cores()
            finally:
                await rounds.close()
    return WeightContest(
        way=way,
        num_bytes=size,
        num_replicas=num_replicas,
        num_stages=num_stages,
        bucket_bytes=bucket_mib * MIB,
        seconds=rounds.seconds,
        phases={key: statistics.median(phase[key] for phase in rounds.phases) for key in rounds.phases[0]},
        extra_bytes=rounds.extra_bytes,
        others_cores=cores,
    )


def require_gpus(device: torch.device, num_replicas: int, way: str) -> None:
    """``UserError`` on a machine whose GPUs are too few for one each, or where this is no way."""
    if device.type == "cuda" and way == "ipc":
        raise UserError(
            "bench weights: --way ipc, but engines have GPUs of their own here: set CUDA_VISIBLE_DEVICES= for the CPU "
            "(one GPU: tools/gpu_student.py --stages ipc)"
        )
    if device.type == "cuda" and torch.cuda.device_count() <= num_replicas:
        raise UserError(
            f"bench weights: the student and {num_replicas} replicas need a GPU each, and this machine has "
            f"{torch.cuda.device_count()}: set --replicas lower, or CUDA_VISIBLE_DEVICES= for the CPU"
        )


class Rounds:
    """Both ways to the same servers."""

    def __init__(self, student: BenchStudent, servers: dict[RemoteEngine, int], bucket_mib: int, way: str) -> None:
        self._student, self._engines = student, list(servers)
        is_cuda = student.device.type == "cuda"
        self._peaks = DevicePeaks if is_cuda else HostPeaks
        holders = range(1 + len(servers)) if is_cuda else (os.getpid(), *servers.values())
        self._holders = {f"receiver {i}" if i else "sender": holder for i, holder in enumerate(holders)}
        replicas = [Replica(name=engine.name, engine=engine) for engine in self._engines]
        self._router = Router("bench", replicas, RoutingConfig(), kind="rollout")
        targets = TransferTargets(self._router, num_workers=1, on_running="finish", drain_s=TIMEOUT_S)
        cfg = WAYS[way](type=way, bucket_mib=bucket_mib)  # type: ignore[arg-type]
        self._way = way
        shares = student.shares if way == "collective" else []
        self._transfer = Transfer(
            targets,
            cfg,
            student.metas,
            num_workers=1,
            device=student.device,
            shares=shares,
            checks_values=False,  # as in a run, whose optimizer steps do
        )
        self._transfer.join_stages = student.join
        self._thread = ThreadPoolExecutor(1)
        self._version = -1
        self.seconds: dict[str, list[float]] = {BARE: [], way: [], HTTP: []}
        self.phases: list[dict[str, float]] = []
        self.extra_bytes = {name: {"sender": 0, "receiver": 0} for name in (way, HTTP)}

    async def begin(self) -> None:
        """What updates take in memory. On a CPU the first one says nothing: engines without weights have never touched
        their own; and what is freed after one by HTTP may be taken again unseen."""
        self._student.change()
        if self._student.device.type == "cpu":
            await self._publish(self._way)
        for way in self.extra_bytes:
            peaks = self._peaks(self._holders)
            await self._publish(way)
            for name, extra in peaks.extra_bytes().items():
                most, side = self.extra_bytes[way], name.split()[0]
                most[side] = max(most[side], extra)

    async def next(self) -> dict[str, float]:
        """Seconds of new weights by each way."""
        self._student.change()
        took, answers = {}, []
        for way in self.extra_bytes:
            took[way] = await self._publish(way)
            for engine in self._engines:
                (generation,) = await engine.generate([PROMPT], SAMPLING, [0])
                answers.append((generation.tokens.tolist(), generation.logprobs.tolist()))
        if any(answer != answers[0] for answer in answers):
            raise UserError("bench weights: engines answer otherwise after one way than after the other")
        return took

    def keep(self, took: dict[str, float]) -> None:
        """A round that counts."""
        for way, seconds in took.items():
            self.seconds[way].append(seconds)
        self.phases.append(self._transfer.take_numbers())

    async def close(self) -> None:
        """Leave the group."""
        await self._transfer.close()
        await self._router.close()
        self._thread.shutdown()

    async def _publish(self, way: str) -> float:
        self._version += 1
        started = time.perf_counter()
        if way == self._way:
            await self._transfer.publish(self._version, self._stream, self._in_thread)
        else:
            sync = GroupWeightSync(self._router)
            await sync.send(
                await self._in_thread(lambda: sync.stage(self._student.read(in_place=False), self._version))
            )
        return time.perf_counter() - started

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        if self._transfer.shares:
            yield from self._student.share(self._transfer.current)
        else:
            yield from self._student.read(in_place=True)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@asynccontextmanager
async def _replicas(folder: Path, count: int, device: torch.device) -> AsyncIterator[dict[RemoteEngine, int]]:
    """Servers that answer, with their processes' ids."""
    engine_file = folder / "engine.json"
    EngineFile(
        role="rollout",
        name="rollout",
        replica=0,
        model=str(folder / "model"),
        engine=TorchEngineConfig(dtype="float32"),
        max_logprobs=1,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        longest_sequence=64,
        max_pixels=None,
        max_tokens_per_request=1024,
        max_queued_tokens=4096,
        request_timeout_s=TIMEOUT_S,
        startup_timeout_s=TIMEOUT_S,
        enable_sleep_mode=False,
    ).write(engine_file)
    servers = []
    for i in range(count):
        gpu = {"CUDA_VISIBLE_DEVICES": str(1 + i)} if device.type == "cuda" else {}
        command = ServerCommand(
            engine_file=engine_file.read_text(),
            token=TOKEN,
            host="127.0.0.1",
            environment={"OMP_NUM_THREADS": "1", **gpu},
        )
        servers.append(ServerProcess(command, folder=folder / str(i), log=folder / f"{i}.log"))
    engines: dict[RemoteEngine, int] = {}
    try:
        for number, server in enumerate(servers):
            url, pid = await _ready(server)
            engines[RemoteEngine(url, token=TOKEN, timeout_s=TIMEOUT_S, name=f"rollout.{number}")] = pid
        yield engines
    finally:
        for engine in engines:
            await engine.close()
        for server in servers:
            await server.kill()


async def _ready(server: ServerProcess) -> tuple[str, int]:
    give_up_at = time.monotonic() + TIMEOUT_S
    while True:
        state = await server.state()
        if state.url is not None and state.pid is not None:
            return state.url, state.pid
        if state.exit_code is not None or time.monotonic() > give_up_at:
            raise UserError(f"bench weights: an engine did not start: {await server.last_words()}")
        await asyncio.sleep(LOOK_EVERY_S)


@contextmanager
def _bare(num_bytes: int, bucket_bytes: int, num_receivers: int, device: torch.device) -> Iterator[Callable[[], float]]:
    """Seconds until all of so many processes have received so many bytes."""
    store = GroupStore(TIMEOUT_S)
    order = GroupOrder(
        group_id="bare",
        port=store.port,
        world_size=1 + num_receivers,
        bucket_bytes=bucket_bytes,
        timeout_s=TIMEOUT_S,
    )
    context = forks()
    members = []
    for rank in range(1, order.world_size):
        end, other = context.Pipe()
        process = context.Process(target=_receive, args=(order, rank, num_bytes, device.type, other), daemon=True)
        process.start()
        members.append((process, end))
    group = TransferGroup(order, 0, store, device=device)

    def send() -> float:
        started = time.perf_counter()
        for _, end in members:
            end.send(None)
        _broadcast(group, num_bytes, bucket_bytes)
        for _, end in members:
            end.recv()
        return time.perf_counter() - started

    try:
        yield send
    finally:
        group.close()
        for process, _ in members:
            process.terminate()
            process.join()


def _receive(order: GroupOrder, rank: int, num_bytes: int, kind: str, end: Connection) -> None:
    """A receiver's whole life."""
    torch.set_num_threads(1)
    group = TransferGroup(order, rank, device=torch.device(f"cuda:{rank}" if kind == "cuda" else kind))
    while True:
        end.recv()
        _broadcast(group, num_bytes, order.bucket_bytes)
        end.send(None)


def _broadcast(group: TransferGroup, num_bytes: int, bucket_bytes: int) -> None:
    """Two buckets are on their way at a time, from memory that was touched before."""
    memory = [torch.zeros(bucket_bytes, dtype=torch.uint8, device=group.device) for _ in range(2)]
    flying = deque[Pending]()
    for number, start in enumerate(range(0, num_bytes, bucket_bytes)):
        if len(flying) == 2:
            flying.popleft().wait()
        flying.append(group.broadcast(memory[number % 2][: num_bytes - start]))
    for pending in flying:
        pending.wait()
