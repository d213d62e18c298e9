"""Rank 0's side of the process beside it: starts it, asks it, ends it. What travels is ids, lengths and numbers."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from mopd.config.data import LocalPlaneConfig
from mopd.config.load import to_tree
from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import Manifest
from mopd.data_plane.frames import unpacked
from mopd.data_plane.interface import StorageEnded
from mopd.files.writing import writing
from mopd.placement.process import how_it_ended
from mopd.preflight.checks import AskedStudent
from mopd.producer.channel import Channel, PeerEnded
from mopd.producer.messages import read_samples
from mopd.producer.samples import FarWorkers
from mopd.run.folder import RunDir
from mopd.run.training import Findings
from mopd.tasks import Tasks
from mopd.types import CutOffError, SampleMeta, UserError
from mopd.wire.weights import StagedConstants, StagedWeights, stage_updates

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
        self.channel = Channel(NAME, {"logprobs": self._logprobs, "log": self._log, "weights_again": self._again})
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


class FarWeights:
    """The way of the student's weights to the rollout, through the process: it keeps them, sends them, and sends them
    again to a replica that comes back. Constants come to it once."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._given: StagedConstants | None = None
        self.again: Callable[[], Awaitable[None]] = _nobody

    loads_directly = False

    async def publish(
        self, weights: Iterable[tuple[str, Tensor]], weight_version: int, *, kept: Set[str] = frozenset()
    ) -> None:
        """``stage`` and ``send``. Servers refuse a stream that lacks ``kept``."""
        await self.send(self.stage(weights, weight_version))

    def stage(
        self, weights: Iterable[tuple[str, Tensor]], weight_version: int, constants: StagedConstants | None = None
    ) -> StagedWeights:
        """Read the stream to its end, into host memory. Blocks."""
        return stage_updates(weights, weight_version, constants=constants)

    async def send(self, staged: StagedWeights) -> None:
        """Returns when every replica that can answer has the weights."""
        constants = staged.constants
        if constants is not self._given:
            if constants is None:
                await self._channel.call("constants", None)
            else:
                names = {"constants_id": constants.constants_id, "digest": constants.digest}
                await self._channel.call("constants", names, frames=constants.bodies)
            self._given = constants
        head = {
            "weight_version": staged.weight_version,
            "update_id": staged.update_id,
            "num_tensors": staged.num_tensors,
            "digest": staged.digest,
        }
        await self._channel.call("weights", head, frames=staged.bodies)

    async def ask_for(self, weight_version: int) -> None:
        """See ``GroupWeightSync.ask_for``."""
        await self._channel.call("ask_for_weights", weight_version)

    def send_again_by(self, again: Callable[[], Awaitable[None]]) -> None:
        """See ``GroupWeightSync.send_again_by``; the process asks for it."""
        self.again = again


async def _nobody() -> None:
    """Before there is a student, nothing can be sent again."""


class FarTargets:
    """``TransferTargets`` of the process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def lacking(self, weight_version: int | None) -> list[str]:
        """See ``TransferTargets.lacking``, as for the others."""
        return list(await self._call("lacking", weight_version))

    async def join(self, names: Sequence[str], order: Mapping[str, Any], tensors: bytes) -> dict[str, str]:
        """See ``TransferTargets.join``."""
        return dict(await self._call("join", list(names), dict(order), tensors))

    async def start(self, names: Sequence[str], order: Mapping[str, Any]) -> dict[str, str]:
        """See ``TransferTargets.start``."""
        return dict(await self._call("start", list(names), dict(order)))

    async def finish(self, names: Sequence[str], order: Mapping[str, Any]) -> tuple[dict[str, str], float]:
        """See ``TransferTargets.finish``."""
        failures, load_s = await self._call("finish", list(names), dict(order))
        return failures, load_s

    async def published(self, weight_version: int | None) -> None:
        """See ``TransferTargets.published``."""
        await self._call("published", weight_version)

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._channel.call("transfer", name, list(arguments))
