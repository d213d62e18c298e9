"""``mopd bench weights``: a student's weights to servers of torch engines: by a collective, by HTTP, and as a bare
broadcast, in turns; or from one network to another, beside the rate of the link between them.

::

    bare broadcast   gloo (on CUDA NCCL), as many bytes, bucket by bucket, from and into the same two buckets
    collective, ipc  this process asks the student's rank by the link, servers by HTTP; the tensors go from the rank to
                     the servers
    http             student ── link, in parts ──> this process ── HTTP, in messages ──> servers

This process is a run's orchestrator; rank and servers are a run's too, the same for both ways. Receivers of the bare
broadcast are processes of their own. After each update every server must answer as after the other way's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import socket
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from mopd.base.files.temporary import TemporaryFolder
from mopd.base.tasks import Tasks
from mopd.base.types import UserError
from mopd.bench.harness import BenchReport, Comparison, Goals, Others, at_least, at_most, ratio, rounds, rows, say
from mopd.bench.models import make_recipe, qwen3, write_model
from mopd.bench.networks import can_make_networks, inside, two_networks
from mopd.bench.processes import (
    TIMEOUT_S,
    TOKEN,
    DevicePeaks,
    HostPeaks,
    children,
    family_busy_s,
    forks,
    received,
    servers,
)
from mopd.config.groups import RoutingConfig
from mopd.config.schema import Recipe
from mopd.config.student import LoraConfig
from mopd.config.weights import MAX_BUCKET_MIB, CollectiveConfig, HttpConfig, IpcConfig
from mopd.conversion.models.reading import read_dims
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import SamplingParams, ToDraw
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.engines.student_adapter import StudentAdapter
from mopd.launch.link import LinkEnded, RankLink
from mopd.launch.ranks import CommandChannel, run_commands, student_facts
from mopd.orchestrator.ranks import Ranks
from mopd.orchestrator.student import StudentGroup
from mopd.orchestrator.weights.sync import GroupWeightSync
from mopd.placement.engine_file import rollout_file
from mopd.student import cpu_shim, parallel
from mopd.student.model.gpt import build_model
from mopd.student.weights import hf_senders, hf_tensors, iter_hf_weights, iter_sender_weights
from mopd.student.worker import WeightPart
from mopd.weights.backends import open_gloo, open_nccl
from mopd.weights.group import GroupStore

MIB = 2**20
BARE, LINK, HTTP = "bare broadcast", "link", "http"
WHOLE, ADAPTER = "whole model", "adapter alone"
WAYS: dict[str, type[CollectiveConfig] | type[IpcConfig]] = {"collective": CollectiveConfig, "ipc": IpcConfig}
"""Ways that can be measured beside the bare broadcast and HTTP; one at a time, as an engine is in one group."""
LEAST_OF_BARE, LEAST_OVER_HTTP = 0.7, 3.0
"""Goals relative to the rate of the bare broadcast, or of the link, and to HTTP's."""
MOST_BUCKETS = 2.0
"""Largest allowed memory beyond the models' in any process, in buckets."""
LIMITS = {"mb": 100_000, "rank": 512, "replicas": 64, "bucket_mib": MAX_BUCKET_MIB, "rounds": 1000, "link": 1_000_000}
SMALL_BYTES = 2**27
"""Size below which a student has narrow layers, so that there are several."""
VOCAB_SIZE, STD = 4096, 0.02
SAMPLING = SamplingParams(max_new_tokens=4)


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure and print. Return the exit code.

    Raises:
        UserError: an impossible option, a server did not start, or servers answer otherwise after one way than after
            the other.
    """
    for name, most in LIMITS.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not 1 <= value <= most:
                raise UserError(f"--{name.replace('_', '-')} is {value}: set 1 to {most}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and (args.way == "ipc" or torch.cuda.device_count() <= max(args.replicas)):
        raise UserError(
            f"bench weights: student and replicas have a GPU each, by --way collective, and this machine has "
            f"{torch.cuda.device_count()}: set --replicas lower, or CUDA_VISIBLE_DEVICES= for the CPU (ipc on one GPU: "
            "tools/gpu_student.py --stages ipc)"
        )
    report = BenchReport(benchmark="weights", arguments=arguments, as_json=args.json, device=device)
    with ExitStack() as stack:
        link = None if args.link is None else stack.enter_context(_linked(args.link, args.way, device))
        for mb, replicas in itertools.product(args.mb, args.replicas):
            asyncio.run(measure(report, mb * 10**6, replicas, args.way, args.bucket_mib, args.rounds, link))
            if args.rank is not None:
                asyncio.run(measure_adapter(report, mb * 10**6, replicas, args.rank, args.rounds))
    return report.finish()


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link to the network of the engines."""

    mbit: int
    """Rate in Mbit/s."""
    far: str
    """Name of that network."""

    def ideal_s(self, num_bytes: int) -> float:
        """Return the seconds that so many bytes take at the link's rate."""
        return num_bytes * 8 / (self.mbit * 1e6)


