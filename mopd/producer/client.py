"""Rank 0's side of the process beside it: starts it, asks it, ends it. What travels is ids, lengths and numbers."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mopd.config.data import LocalPlaneConfig
from mopd.config.load import to_tree
from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import Manifest
from mopd.data_plane.frames import unpacked
from mopd.data_plane.interface import StorageEnded
from mopd.files.writing import writing
from mopd.launch.heartbeat import LOOP_S
from mopd.placement.process import how_it_ended
from mopd.preflight.checks import AskedStudent
from mopd.producer.channel import Channel, Handler, PeerEnded
from mopd.producer.messages import read_samples
from mopd.producer.samples import FarWorkers
from mopd.producer.weights import FarWeights
from mopd.run.folder import RunDir
from mopd.run.training import Findings
from mopd.tasks import Tasks
from mopd.types import CutOffError, SampleMeta, UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

NAME = "the producer process"
END_S = 60.0
"""For the process to end its engine servers in order."""
DYING_S = 2.0
"""For its end to be seen once the samples that it held are gone."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What the process says once it has read its inputs."""

    rows: dict[str, list[int]]
    """Row numbers of each domain of the training prompts."""
    plane: dict[str, Any]
    """Address of the data plane."""


class ProducerProcess:
    """The process. A context manager: it ends with the block, in order if it can."""

    def __init__(self, recipe: Recipe, run: RunDir) -> None:
        self._recipe, self._run = recipe, run
        self._log = run.logs_here / "producer.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ProducerProcess:
        self._socket, theirs = socket.socketpair()
        with writing(self._log):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            log = self._log.open("ab")
        with theirs, log, tempfile.TemporaryFile("w+") as recipe:  # which has no name that a kill could leave
            json.dump(to_tree(self._recipe), recipe)
            recipe.seek(0)
            command = [sys.executable, "-m", "mopd.producer", str(self._run.logs_here), str(theirs.fileno())]
            # In this rank's process group: whoever clears up after the rank clears it up too.
            self._process = subprocess.Popen(command, stdin=recipe, stdout=log, stderr=log, pass_fds=(theirs.fileno(),))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        holds_samples = isinstance(self._recipe.data_plane, LocalPlaneConfig)
        is_cause = holds_samples and isinstance(error, StorageEnded) and self._ends_within(DYING_S)
        self._socket.close()  # its sign to end
        if not self._ends_within(END_S):
            logger.warning("%s did not end within %g s and was killed (log: %s)", NAME, END_S, self._log)
            self._process.kill()
            self._process.wait()
            return
        if is_cause or (kind is None and self._process.returncode):
            raise CutOffError(self.how_it_ended()) from error

    def _ends_within(self, seconds: float) -> bool:
        assert self._process is not None
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    def hello(self) -> Hello:
        """Wait until it has read the data. ``UserError`` for what is wrong with its inputs."""
        self._socket.settimeout(self._recipe.schedule.wait_timeout_s)
        try:
            said = self._said()
            while "log" in said:  # the wait is for the next sign of it
                name, level, message = said["log"]
                logging.getLogger(name).log(level, "%s", message)
                said = self._said()
        except TimeoutError as error:
            limit = self._recipe.schedule.wait_timeout_s
            raise UserError(
                f"{NAME} did not read its inputs and open the data plane within {limit:g} s (schedule.wait_timeout_s)"
            ) from error
        except (EOFError, ConnectionError) as error:
            raise CutOffError(self.how_it_ended()) from error
        if "error" in said:
            raise UserError(said["error"])
        self._socket.setblocking(False)
        return Hello(**said)

    @asynccontextmanager
    async def client(self, recipe: Recipe) -> AsyncIterator[ProducerClient]:
        """The way to it, on this event loop."""
        client = ProducerClient(recipe, self)
        async with client.tasks:
            client.tasks.start(client.channel.run(self._socket))
            yield client

    def how_it_ended(self) -> str:
        """One line, for when it is gone."""
        assert self._process is not None
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"{NAME} (rollout, teachers, data) closed its connection and still runs (log: {self._log})"
        ended = how_it_ended(128 - code if code < 0 else code)
        return f"{NAME} (rollout, teachers, data) {ended} (log: {self._log})"

    def _said(self) -> dict[str, Any]:
        size = int.from_bytes(self._receive(8), "little")
        said: dict[str, Any] = unpacked(self._receive(size))
        return said

    def _receive(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(min(size - len(parts), 2**20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


class ProducerClient:
    """Implements ``Maker``."""

    unit = 1

    def __init__(self, recipe: Recipe, process: ProducerProcess) -> None:
        self._recipe, self._process = recipe, process
        self.tasks = Tasks()
        handlers: dict[str, Handler] = {"logprobs": self._logprobs, "log": self._log, "weights_again": self._again}
        self.channel = Channel(NAME, handlers, silent_s=max(recipe.schedule.wait_timeout_s, LOOP_S))
        self.weights = FarWeights(self.channel)
        self.student: AskedStudent | None = None
        """Who answers the checks' questions."""
        self.rollout = self.teachers = self.plane = FarWorkers(self.channel)
        self.rewards = self.rollout if recipe.needs_task_advantage else None

    async def unless_ended(self, work: Awaitable[T]) -> T:
        """``work``, or one line once the process is gone."""
        try:
            return await self.tasks.unless_failed(work)
        except PeerEnded as error:
            raise CutOffError(self._process.how_it_ended()) from error

    async def start(self) -> None:
        """Returns when every engine server answers. ``UserError`` for one that cannot be started."""
        await self.channel.call("start")

    async def check(
        self, manifests: Mapping[str, Manifest], *, is_fresh: bool, fingerprints: Mapping[str, Any]
    ) -> Findings:
        """See ``Maker.check``."""
        plain = {key: asdict(manifest) for key, manifest in manifests.items()}
        return Findings(**await self.channel.call("check", plain, is_fresh, dict(fingerprints)))

    async def numbers(self) -> dict[str, float]:
        """See ``Maker.numbers``."""
        values: dict[str, float] = await self.channel.call("numbers")
        return values

    async def save_samples(self, folder: Path) -> str | None:
        """See ``Maker.save_samples``."""
        digest: str | None = await self.channel.call("save_samples", str(folder))
        return digest

    async def load_samples(self, folder: Path, digest: str, fields: Sequence[str]) -> list[SampleMeta]:
        """See ``Maker.load_samples``."""
        return read_samples(await self.channel.call("load_samples", str(folder), digest, list(fields)))

    async def validate(self, step: int) -> dict[str, Any]:
        """See ``Maker.validate``."""
        record: dict[str, Any] = await self.channel.call("validate", step)
        return record

    async def stop_drawing(self) -> None:
        """See ``Maker.stop_drawing``."""
        await self.channel.call("stop_drawing")

    async def _logprobs(self, samples: list[Any], temperature: float) -> list[list[float]]:
        assert self.student is not None
        rows = await self.student.logprobs(read_samples(samples), temperature=temperature)
        return [row.tolist() for row in rows]

    async def _again(self) -> None:
        await self.weights.again()

    async def _log(self, name: str, level: int, message: str) -> None:
        logging.getLogger(name).log(level, "%s", message)
