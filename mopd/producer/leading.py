"""Rank 0 of a training run, with those that make samples: in its process where engines run there, else beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import Manifest
from mopd.data.stream import PromptStream
from mopd.data_plane.interface import Storage
from mopd.data_plane.queue_plane import QueuePlane
from mopd.data_plane.reading import open_reader
from mopd.launch.ranks import CommandChannel, StudentGroup
from mopd.launch.signals import ending_in_order
from mopd.launch.transfer import open_transfer
from mopd.preflight.checks import check_before_training
from mopd.producer.client import ProducerProcess
from mopd.producer.turns import FarTurns, memory_handlers
from mopd.producer.weights import FarTargets
from mopd.replicas.statistics import group_metrics
from mopd.run.folder import RunDir
from mopd.run.leading import Opened, joined, lead
from mopd.run.stopping import watched
from mopd.run.training import Findings, Led
from mopd.run.workers import Workers
from mopd.student.worker import StudentWorker
from mopd.tasks import Stop, StopAsked
from mopd.types import SampleMeta

Work = Callable[[Led, Stop], Coroutine[Any, Any, None]]


def lead_training(recipe: Recipe, run: RunDir, work: Work) -> str | None:
    """As ``lead``, with the loop's view of the workers, wherever they are."""
    if not recipe.has_in_process_engines:
        with ending_in_order():
            return _lead_beside(recipe, run, work)

    async def here(workers: Workers, student: StudentGroup, stop: Stop) -> None:
        prompts = PromptStream(workers.dataset.rows_by_domain, recipe.data.domain_weights, recipe.seed)
        await work(Led(student=student, prompts=prompts, maker=Here(recipe, workers, student)), stop)

    return lead(recipe, run, here)


def _lead_beside(recipe: Recipe, run: RunDir, work: Work) -> str | None:
    with ProducerProcess(recipe, run) as producer:
        hello = producer.hello()
        reader = open_reader(hello.plane, timeout_s=recipe.schedule.wait_timeout_s)

        async def beside(worker: StudentWorker, channel: CommandChannel) -> None:
            async with watched(run.path) as stop, producer.client(recipe) as client:
                transfer = open_transfer(recipe, worker, FarTargets(client.channel))
                turns = FarTurns(client.channel) if recipe.shares_gpus else None
                student = StudentGroup(worker, channel, client.weights, transfer, turns)
                client.student = student
                client.channel.answer(memory_handlers(student))
                prompts = PromptStream(hello.rows, recipe.data.domain_weights, recipe.seed)
                try:
                    await client.unless_ended(stop.unless_asked(client.start()))
                    await client.unless_ended(work(Led(student=student, prompts=prompts, maker=client), stop))
                except StopAsked as asked:
                    await student.close()
                    channel.stopped = str(asked)

        with joined(recipe, Opened(list(hello.rows), hello.plane, reader), run.logs_here) as rank:
            asyncio.run(beside(*rank))
        reader.close()
        return rank[1].stopped


class Here:
    """Implements ``Maker`` with workers in this process."""

    def __init__(self, recipe: Recipe, workers: Workers, student: StudentGroup) -> None:
        self._recipe, self._workers, self._student = recipe, workers, student
        self.rollout, self.teachers, self.rewards = workers.rollout, workers.teachers, workers.rewards
        self.plane = workers.plane
        self.unit = recipe.schedule.prompts_per_step

    async def check(
        self, manifests: Mapping[str, Manifest], *, is_fresh: bool, fingerprints: Mapping[str, Any]
    ) -> Findings:
        """See ``check_before_training``."""
        return await check_before_training(
            self._recipe, self._workers, self._student, manifests, is_fresh=is_fresh, fingerprints=fingerprints
        )

    async def numbers(self) -> dict[str, float]:
        """See ``Maker.numbers``."""
        return take_numbers(self._workers)

    async def save_samples(self, folder: Path) -> str | None:
        """See ``Maker.save_samples``."""
        return await save_samples(self.plane, folder)

    async def load_samples(self, folder: Path, digest: str, fields: Sequence[str]) -> list[SampleMeta]:
        """See ``Maker.load_samples``."""
        return await load_samples(self.plane, folder, digest, fields)

    async def validate(self, step: int) -> dict[str, Any]:
        """See ``Maker.validate``."""
        return await validate(self._workers, step)

    async def stop_drawing(self) -> None:
        """See ``Maker.stop_drawing``. Here a response ends with whoever asked for it."""


def take_numbers(workers: Workers) -> dict[str, float]:
    """Metrics of every group since the last call."""
    values: dict[str, float] = {}
    for router in workers.routers.values():
        values |= group_metrics(router.take_numbers())
    return values if workers.turns is None else values | workers.turns.take_numbers()


async def validate(workers: Workers, step: int) -> dict[str, Any]:
    """A line of ``validation.jsonl`` for the weights that were published last."""
    assert workers.validator is not None, "nobody asks without a validation section"
    return await workers.validator.record(workers.generator, step)


async def save_samples(plane: Storage, folder: Path) -> str | None:
    """See ``Maker.save_samples``."""
    return await plane.save(folder) if isinstance(plane, QueuePlane) else None


async def load_samples(plane: Storage, folder: Path, digest: str, fields: Sequence[str]) -> list[SampleMeta]:
    """See ``Maker.load_samples``. Nothing from a plane that saves nothing: another one wrote the folder."""
    return await plane.load(folder, digest, fields) if isinstance(plane, QueuePlane) else []
