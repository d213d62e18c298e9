"""A student's weights to servers of torch engines: by a collective, by HTTP, and as a bare broadcast, in turns.

::

    bare        a gloo broadcast of as many bytes, bucket by bucket, from and into the same two buckets
    collective  ``weight_sync: {type: collective}``, or ``ipc``: student ── calls ──> producer ── HTTP ──> servers,
                and the tensors from the student to the servers
    http        ``weight_sync: {type: http}``: student ── staged weights ──> producer ── HTTP, in pieces ──> servers

Student, producer process and servers are a run's, and the same for both ways; who takes part in the bare broadcast is a
process of its own. After each update every server must answer as after the other way's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.bench.clock import Others, family_busy_s
from mopd.bench.weights.bare import bare_broadcast
from mopd.bench.weights.beside import ProducerWay, beside
from mopd.bench.weights.memory import DevicePeaks, HostPeaks
from mopd.bench.weights.student import TIMEOUT_S, BenchStudent, bench_student, write_config
from mopd.config.groups import TorchEngineConfig
from mopd.config.weights import CollectiveConfig, IpcConfig
from mopd.files.temporary import TemporaryFolder
from mopd.launch.transfer import Transfer
from mopd.placement.engine_file import EngineFile
from mopd.placement.process import ServerCommand, ServerProcess
from mopd.types import UserError

MIB = 2**20
BARE, HTTP = "bare broadcast", "http"
WAYS: dict[str, type[CollectiveConfig] | type[IpcConfig]] = {"collective": CollectiveConfig, "ipc": IpcConfig}
"""That are measured beside both; one at a time, as an engine is in one group."""
LOOK_EVERY_S = 0.1
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
    """By way: the most memory that the ``sender``, the ``producer`` and any ``receiver`` took above what they had."""
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
    with TemporaryFolder("mopd-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        write_config(folder / "model", num_bytes, num_stages)
        student = stack.enter_context(bench_student(folder / "model", num_stages))
        require_gpus(student.device, num_replicas, way)
        size = sum(meta.num_bytes for meta in student.metas)
        bare = stack.enter_context(bare_broadcast(size, bucket_mib * MIB, num_replicas, student.device))
        async with (
            _replicas(folder, num_replicas, student.device) as servers,
            beside(list(servers), TOKEN) as producer,
        ):
            progress(f"weights: {size / 1e9:.2f} GB, {num_replicas} replicas, warming up")
            rounds = Rounds(student, producer, list(servers.values()), bucket_mib, way)
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

    def __init__(
        self, student: BenchStudent, producer: ProducerWay, servers: Sequence[int], bucket_mib: int, way: str
    ) -> None:
        """``servers``: their processes' ids."""
        self._student, self._producer = student, producer
        is_cuda = student.device.type == "cuda"
        self._peaks = DevicePeaks if is_cuda else HostPeaks
        holders = range(1 + len(servers)) if is_cuda else (os.getpid(), *servers)
        self._holders = {f"receiver {i}" if i else "sender": holder for i, holder in enumerate(holders)}
        if not is_cuda:
            self._holders["producer"] = producer.pid
        cfg = WAYS[way](type=way, bucket_mib=bucket_mib)  # type: ignore[arg-type]
        self._way = way
        shares = student.shares if way == "collective" else []
        self._transfer = Transfer(
            producer.targets,
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
        self.extra_bytes = {
            name: dict.fromkeys((holder.split()[0] for holder in self._holders), 0) for name in (way, HTTP)
        }
        self.claim_s: list[float] = []
        self._longest_claim_s = 0.0
        """While weights travelled by HTTP last."""

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
            answers += await self._producer.answers()
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
        """Leave the group."""
        await self._transfer.close()
        self._thread.shutdown()

    async def _publish(self, way: str) -> float:
        self._version += 1
        started = time.perf_counter()
        if way == self._way:
            await self._transfer.publish(self._version, self._stream, self._in_thread)
        else:
            weights = self._producer.weights
            staged = await self._in_thread(lambda: weights.stage(self._student.read(in_place=False), self._version))
            async with self._producer.claiming() as claims:
                await weights.send(staged)
            self._longest_claim_s = max(claims)
        return time.perf_counter() - started

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        if self._transfer.shares:
            yield from self._student.share(self._transfer.current)
        else:
            yield from self._student.read(in_place=True)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


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