@contextmanager
def _linked(mbit: int, way: str, device: torch.device) -> Iterator[Link]:
    """Be in the student's network, which is linked to that of the engines.

    Raises:
        UserError: there can be no such networks here.
    """
    if way != "collective" or device.type == "cuda":
        raise UserError(
            "--link has engines on another machine, without GPUs: set --way collective, CUDA_VISIBLE_DEVICES="
        )
    if not can_make_networks("tc"):
        raise UserError("--link makes two networks and the link between them: run it as root, with `ip` and `tc`")
    with two_networks(mbit=mbit) as (near, far), inside(near):
        yield Link(mbit=mbit, far=far)


async def measure(
    report: BenchReport, num_bytes: int, num_replicas: int, way: str, bucket_mib: int, count: int, link: Link | None
) -> None:
    """Take a warm-up, then ``count`` rounds of the bare broadcast, ``way`` (of ``WAYS``) and HTTP. In the place of the
    bare broadcast over a ``link``: what its rate says."""
    reference = BARE if link is None else LINK
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryFolder("mopd-bench-")))
        size = write_student(folder / "model", num_bytes)
        recipe = make_recipe(folder / "model", longest=256)
        recipe = replace(recipe, weight_sync=WAYS[way](type=way, bucket_mib=bucket_mib))  # type: ignore[arg-type]
        through = await stack.enter_async_context(hop(BenchStudent, recipe))
        is_cuda: bool = through.facts["is_on_gpu"]
        gpus = [{"CUDA_VISIBLE_DEVICES": str(1 + i)} if is_cuda else {} for i in range(num_replicas)]
        environments = [{"OMP_NUM_THREADS": "1", **gpu} for gpu in gpus]
        pids = await stack.enter_async_context(
            servers(folder, rollout_file(recipe), environments, network=link.far if link else "")
        )
        if link is None:
            device = torch.device("cuda:0" if is_cuda else "cpu")
            bare = stack.enter_context(bare_broadcast(size, bucket_mib * MIB, num_replicas, device))
        else:
            bare = partial(link.ideal_s, size)
        say(f"weights: {size / 1e9:.2f} GB, {num_replicas} replicas, warming up")
        updates = Updates(through, recipe, pids)
        stack.push_async_callback(updates.close)
        await updates.begin()
        await asyncio.to_thread(bare)
        seconds: dict[str, list[float]] = {name: [] for name in (reference, way, HTTP)}
        others = Others(family_busy_s)
        for order in rounds(seconds, count):
            for name in order:
                seconds[name].append(await (asyncio.to_thread(bare) if name == reference else updates.publish(name)))
            await updates.end_round()
            say(", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items()))
        report.others_cores = cores = others.cores()
    sizes = {"num_bytes": size, "num_replicas": num_replicas, "bucket_bytes": bucket_mib * MIB}
    facts = {"way": way, **sizes, "link_mbit": link.mbit if link else None, "others_cores": cores}
    report.add(*result(seconds, facts, updates))


async def measure_adapter(report: BenchReport, num_bytes: int, num_replicas: int, rank: int, count: int) -> None:
    """Take a warm-up, then ``count`` rounds of an update of an adapter alone, by HTTP, and of the whole model beside
    it, to as many servers each. Both begin in this process's memory."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryFolder("mopd-bench-")))
        size = write_student(folder / "model", num_bytes)
        file = rollout_file(make_recipe(folder / "model", longest=256))
        weights = {
            name: STD * torch.randn(shape) for name, _, shape in hf_tensors(read_dims(folder / "model"), torch.float32)
        }
        shape = LoraConfig(rank=rank)
        slots = StudentAdapter.of(folder / "model", shape).slots
        adapter = {name: STD * torch.randn(slot.shape) for name, slot in slots.items()}
        sent = {WHOLE: weights, ADAPTER: adapter}
        syncs: dict[str, GroupWeightSync] = {}
        for name, own in ((WHOLE, file), (ADAPTER, replace(file, student_adapter=shape))):
            (folder / name.split()[0]).mkdir()
            environments = [{"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}] * num_replicas
            urls = await stack.enter_async_context(servers(folder / name.split()[0], own, environments))
            engines = [
                RemoteEngine(url, token=TOKEN, timeout_s=TIMEOUT_S, name=f"rollout.{i}") for i, url in enumerate(urls)
            ]
            for engine in engines:
                stack.push_async_callback(engine.close)
            router = Router(
                "bench", [Replica(name=one.name, engine=one) for one in engines], RoutingConfig(), kind="rollout"
            )
            stack.push_async_callback(router.close)
            syncs[name] = GroupWeightSync(router)
        seconds: dict[str, list[float]] = {name: [] for name in sent}
        for version, order in enumerate([[*sent], *rounds(seconds, count)]):
            for name in order:
                started = time.perf_counter()
                await syncs[name].publish(sent[name].items(), version)
                if version:
                    seconds[name].append(time.perf_counter() - started)
    bytes_of = {name: sum(own.nbytes for own in tensors.values()) for name, tensors in sent.items()}
    columns = {"s": "median_s:.3f", "MiB": "mib:,.1f", f"x {WHOLE}": "ratio:.2f"}
    title = f"adapter of rank {rank} beside {size / 1e9:.2f} GB, by HTTP to {num_replicas}"
    figures = rows(seconds, WHOLE, lambda name, _: {"mib": bytes_of[name] / MIB})
    facts = {"rank": rank, "num_bytes": bytes_of, "num_replicas": num_replicas}
    report.add(Comparison(title=title, columns=columns, rows=figures, facts=facts, remarks=[]), {})


def result(
    seconds: Mapping[str, Sequence[float]], facts: Mapping[str, Any], updates: Updates
) -> tuple[Comparison, Goals]:
    """Make the table and the goals of one student and one number of replicas."""
    way, size, taken = facts["way"], facts["num_bytes"], updates.extra_bytes
    reference, short = (LINK, "link") if LINK in seconds else (BARE, "bare")

    def figures(name: str, median_s: float) -> dict[str, Any]:
        return {"gb_per_s": size / 1e9 / median_s, **{side: most / MIB for side, most in taken.get(name, {}).items()}}

    columns = {"s": "median_s:.2f", "GB/s": "gb_per_s:.2f", f"x {short}": "ratio:.2f"}
    columns |= {f"{side} MiB": f"{side}:,.0f" for side in taken[way]}
    phases = {key: statistics.median(phase[key] for phase in updates.phases) for key in updates.phases[0]}
    title = f"{size / 1e9:.2f} GB to {facts['num_replicas']}"
    title += f" at {facts['link_mbit']} Mbit/s" if reference == LINK else ""
    goals = {
        f"of_{reference.replace(' ', '_')}": at_least(ratio(seconds, reference, way), LEAST_OF_BARE),
        # to one replica both ways can reach the rate of a link
        **({"over_http": at_least(ratio(seconds, HTTP, way), LEAST_OVER_HTTP)} if reference == BARE else {}),
        "extra_buckets": at_most(max(taken[way].values()) / facts["bucket_bytes"], MOST_BUCKETS),
    }
    facts = {**facts, "phases": phases, "extra_bytes": taken}
    remarks = [", ".join(f"{key.removeprefix('timing/')} {value:.2f}" for key, value in phases.items())]
    part = Comparison(
        title=title, columns=columns, rows=rows(seconds, reference, figures), facts=facts, remarks=remarks
    )
    return part, {f"{title}/{name}": goal for name, goal in goals.items()}


class Updates:
    """Weight updates by the way under test and by HTTP, to the same servers."""

    def __init__(self, through: Hop, recipe: Recipe, servers: Mapping[str, int]) -> None:
        """``recipe`` has the way beside HTTP; ``servers``: URLs, with their processes' ids."""
        self._way, self._is_cuda = recipe.weight_sync.type, through.facts["is_on_gpu"]
        self._peaks = DevicePeaks if self._is_cuda else HostPeaks
        holders = range(1 + len(servers)) if self._is_cuda else (through.pid, *servers.values())
        self._holders = {f"receiver {i}" if i else "sender": holder for i, holder in enumerate(holders)}
        if not self._is_cuda:
            self._holders["orchestrator"] = os.getpid()
        self._engines = [
            RemoteEngine(url, token=TOKEN, timeout_s=TIMEOUT_S, name=f"rollout.{i}") for i, url in enumerate(servers)
        ]
        replicas = [Replica(name=one.name, engine=one) for one in self._engines]
        self._router = Router("bench", replicas, RoutingConfig(), kind="rollout")
        by_http = replace(recipe, weight_sync=HttpConfig(type="http"))
        self._students = {
            self._way: through.student(recipe, GroupWeightSync(self._router)),
            HTTP: through.student(by_http, GroupWeightSync(self._router)),
        }
        self._version = -1
        self._last: str = self._way
        self._answers: list[Any] = []
        self.phases: list[dict[str, float]] = []
        """Metrics of each round's update by the way: see ``Transfer.take_numbers``."""
        sides = [name.split()[0] for name in self._holders]
        self.extra_bytes: dict[str, dict[str, int]] = {name: dict.fromkeys(sides, 0) for name in (self._way, HTTP)}
        """Largest memory, by way, that the sender, this process and any receiver took above what they had."""

    async def begin(self) -> None:
        """Measure the memory that updates take. On a CPU the first one says nothing: engines without weights have never
        touched their own; and what is freed after one by HTTP may be taken again unseen."""
        if not self._is_cuda:
            await self.publish(self._way)
        for way, most in self.extra_bytes.items():
            peaks = self._peaks(self._holders)
            await self.publish(way)
            for name, extra in peaks.extra_bytes().items():
                side = name.split()[0]
                most[side] = max(most[side], extra)
        await self.end_round()
        self.phases = []

    async def publish(self, way: str) -> float:
        """Publish new weights and return the seconds that it took. Keep what every server then draws."""
        if way != self._last:  # servers are in one group, or in none, at a time: meeting is no part of an update
            await self._students[self._last].close()
            self._last = way
            if way != HTTP:
                self._version += 1
                await self._students[way].publish(self._version)
        self._version += 1
        started = time.perf_counter()
        await self._students[way].publish(self._version)
        seconds = time.perf_counter() - started
        for engine in self._engines:
            (drawn,) = await engine.generate(ToDraw([[3, 4, 5]], SAMPLING, [0]))
            self._answers.append((drawn.tokens.tolist(), drawn.logprobs.tolist()))
        return seconds

    async def end_round(self) -> None:
        """Take a step to other weights; ``UserError`` if the answers since the last one differ."""
        answers, self._answers = self._answers, []
        if any(answer != answers[0] for answer in answers):
            raise UserError("bench weights: engines answer otherwise after one way than after the other")
        self.phases.append(await self._students[self._way].optim_step())

    async def close(self) -> None:
        """Leave the group, and close the connections to the servers."""
        for student in self._students.values():
            await student.close()
        await self._router.close()
        for engine in self._engines:
            await engine.close()


class BenchStudent:
    """Megatron model of a given size on one rank, without gradients and optimizer: the part of a ``StudentWorker`` that
    the commands of a weight update need."""

    constants: frozenset[str] = frozenset()
    weight_version = 0

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, cfg = recipe, recipe.student
        self.dims = read_dims(Path(cfg.model))
        self.layout = parallel.initialize(cfg.parallel, timeout_s=TIMEOUT_S, seed=0)
        with cpu_shim.activate():
            self._model = build_model(cfg, self.dims, self.layout).requires_grad_(False)
        for parameter in self._model.parameters():
            parameter.normal_(std=STD)

    def optim_step(self) -> dict[str, float]:
        """Change to other weights, as a step does."""
        self._model.decoder.final_layernorm.weight.mul_(1.5)
        return {}

    def memory(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def weights(
        self, part: WeightPart = "all", *, in_place: bool = False, ema: float | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Return all weights as ``StudentWorker.weights`` does."""
        return iter_hf_weights([self._model], self.dims, self.layout, in_place=in_place)

    def sender_weights(self, part: WeightPart) -> Iterator[tuple[str, Tensor | None]]:
        """Return all weights as ``StudentWorker.sender_weights`` does."""
        return iter_sender_weights([self._model], self.dims, self.layout, takes=lambda placed: True)

    def weight_senders(self) -> list[int]:
        """Return the one sender of each tensor."""
        return list(hf_senders([self._model], self.dims, self.layout))


def write_student(folder: Path, num_bytes: int) -> int:
    """Write the folder of a Qwen3 of about ``num_bytes`` in fp32; returns its exact size in bytes."""
    hidden = 1024 if num_bytes >= SMALL_BYTES else 256
    layer = 4 * hidden * (3 * hidden + 3 * 4 * hidden)  # attention with half as many key heads, and the MLP
    num_layers = max(1, round((num_bytes - 4 * VOCAB_SIZE * hidden) / layer))
    shape = qwen3(hidden, 4 * hidden, num_layers, hidden // 64, hidden // 128, 64, vocab=VOCAB_SIZE)
    write_model(folder, shape, longest=256, with_values=False)
    return sum(4 * prod(shape) for _, _, shape in hf_tensors(read_dims(folder), torch.float32))


@dataclass(frozen=True, kw_only=True)
class Bare:
    """A process group of torch's own backend, without anything of ours."""

    port: int
    size: int
    num_bytes: int
    bucket_bytes: int
    kind: str
    """Type of the devices."""

    def run(self, rank: int, store: TCPStore) -> Iterator[None]:
        """Broadcast ``num_bytes`` from rank 0 each time that another item is asked for, from and into two buckets that
        were allocated and written before."""
        device = torch.device(f"cuda:{rank}" if self.kind == "cuda" else self.kind)
        inner = PrefixStore("bare", store)
        if self.kind == "cuda":
            group = open_nccl(inner, rank, self.size, device)
        else:
            group = open_gloo(inner, rank, self.size, TIMEOUT_S, LOOPBACK)
        # filled, so that their memory pages exist
        buckets = [torch.full((self.bucket_bytes,), i, dtype=torch.uint8, device=device) for i in range(2)]
        while True:
            flying = deque[Any]()
            for number, start in enumerate(range(0, self.num_bytes, self.bucket_bytes)):
                if len(flying) == 2:
                    flying.popleft().wait()
                flying.append(group.broadcast([buckets[number % 2][: self.num_bytes - start]]))
            for work in flying:
                work.wait()
            if self.kind == "cuda":
                torch.cuda.synchronize(device)
            yield


@contextmanager
def bare_broadcast(
    num_bytes: int, bucket_bytes: int, num_receivers: int, device: torch.device
) -> Iterator[Callable[[], float]]:
    """Seconds until all of so many processes have received so many bytes, over a group of torch's own."""
    store = GroupStore(LOOPBACK, TIMEOUT_S)  # which, unlike TCPStore alone, listens there only
    bare = Bare(
        port=store.port,
        size=1 + num_receivers,
        num_bytes=num_bytes,
        bucket_bytes=bucket_bytes,
        kind=device.type,
    )
    with children(_receive, [(bare, rank) for rank in range(1, bare.size)]) as ends:
        sending = bare.run(0, store.store)

        def send() -> float:
            started = time.perf_counter()
            for end in ends:
                end.send_bytes(b"go")
            next(sending)
            for end in ends:
                received(end, "a receiver of the bare broadcast")
            return time.perf_counter() - started

        yield send


def _receive(end: Connection, bare: Bare, rank: int) -> None:
    """Run a receiver's process: one broadcast for each message."""
    torch.set_num_threads(1)
    receiving = bare.run(rank, TCPStore(LOOPBACK, bare.port, is_master=False))
    while True:
        end.recv_bytes()
        next(receiving)
        end.send_bytes(b"done")


LOOPBACK = "127.0.0.1"
END_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Hop:
    """The orchestrator's side of the link to the student's process."""

    ranks: Ranks
    pid: int
    """Process id of rank 0."""
    facts: dict[str, Any]
    """Facts of the student that a run's orchestrator receives (``student_facts``)."""

    def student(self, recipe: Recipe, weights: GroupWeightSync) -> StudentGroup:
        """Return the student as a run's controller has it; its weights go as ``recipe.weight_sync`` says."""
        return StudentGroup(recipe, self.ranks, self.facts, weights)


@asynccontextmanager
async def hop(make: Callable[[Recipe], Any], recipe: Recipe) -> AsyncIterator[Hop]:
    """Start a child that is rank 0, the only one, with the student worker ``make(recipe)``, until the end of the
    block."""
    ours, theirs = socket.socketpair()
    process = forks(make.__module__).Process(target=_follow, args=(make, recipe, theirs), daemon=True)
    process.start()
    theirs.close()
    link = RankLink(ours, "the student's process")
    assert process.pid is not None
    try:
        async with Tasks() as tasks:
            ranks = Ranks(link)
            tasks.start(ranks.run())
            facts = await tasks.unless_failed(ranks.ask("join"))
            yield Hop(ranks=ranks, pid=process.pid, facts=facts)
    finally:
        link.close()
        await asyncio.to_thread(process.join, END_S)
        process.kill()
        process.join()


def _follow(make: Callable[[Recipe], Any], recipe: Recipe, end: socket.socket) -> None:
    """Run the child's process: build the worker and execute commands until the link ends."""
    torch.set_num_threads(1)  # as beside as many busy engines
    worker, link = make(recipe), RankLink(end, "the benchmark")
    with suppress(LinkEnded):
        link.next_command()
        link.answer(student_facts(recipe, worker))
        run_commands(worker, CommandChannel(None), link)
