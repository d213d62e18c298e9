"""The process beside rank 0: it reads the data, runs the groups of engines, makes samples and holds their tensors.

It says once what it has read (``Hello``), then answers calls until rank 0 closes the connection, which is also how rank
0's death reaches it; then it ends its engine servers in order.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.config.reading.build import build_from_json
from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import Manifest
from mopd.conversion.models.reading import read_dims
from mopd.data_plane.frames import packed
from mopd.data_plane.interface import Storage
from mopd.launch.failure import USER_ERROR_CODE, rank_0_host
from mopd.placement.groups import Groups
from mopd.placement.sharing.rollout import TurnsGenerator
from mopd.placement.storage import open_storage
from mopd.preflight.checks import check_before_training
from mopd.producer.channel import Channel, Handler, PeerEnded
from mopd.producer.leading import load_samples, save_samples, take_numbers, validate
from mopd.producer.messages import pack_samples
from mopd.producer.samples import SampleAnswers
from mopd.producer.turns import FarMemory, turn_handlers
from mopd.producer.weights import WeightAnswers
from mopd.replicas.interface import SampleFailed
from mopd.run.workers import Inputs, Workers, build_workers, read_inputs
from mopd.tasks import Tasks
from mopd.types import SampleMeta, UserError


def run(logs: Path, descriptor: int) -> int:
    """The whole life of the process; its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # For rank 0, which closes the connection. A child would inherit it if they were ignored.
        signal.signal(number, lambda *_: None)
    end = socket.socket(fileno=descriptor)
    forwarding = _Forwarding()
    logging.basicConfig(level=logging.WARNING, handlers=[forwarding])
    logging.getLogger("mopd").setLevel(logging.INFO)
    try:
        recipe = build_from_json(Recipe, json.load(sys.stdin), "recipe.yaml")  # as rank 0 resolved it
        with forwarding.told_at_once(end):
            inputs = read_inputs(recipe)
        plane = open_storage(recipe, host=rank_0_host())
    except UserError as error:
        _say(end, {"error": str(error)})
        return USER_ERROR_CODE
    try:
        _say(end, {"rows": inputs.train.rows_by_domain, "plane": plane.address})
        end.setblocking(False)
        asyncio.run(_Process(recipe, inputs, plane, logs, forwarding).serve(end))
    finally:
        asyncio.run(plane.close())
        if inputs.rewards is not None:
            inputs.rewards.close()
    return 0


def _say(end: socket.socket, value: Mapping[str, Any]) -> None:
    body = packed(value)
    end.sendall(len(body).to_bytes(8, "little") + body)


class _Process:
    """What answers rank 0's calls."""

    def __init__(self, recipe: Recipe, inputs: Inputs, plane: Storage, logs: Path, forwarding: _Forwarding) -> None:
        self._recipe, self._inputs, self._plane = recipe, inputs, plane
        self._forwarding = forwarding
        self._workers: Workers | None = None
        self._vocab_size = read_dims(Path(recipe.student.model)).vocab_size
        handlers: dict[str, Handler] = {
            "start": self._start,
            "check": self._check,
            "numbers": self._numbers,
            "validate": self._validate,
            "save_samples": self._save_samples,
            "load_samples": self._load_samples,
            "stop_drawing": self._stop_drawing,
            **WeightAnswers(lambda: self.workers.weights).handlers,
        }
        self._channel = Channel("rank 0", handlers)
        student = FarMemory(self._channel)
        self._groups = Groups(recipe, log_dir=logs, device=torch.device("cpu"), student=student)
        if (turns := self._groups.turns) is not None:
            self._channel.answer(turn_handlers(turns))

    async def serve(self, end: socket.socket) -> None:
        """Until rank 0 closes the connection. Engines load while rank 0 builds the student."""
        self._starting = asyncio.ensure_future(self._groups.start())
        try:
            async with Tasks() as tasks:
                tasks.start(self._forwarding.forward(self._channel))
                await tasks.unless_failed(self._channel.run(end))
        except PeerEnded:
            pass
        finally:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
            await self._groups.close()

    @property
    def workers(self) -> Workers:
        """After ``start``."""
        assert self._workers is not None
        return self._workers

    async def _start(self) -> None:
        await self._starting
        self._workers = await build_workers(
            self._recipe, self._inputs, self._plane, self._groups, vocab_size=self._vocab_size
        )
        workers = self._workers
        workers.weights.send_again_by(lambda: self._channel.call("weights_again"))
        self._channel.answer(SampleAnswers(workers.rollout, workers.teachers, workers.rewards, workers.plane).handlers)

    async def _check(self, manifests: dict[str, Any], is_fresh: bool, fingerprints: dict[str, Any]) -> dict[str, Any]:
        with _naming_logs():
            found = await check_before_training(
                self._recipe,
                self.workers,
                _FarStudent(self._channel, self._vocab_size),
                {key: Manifest(**manifest) for key, manifest in manifests.items()},
                is_fresh=is_fresh,
                fingerprints=fingerprints,
            )
        return asdict(found)

    async def _numbers(self) -> dict[str, float]:
        return take_numbers(self.workers)

    async def _validate(self, step: int) -> dict[str, Any]:
        with _naming_logs():
            return await validate(self.workers, step)

    async def _stop_drawing(self) -> None:
        if isinstance(self.workers.generator, TurnsGenerator):
            self.workers.generator.stop()

    async def _save_samples(self, folder: str) -> str | None:
        return await save_samples(self._plane, Path(folder))

    async def _load_samples(self, folder: str, digest: str, fields: list[str]) -> list[Any]:
        return pack_samples(await load_samples(self._plane, Path(folder), digest, fields))


@contextmanager
def _naming_logs() -> Iterator[None]:
    """A question that no replica could answer ends the run in one line."""
    try:
        yield
    except SampleFailed as error:
        raise UserError(f"{error}: see the replicas' logs") from error


class _FarStudent:
    """The student on rank 0, for the checks."""

    def __init__(self, channel: Channel, vocab_size: int) -> None:
        self._channel, self.vocab_size = channel, vocab_size

    async def logprobs(self, samples: Sequence[SampleMeta], *, temperature: float) -> list[Tensor]:
        """See ``StudentGroup.logprobs``."""
        rows = await self._channel.call("logprobs", pack_samples(samples), temperature)
        return [torch.tensor(row, dtype=torch.float32) for row in rows]


class _Forwarding(logging.Handler):
    """Sends what this process logs to rank 0, whose terminal it is."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self._records: asyncio.Queue[tuple[str, int, str]] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: socket.socket | None = None

    @contextmanager
    def told_at_once(self, end: socket.socket) -> Iterator[None]:
        """In the block, before there is a channel: what is logged while the inputs are read, which may take long."""
        self._end = end
        try:
            yield
        finally:
            self._end = None

    def emit(self, record: logging.LogRecord) -> None:
        """From any thread."""
        told = (record.name, record.levelno, self.format(record))
        if self._end is not None:
            _say(self._end, {"log": told})
        elif self._loop is None:
            self._records.put_nowait(told)
        else:
            self._loop.call_soon_threadsafe(self._records.put_nowait, told)

    async def forward(self, channel: Channel) -> None:
        """As long as it is not cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            await channel.tell("log", *await self._records.get())
