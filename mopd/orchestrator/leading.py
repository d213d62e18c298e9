"""What every task of the orchestrator shares: the link to the ranks, signs of life, errors that are told once, and the
construction of everything that a run consists of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from mopd.base.tasks import Stop, StopAsked, Tasks
from mopd.base.types import UserError
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


@dataclass(frozen=True, kw_only=True)
class Led:
    """What stands once all engines answer and the ranks have built the student."""

    workers: Workers
    student: StudentGroup
    stop: Stop


Work = Callable[[Led], Coroutine[Any, Any, None]]


class Lead:
    """The orchestrator's side of a run: its way to the ranks, and what it says of itself."""

    def __init__(self, loaded: Loaded, link: RankLink, log: Path | None) -> None:
        """``log``: where stacks are left once ``keep_stacks`` is called, if anywhere."""
        self.loaded, self._link, self._log = loaded, link, log
        self.heartbeat = Heartbeat(self._beat, loaded.recipe.schedule.wait_timeout_s)
        self._watch: StallWatch | None = None
        self._has_told = False

    def keep_stacks(self) -> None:
        """From now on leave the stacks of all threads in the log where the event loop stalls or a library crashes."""
        if self._log is not None:
            self._watch = StallWatch(self._log, self.loaded.recipe.schedule.wait_timeout_s)

    def tell(self, error: BaseException) -> None:
        """Say to rank 0, once, what ends the run."""
        if not self._has_told:
            self._has_told = True
            with contextlib.suppress(LinkEnded):  # it is gone, and has its own reason
                self._link.send(error_head(error))

    @asynccontextmanager
    async def telling(self) -> AsyncIterator[None]:
        """An error of the block is told, and heard, before anything is closed: ranks that are in the middle of a step
        go on reading samples until then, and one that lost them would end the run with a line of its own."""
        try:
            yield
        except StopAsked:
            raise
        except Exception as error:
            self.tell(error)
            await asyncio.get_running_loop().create_future()  # until rank 0 closes the link, which cancels this

    def run(self, work: Callable[[Ranks], Coroutine[Any, Any, T]]) -> T:
        """``work`` on an event loop, as long as rank 0 lives; ``LinkEnded`` once it does not."""

        async def main() -> T:
            ranks = Ranks(self._link)
            with self.heartbeat.depending_on(asyncio.get_running_loop()):
                async with Tasks() as tasks:
                    tasks.start(ranks.run())
                    return await tasks.unless_failed(work(ranks))

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
            if inputs.rewards is not None:
                inputs.rewards.close()

    async def _with_groups(
        self, ranks: Ranks, inputs: Inputs, plane: Storage, work: Work, run_path: Path | None
    ) -> str | None:
        recipe = self.loaded.recipe
        async with watched(run_path) as stop:
            log_dir = None if self._log is None else self._log.parent
            groups = Groups(recipe, log_dir=log_dir, device=engine_device(), student=ranks)
            joining = asyncio.ensure_future(join(ranks, list(inputs.train.domain_counts), plane))
            try:
                async with self.telling():
                    await stop.unless_asked(groups.start())
                    facts = await joining
                    vocab_size = read_dims(Path(recipe.student.model)).vocab_size
                    workers = await build_workers(recipe, inputs, plane, groups, vocab_size=vocab_size)
                    student = StudentGroup(recipe, ranks, facts, workers.weights, groups.turns)
                    try:
                        await work(Led(workers=workers, student=student, stop=stop))
                    except SampleFailed as error:
                        raise UserError(f"{error}: see the replicas' logs") from error
            except StopAsked as asked:
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
    """Have the ranks join and build the student; what rank 0 says of it."""
    facts: dict[str, Any] = await ranks.ask("join", domains=domains, data_plane=plane.address)
    return facts


def engine_device() -> torch.device:
    """Where engines of this process compute: on rank 0's GPU, if it has one."""
    return torch.device("cuda", local_rank() or 0) if torch.cuda.is_available() else torch.device("cpu")
