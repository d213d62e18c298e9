"""Rank 0 leads, the other trainer ranks follow: each joins with its share of the student, rank 0 with all the rest."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.config.schema import Recipe
from mopd.data_plane.interface import Reader, Storage, StorageEnded
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.reading import open_reader
from mopd.files.reading import read_text, shown_path
from mopd.files.writing import write_text
from mopd.launch import heartbeat
from mopd.launch.failure import rank_0_host
from mopd.launch.heartbeat import LeaderWatch
from mopd.launch.rank_log import rank_log
from mopd.launch.ranks import CommandChannel, StudentGroup, StudentHere, serve
from mopd.launch.reaching import check_reach, told_to_reach
from mopd.launch.transfer import open_transfer
from mopd.placement.gpus import local_rank
from mopd.placement.groups import Groups
from mopd.placement.storage import open_storage
from mopd.replicas.interface import SampleFailed
from mopd.run.folder import START_FILE, RunDir
from mopd.run.stopping import watched
from mopd.run.workers import Workers, build_workers, read_inputs
from mopd.student import parallel
from mopd.student.worker import StudentWorker
from mopd.tasks import Stop, StopAsked
from mopd.types import UserError

RANK_0_S = 2.0
"""For rank 0 to say why the data plane is gone."""
SEEN_S = 60.0
"""For rank 0's file to be seen by the other nodes: network file systems keep what they have looked up."""
SMALL_BYTES = 4096
Rank = tuple[StudentWorker, CommandChannel]


def lead(
    recipe: Recipe, run: RunDir | None, work: Callable[[Workers, StudentGroup, Stop], Coroutine[Any, Any, None]]
) -> str | None:
    """Rank 0 with all workers in its process: start every group, build everything, do ``work``, release the other
    ranks. ``run`` is the folder to write in and to watch for a request to stop, if any. Returns the line to tell after
    such a request."""
    inputs = read_inputs(recipe)
    log_dir = None if run is None else run.logs_here

    async def with_groups(plane: Storage, worker: StudentWorker, channel: CommandChannel) -> None:
        async with watched(None if run is None else run.path) as stop:
            here = StudentHere(worker, channel)
            groups = Groups(recipe, log_dir=log_dir, device=worker.layout.device, student=here)
            here.turns = groups.turns
            student: StudentGroup | None = None
            try:
                await stop.unless_asked(groups.start())
                workers = await build_workers(recipe, inputs, plane, groups, vocab_size=worker.dims.vocab_size)
                targets = workers.weights.targets
                transfer = None if targets is None else open_transfer(recipe, worker, targets)
                turns = None if groups.turns is None else here
                here.group = student = StudentGroup(worker, channel, workers.weights, transfer, turns)
                await work(workers, student, stop)
            except SampleFailed as error:
                raise UserError(f"{error}: see the replicas' logs") from error
            except StopAsked as asked:
                if student is not None:
                    await student.close()
                channel.stopped = str(asked)
            finally:
                await groups.close()

    try:
        with (
            opened_plane(recipe) as (plane, reader),
            joined(recipe, Opened(list(inputs.train.domain_counts), plane.address, reader), log_dir) as rank,
        ):
            asyncio.run(heartbeat.tied_to(with_groups(plane, *rank)))
            return rank[1].stopped
    finally:
        if inputs.rewards is not None:
            inputs.rewards.close()


def follow(recipe: Recipe, logs: Path | None = None) -> bool:
    """Every other rank: build its part of the student and do what rank 0 says. Whether the run was asked to stop."""
    with joined(recipe, None, logs) as (worker, channel):
        is_asked = serve(worker, channel)
    return is_asked


