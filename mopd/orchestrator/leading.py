"""Parts that every task of the orchestrator shares: the link to the ranks, signs of life, one report of an error, and
the construction of everything that a run consists of."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from mopd.base.tasks import Stop, StopRequested, Tasks
from mopd.config.load import Loaded
from mopd.conversion.models.reading import read_dims
from mopd.data_plane.interface import Storage
from mopd.engines.replicas.interface import SampleFailed
from mopd.launch.failure import rank_0_host
from mopd.launch.heartbeat import Heartbeat
from mopd.launch.link import LinkEnded, RankLink, error_head
from mopd.launch.rank_log import StallWatch
from mopd.orchestrator.ranks import Ranks
from mopd.orchestrator.student import StudentGroup
from mopd.orchestrator.workers import Inputs, Workers, build_workers, read_inputs
from mopd.placement.gpus import local_rank
from mopd.placement.groups import Groups
from mopd.placement.storage import open_storage
from mopd.run.stopping import watched

T = TypeVar("T")


GC_THRESHOLDS = (100_000, 20, 50)
"""Allocations before the youngest objects are looked at, and such looks before the older ones are."""


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Everything that is ready once all engines answer and the ranks have built the student."""

    workers: Workers
    student: StudentGroup
    stop: Stop


Work = Callable[[RunParts], Coroutine[Any, Any, None]]


class Orchestrator:
    """Orchestrator's side of a run: its link to the ranks, its heartbeat, and its report of an error."""

    def __init__(self, loaded: Loaded, link: RankLink, log: Path | None) -> None:
        """Set up. ``log``: file for the stacks once ``keep_stacks`` is called, if any."""
        self.loaded, self._link, self._log = loaded, link, log
        self.heartbeat = Heartbeat(self._beat, loaded.recipe.schedule.wait_timeout_s)
        self._watch: StallWatch | None = None
        self._has_reported = False

    def keep_stacks(self) -> None:
        """Write the stacks of all threads to the log from now on where the event loop stalls or a library crashes."""
        if self._log is not None:
            self._watch = StallWatch(self._log, self.loaded.recipe.schedule.wait_timeout_s)

    def report(self, error: BaseException) -> None:
        """Report to rank 0, once, what ends the run."""
        if not self._has_reported:
            self._has_reported = True
            with contextlib.suppress(LinkEnded):  # it is gone, and has its own reason
                self._link.send(error_head(error))

    @asynccontextmanager
    async def reporting(self) -> AsyncIterator[None]:
        """Report an error of the block to rank 0, and wait until it is heard, before anything is closed: ranks that are
        in the middle of a step go on reading samples until then, and one that lost them would end the run with a line
        of its own."""
        try:
            yield
        except StopRequested:
            raise
        except Exception as error:
            self.report(error)
            await asyncio.get_running_loop().create_future()  # until rank 0 closes the link, which cancels this

    def run(self, work: Callable[[Ranks], Coroutine[Any, Any, T]]) -> T:
        """Do ``work`` on an event loop, as long as rank 0 lives; raise ``LinkEnded`` once it does not."""

        async def main() -> T:
            ranks = Ranks(self._link)
            with self.heartbeat.depending_on(asyncio.get_running_loop()):
                async with Tasks() as tasks:
                    tasks.start(ranks.run())
                    tasks.start(error_of_a_callback())
                    return await tasks.unless_failed(work(ranks))

        collect_rarely()
        return asyncio.run(main())

    def with_workers(self, work: Work, run_path: Path | None) -> str | None:
        """Read the inputs, start every group and the student, do ``work``, end the groups. ``run_path`` is watched for
        a request to stop; returns the line to tell after one."""
        recipe = self.loaded.recipe
        inputs = read_inputs(recipe)
        try:
            plane = open_storage(recipe, host=rank_0_host())
            try:
                return self.run(lambda ranks: self._with_groups(ranks, inputs, plane, work, run_path))
            finally:
                asyncio.run(plane.close())
        finally:
            for judge in (inputs.rewards, inputs.environments):
                if judge is not None:
                    judge.close()

    async def _with_groups(
        self, ranks: Ranks, inputs: Inputs, plane: Storage, work: Work, run_path: Path | None
    ) -> str | None:
        recipe = self.loaded.recipe
        async with watched(run_path) as stop:
            log_dir = None if self._log is None else self._log.parent
            groups = Groups(recipe, log_dir=log_dir, device=engine_device(), student=ranks)
            joining = asyncio.ensure_future(join(ranks, list(inputs.train.domain_counts), plane))
            try:
                async with self.reporting():
                    await stop.unless_stop_requested(groups.start())
                    facts = await joining
                    vocab_size = read_dims(Path(recipe.student.model)).vocab_size
                    workers = await build_workers(recipe, inputs, plane, groups, vocab_size=vocab_size)
                    student = StudentGroup(
                        recipe, ranks, facts, workers.weights, groups.turns, refreshed=workers.refreshed
                    )
                    try:
                        await work(RunParts(workers=workers, student=student, stop=stop))
                    except SampleFailed as error:
                        raise error.ends(f"{error}: see the replicas' logs") from error
            except StopRequested as asked:
                await ranks.settle()
                return str(asked)
            finally:
                joining.cancel()
                await groups.close()
        return None

    def _beat(self) -> None:
        self._link.beat()
        if self._watch is not None:
            self._watch.alive()


async def join(ranks: Ranks, domains: list[str], plane: Storage) -> dict[str, Any]:
    """Have the ranks join and build the student; return rank 0's facts about it."""
    facts: dict[str, Any] = await ranks.ask("join", domains=domains, data_plane=plane.address)
    return facts


async def error_of_a_callback() -> None:
    """Raise what a callback of this event loop raises. asyncio only logs it, and what waits for the callback's work
    would wait in vain."""
    raised: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" in context and error is not None and not raised.done():  # of a callback
            raised.set_exception(error)
        else:
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(note)
    await raised


def collect_rarely() -> None:
    """Have Python look for garbage in cycles less often, and never among what stands now.

    A step of thousands of prompts has as many tasks, callbacks and tensors alive. At its default thresholds the
    collector walks over all of them again and again, which took half of this process's time (``make scale``).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def engine_device() -> torch.device:
    """Return the device of engines of this process: rank 0's GPU, if it has one."""
    return torch.device("cuda", local_rank() or 0) if torch.cuda.is_available() else torch.device("cpu")
