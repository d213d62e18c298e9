"""Rank 0 leads, the other trainer ranks follow: each joins with its share of the student, rank 0 with all the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mopd.config.schema import Recipe
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.reading import SocketReader
from mopd.launch.failure import rank_0_host
from mopd.launch.ranks import CommandChannel, serve
from mopd.placement.gpus import local_rank
from mopd.placement.groups import Groups
from mopd.replicas.interface import SampleFailed
from mopd.run.folder import RunDir
from mopd.run.workers import Workers, build_workers, read_inputs
from mopd.student import parallel
from mopd.student.worker import StudentWorker
from mopd.types import UserError

Work = Callable[[Workers], Coroutine[Any, Any, None]]


def lead(recipe: Recipe, run: RunDir | None, work: Work) -> None:
    """Rank 0: start every group, build everything, do ``work``, release the other ranks. ``run`` is the folder to write
    in, if any."""
    inputs = read_inputs(recipe)
    log_dir, path = (None, None) if run is None else (run.logs, run.validation)

    async def with_groups(worker: StudentWorker, plane: LocalDataPlane | None, channel: CommandChannel) -> None:
        assert plane is not None, "rank 0 holds it"
        async with Groups(recipe, log_dir=log_dir, device=worker.layout.device) as groups:
            try:
                await work(await build_workers(recipe, inputs, worker, plane, channel, groups, validation_path=path))
            except SampleFailed as error:
                raise UserError(f"{error}: see the replicas' logs") from error

    try:
        with joined(recipe, list(inputs.train.domain_counts)) as parts:
            asyncio.run(with_groups(*parts))
    finally:
        if inputs.rewards is not None:
            inputs.rewards.close()


def follow(recipe: Recipe) -> None:
    """Every other rank: build its part of the student and do what rank 0 says."""
    with joined(recipe, None) as (worker, _, channel):
        serve(worker, channel)


@contextmanager
def joined(
    recipe: Recipe, seen_domains: Sequence[str] | None
) -> Iterator[tuple[StudentWorker, LocalDataPlane | None, CommandChannel]]:
    """Join the other ranks and build this rank's share of the student; rank 0 gets the data plane too. The others stop
    when rank 0 leaves the block.

    Args:
        seen_domains: rank 0's domains of the data, which a default teacher answers for; ``None`` on other ranks, which
            never read the data and are told.
    """
    timeout_s = recipe.schedule.wait_timeout_s
    with parallel.joined(
        recipe.student.parallel, timeout_s=timeout_s, seed=recipe.seed, local_rank=local_rank()
    ) as layout:
        channel = CommandChannel(layout.control_group)
        if seen_domains is None:
            told = channel.receive()
            reader = SocketReader(told["data_plane"], timeout_s=timeout_s)
            yield StudentWorker(recipe, reader, told["domains"]), None, channel
            reader.close()
            return
        plane = LocalDataPlane()
        plane.serve(host=rank_0_host())
        try:
            domains = list(recipe.assignment.domains_among(seen_domains))
            channel.send({"domains": domains, "data_plane": plane.address})
            yield StudentWorker(recipe, plane.reader(), domains), plane, channel
            channel.send({"call": "stop", "kwargs": {}})  # after an error nobody listens
        finally:
            asyncio.run(plane.close())