@contextmanager
def opened_plane(recipe: Recipe) -> Iterator[tuple[Storage, Reader]]:
    """The recipe's data plane, held by this process and open to the other ranks, and this process's own reader."""
    plane = open_storage(recipe, host=rank_0_host())
    try:
        if isinstance(plane, LocalDataPlane):
            reader: Reader = plane.reader()
        else:
            reader = open_reader(plane.address, timeout_s=recipe.schedule.wait_timeout_s)
        yield plane, reader
        reader.close()
    finally:
        asyncio.run(plane.close())


@dataclass(frozen=True)
class Opened:
    """What rank 0 knows before the others join."""

    domains: Sequence[str]
    """Of the data; a default teacher answers for those that nobody names."""
    plane: dict[str, Any]
    """Address of the data plane."""
    reader: Reader
    """Rank 0's own."""


@contextmanager
def joined(recipe: Recipe, opened: Opened | None, logs: Path | None = None) -> Iterator[Rank]:
    """Join the other ranks and build this rank's share of the student. The others stop when rank 0 leaves the block.
    ``opened`` is rank 0's; the other ranks (``None``) are told. ``logs`` is the folder of this node's logs, if any."""
    timeout_s = recipe.schedule.wait_timeout_s
    leader = LeaderWatch(timeout_s)
    if opened is None:
        leader.await_joining()
    else:
        heartbeat.announce()
    check_reach(timeout_s)
    parallel_ranks = parallel.joined(
        recipe.student.parallel, timeout_s=timeout_s, seed=recipe.seed, local_rank=local_rank()
    )
    with contextlib.ExitStack() as ranks, contextlib.ExitStack() as log:
        with told_to_reach():
            layout = ranks.enter_context(parallel_ranks)
        channel = CommandChannel(layout.control_group, leader)
        if opened is None:
            told = channel.receive()
            require_shared(logs, told["mark"])
            channel.watch = log.enter_context(rank_log(logs, layout.rank, deadline_s=timeout_s))
            with _rank_0_first():
                reader = open_reader(told["data_plane"], timeout_s=timeout_s)
                worker = StudentWorker(recipe, reader, told["domains"])
                with worker.saving:
                    yield worker, channel
            reader.close()
            return
        channel.watch = log.enter_context(rank_log(logs, layout.rank, deadline_s=timeout_s))
        domains = list(recipe.assignment.domains_among(opened.domains))
        are_several = rank_0_host() is not None
        mark = mark_start(logs) if logs is not None and are_several else None
        channel.send({"domains": domains, "data_plane": opened.plane, "mark": mark})
        worker = StudentWorker(recipe, opened.reader, domains)
        with worker.saving:
            yield worker, channel
        ending = {"is_asked": channel.stopped is not None}
        channel.send({"call": "stop", "kwargs": ending})  # after an error nobody listens


def mark_start(logs: Path) -> list[str]:
    """Leave a word of this start beside rank 0's log. Returns the file, below the folder of all nodes' logs, and the
    word."""
    file, word = logs / START_FILE, secrets.token_hex(8)
    write_text(file, word)
    return [f"{logs.name}/{START_FILE}", word]


def require_shared(logs: Path | None, mark: Sequence[str] | None) -> None:
    """``UserError`` where ``logs``, of this node, do not lie beside rank 0's, which has made ``mark`` there: a run
    folder of the same name, be it a copy with logs of former starts."""
    if logs is None or mark is None:
        return
    name, word = mark
    path, deadline = logs.parent / name, time.monotonic() + SEEN_S
    while not path.is_file() or read_text(path, cure="start again", max_bytes=SMALL_BYTES) != word:
        if time.monotonic() > deadline:
            raise UserError(
                f"run_dir: {shown_path(path)!r} is not there on {logs.name} as rank 0 has written it: name a folder "
                "that all nodes share, and start them in one working directory"
            )
        time.sleep(0.2)


@contextmanager
def _rank_0_first() -> Iterator[None]:
    """The first rank that tells an error ends the run. One that has lost the data plane knows less than rank 0, which
    may have closed it because of an error of its own."""
    try:
        yield
    except StorageEnded:
        time.sleep(RANK_0_S)
        raise
