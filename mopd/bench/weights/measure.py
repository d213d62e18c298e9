"""A student's weights to servers of torch engines: by a collective, by HTTP, and as a bare broadcast, in turns.

::

    bare        a gloo broadcast of as many bytes, bucket by bucket, from and into the same two buckets
    collective  ``weight_sync: {type: collective}``, or ``ipc``: this process asks ranks, by HTTP servers, and the
                tensors go from the ranks to the servers
    http        ``weight_sync: {type: http}``: ranks ── chunks ──> this process ── HTTP, in pieces ──> servers

This process is a run's orchestrator; ranks and servers are a run's too, and the same for both ways. Who takes part in
the bare broadcast is a process of its own. After each update every server must answer as after the other way's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mopd.bench.clock import Others, family_busy_s
from mopd.bench.weights.bare import bare_broadcast
from mopd.bench.weights.memory import DevicePeaks, HostPeaks
from mopd.bench.weights.student import TIMEOUT_S, BenchStudent, bench_student, write_config
from mopd.config.groups import RoutingConfig, TorchEngineConfig
from mopd.config.weights import CollectiveConfig, IpcConfig
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import SamplingParams
from mopd.files.temporary import TemporaryFolder
from mopd.orchestrator.transfer import Transfer
from mopd.placement.engine_file import EngineFile
from mopd.placement.process import ServerCommand, ServerProcess
from mopd.placement.weights import GroupWeightSync
from mopd.replicas.interface import Replica
from mopd.replicas.router import Router
from mopd.replicas.transfer import TransferTargets
from mopd.types import UserError

MIB = 2**20
BARE, HTTP = "bare broadcast", "http"
WAYS: dict[str, type[CollectiveConfig] | type[IpcConfig]] = {"collective": CollectiveConfig, "ipc": IpcConfig}
"""That are measured beside both; one at a time, as an engine is in one group."""
LOOK_EVERY_S = 0.1
PROMPT = [3, 4, 5]
SAMPLING = SamplingParams(max_new_tokens=4)
CLAIM_EVERY_S = 0.005
TOKEN = secrets.token_hex(16)


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
    """By way: the most memory that the ``sender``, the ``orchestrator`` and any ``receiver`` took above what they
    had."""
    claim_s: list[float]
    """The longest wait for an answer to a claim, while weights travel by HTTP."""
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
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryFolder("mopd-bench-")))
        write_config(folder / "model", num_bytes, num_stages)
        student = await stack.enter_async_context(bench_student(folder / "model", num_stages))
        require_gpus(student.device, num_replicas, way)
        size = student.num_bytes
        bare = stack.enter_context(bare_broadcast(size, bucket_mib * MIB, num_replicas, student.device))
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
        claim_s=rounds.claim_s,
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

    def __init__(self, student: BenchStudent, servers: Mapping[str, int], bucket_mib: int, way: str) -> None:
        """``servers``: URLs, with their processes' ids."""
        self._student, self._way = student, way
        is_cuda = student.device.type == "cuda"
        self._peaks = DevicePeaks if is_cuda else HostPeaks
        holders = range(1 + len(servers)) if is_cuda else (student.pid, *servers.values())
        self._holders = {f"receiver {i}" if i else "sender": holder for i, holder in enumerate(holders)}
        if not is_cuda:
            self._holders["orchestrator"] = os.getpid()
        self._engines = [
            RemoteEngine(url, token=TOKEN, timeout_s=TIMEOUT_S, name=f"rollout.{number}")
            for number, url in enumerate(servers)
        ]
        replicas = [Replica(name=engine.name, engine=engine) for engine in self._engines]
        self._router = Router("bench", replicas, RoutingConfig(), kind="rollout")
        targets = TransferTargets(self._router, num_workers=1, on_running="finish", drain_s=TIMEOUT_S)
        self._sync = GroupWeightSync(self._router)
        self._transfer = Transfer(
            targets,
            WAYS[way](type=way, bucket_mib=bucket_mib),  # type: ignore[arg-type]
            student.ranks.ask,
            num_workers=1,
            tensors=student.tensors,
            shares=student.shares if way == "collective" else [],
            checks_values=False,  # as in a run, whose optimizer steps do
        )
        self._plane = LocalDataPlane()
        self._version = -1
        self.seconds: dict[str, list[float]] = {BARE: [], way: [], HTTP: []}
        self.phases: list[dict[str, float]] = []
        self.extra_bytes = {
            name: dict.fromkeys((holder.split()[0] for holder in self._holders), 0) for name in (way, HTTP)
        }
        self.claim_s: list[float] = []
        self._longest_claim_s = 0.0
        """While weights travelled by HTTP last."""

    async def begin(self) -> None:
        """What updates take in memory. On a CPU the first one says nothing: engines without weights have never touched
        their own; and what is freed after one by HTTP may be taken again unseen."""
        await self._student.change()
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
        await self._student.change()
        took, answers = {}, []
        for way in self.extra_bytes:
            took[way] = await self._publish(way)
            for engine in self._engines:
                (drawn,) = await engine.generate([PROMPT], SAMPLING, [0])
                answers.append((drawn.tokens.tolist(), drawn.logprobs.tolist()))
        if any(answer != answers[0] for answer in answers):
            raise UserError("bench weights: engines answer otherwise after one way than after the other")
        return took

    def keep(self, took: dict[str, float]) -> None:
        """A round that counts."""
        for way, seconds in took.items():
            self.seconds[way].append(seconds)
        self.claim_s.append(self._longest_claim_s)
        self.phases.append(self._transfer.take_numbers())

    async def close(self) -> None:
        """Leave the group, and the servers."""
        await self._transfer.close()
        await self._router.close()
        for engine in self._engines:
            await engine.close()

    async def _publish(self, way: str) -> float:
        self._version += 1
        started = time.perf_counter()
        if way == self._way:
            await self._transfer.publish(self._version)
        else:
            async with self._claiming() as claims:
                await self._sync.send(await self._student.stage(self._version))
            self._longest_claim_s = max(claims)
        return time.perf_counter() - started

    @asynccontextmanager
    async def _claiming(self) -> AsyncIterator[list[float]]:
        """Claim from the data plane every few milliseconds in the block; how much later than it should each was
        over."""
        seconds: list[float] = []
        is_over = asyncio.Event()

        async def claim() -> None:
            while not is_over.is_set():
                began = time.perf_counter()
                await asyncio.sleep(CLAIM_EVERY_S)
                await self._plane.claim([], [])
                seconds.append(time.perf_counter() - began - CLAIM_EVERY_S)

        claims = asyncio.ensure_future(claim())
        try:
            yield seconds
        finally:
            is_over.set()
            await claims


@asynccontextmanager
async def _replicas(folder: Path, count: int, device: torch.device) -> AsyncIterator[dict[str, int]]:
    """URLs of servers that answer, with their processes' ids."""
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
    try:
        yield dict([await _ready(server) for server in servers])
    finally:
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
