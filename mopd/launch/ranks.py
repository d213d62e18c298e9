"""Rank 0 speaks, the other trainer ranks follow: small JSON commands over gloo, the same method on every rank.

Tensors never travel here: student ranks fetch them from the data plane, by id.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.launch.heartbeat import LeaderWatch
from mopd.launch.rank_log import StallWatch
from mopd.launch.stages import StageSender
from mopd.launch.transfer import Transfer
from mopd.placement.sharing.turns import GpuTurns
from mopd.student.worker import StudentWorker, WeightPart
from mopd.types import DomainSums, MicroBatchPlan, SampleMeta, UserError
from mopd.wire.weights import StagedConstants, StagedWeights, stage_constants

T = TypeVar("T")

MAX_COMMAND_BYTES = 64 * 2**20


class CommandChannel:
    """JSON objects from rank 0 to every rank of ``group`` (gloo)."""

    def __init__(self, group: dist.ProcessGroup | None, leader: LeaderWatch | None = None) -> None:
        """``leader``: how the other ranks wait for rank 0; without it for the group's timeout."""
        self._group, self._leader = group, leader
        self._alone = group is None or dist.get_world_size(group) == 1
        self.stopped: str | None = None
        """On rank 0, before the others are released: the line of a run that was asked to stop."""
        self.watch: StallWatch | None = None
        """Hears of every command, and of signs of life between them."""

    def send(self, command: dict[str, Any]) -> None:
        """Rank 0 only."""
        self._note()
        if self._alone:
            return
        payload = torch.frombuffer(bytearray(json.dumps(command).encode()), dtype=torch.uint8)
        dist.broadcast(torch.tensor([payload.numel()]), src=0, group=self._group)
        dist.broadcast(payload, src=0, group=self._group)

    def receive(self) -> dict[str, Any]:
        """Every other rank; waits for rank 0."""
        size = torch.zeros(1, dtype=torch.int64)
        if self._leader is None or self._group is None:
            dist.broadcast(size, src=0, group=self._group)
        else:
            self._leader.on_sign = self._note
            self._leader.receive(size, self._group)
        num_bytes = int(size)
        if not 0 < num_bytes <= MAX_COMMAND_BYTES:
            raise RuntimeError(f"a command of {num_bytes} bytes arrived; the limit is {MAX_COMMAND_BYTES}")
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self._group)
        command: dict[str, Any] = json.loads(payload.numpy().tobytes())
        self._note()
        return command

    def _note(self) -> None:
        if self.watch is not None:
            self.watch.alive()


class Weights(Protocol):
    """The way of the student's weights to the rollout, which see: ``mopd.placement.weights.GroupWeightSync``."""

    @property
    def loads_directly(self) -> bool:
        """The engines are in this process: only ``publish`` is used."""
        ...

    async def publish(self, weights: Iterable[tuple[str, Tensor]], weight_version: int, *, kept: Set[str]) -> None: ...
    def stage(
        self, weights: Iterable[tuple[str, Tensor]], weight_version: int, constants: StagedConstants | None
    ) -> StagedWeights: ...
    async def send(self, staged: StagedWeights) -> None: ...
    async def ask_for(self, weight_version: int) -> None: ...
    def send_again_by(self, again: Callable[[], Awaitable[None]]) -> None: ...


class StudentTurns(Protocol):
    """The student's way to GPUs that it shares with the rollout, which see: ``mopd.placement.sharing.turns``."""

    async def begin(self) -> None:
        """Wait for the student's turn."""
        ...

    async def end(self) -> None: ...
    async def expect(self) -> None: ...


class StudentGroup:
    """The student on all its ranks, as rank 0 sees it.

    One command at a time: each is collective. They run in a thread of their own, so that the event loop, and whoever
    works on it, goes on meanwhile.
    """

    def __init__(
        self,
        worker: StudentWorker,
        channel: CommandChannel,
        weights: Weights,
        transfer: Transfer | None = None,
        turns: StudentTurns | None = None,
    ) -> None:
        """``transfer``: the way of the weights in the place of ``stage`` and ``send``, where there is one. ``turns``:
        where it shares GPUs."""
        self.worker = worker
        self.dp_size = worker.dp_size
        self.packing = worker.packing
        self._channel = channel
        self._weights = weights
        self._transfer, self._turns = transfer, turns
        if transfer is not None:
            weights.send_again_by(self.send_again)
            transfer.join_stages = self._join_weights
        self._staged: StagedWeights | None = None
        self._waited_for: int | None = None
        """Version that replicas will be given when they wake."""
        self._constants: StagedConstants | None = None
        """For servers: staged once, part of all that is."""
        self._has_given_constants = False
        """To engines of this process."""
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="student", initializer=_use_device, initargs=(worker,))

    async def _call(self, name: str, **kwargs: Any) -> Any:
        async with self._turn:
            return await self._in_thread(lambda: self._command(name, kwargs))

    def _command(self, name: str, kwargs: dict[str, Any]) -> Any:
        self._channel.send({"call": name, "kwargs": kwargs})
        return execute(self.worker, name, kwargs)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """One after another, also when a caller has gone away."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def forward_backward(self, plan: MicroBatchPlan, *, diagnostics: bool) -> dict[str, DomainSums]:
        """Loss and gradients of one step; sums per domain over all ranks. The student's turn lasts until
        ``optim_step``."""
        if self._turns is not None:
            await self._turns.begin()
        sums: dict[str, DomainSums] = await self._call("forward_backward", plan=plan.to_json(), diagnostics=diagnostics)
        return sums

    async def optim_step(self) -> dict[str, float]:
        """Clip, check, step. Returns ``grad_norm``, ``lr``, this rank's peak memory, and what the last update of the
        rollout's weights took where they go by a collective."""
        values: dict[str, float] = await self._call("optim_step")
        if self._turns is not None:
            await self._turns.end()
        numbers = {} if self._transfer is None else self._transfer.take_numbers()
        return values | self.worker.memory() | numbers

    async def logprobs(self, samples: Sequence[SampleMeta], *, temperature: float) -> list[Tensor]:
        """[R] fp32 student log-probs of each sample's response tokens."""
        metas = [asdict(sample) for sample in samples]
        async with self._own_turn():
            rows: list[Tensor] = await self._call("logprobs", samples=metas, temperature=temperature)
        return rows

    async def expect_step(self) -> None:
        """All of a step's responses are drawn: its GPUs may come back while they are scored."""
        if self._turns is not None:
            await self._turns.expect()

    async def lend(self) -> None:
        """See ``StudentWorker.lend``."""
        await self._call("lend")

    async def restore(self) -> None:
        """See ``StudentWorker.restore``."""
        await self._call("restore")

    @asynccontextmanager
    async def _own_turn(self) -> AsyncIterator[None]:
        if self._turns is None:
            yield
            return
        await self._turns.begin()
        try:
            yield
        finally:
            await self._turns.end()

    @property
    def vocab_size(self) -> int:
        """Of the model, without padding."""
        return self.worker.dims.vocab_size

    async def publish(self, weight_version: int) -> None:
        """``stage`` and ``send``."""
        await self.stage(weight_version)
        await self.send()

    async def stage(self, weight_version: int) -> None:
        """Hand the weights over: to engines of this process itself, for others into host memory, or all the way by a
        collective; those on shared GPUs are given them when they wake. The student is free then."""
        async with self._turn:
            if self._transfer is not None and self._turns is not None:
                self._waited_for = weight_version
            elif self._transfer is not None:
                await self._transfer.publish(
                    weight_version, self._share_all, self._in_thread, read_trained=self._share_trained
                )
            elif self._weights.loads_directly:
                kept = self.worker.constants if self._has_given_constants else frozenset()
                weights = self._read("trained" if kept else "all")
                await self._weights.publish(weights, weight_version, kept=kept)
                self._has_given_constants, self._staged = True, None
            else:
                self._staged = await self._in_thread(lambda: self._stage(weight_version))

    async def send_again(self) -> None:
        """The weights of the moment by the collective, to replicas without those that are asked for."""
        assert self._transfer is not None
        async with self._turn:
            version = self.worker.weight_version
            await self._transfer.publish(version, self._share_all, self._in_thread, only_missing=True)

    def _share_all(self) -> Iterator[tuple[str, Tensor]]:
        """What rank 0 sends: first what no step changes, then all else, or that of its own stage alone, and the other
        stages send theirs."""
        if self.worker.constants:
            yield from self._read("constants", in_place=True)
        yield from self._share_trained()

    def _share_trained(self) -> Iterator[tuple[str, Tensor]]:
        assert self._transfer is not None
        if not self._transfer.shares:
            yield from self._read("trained", in_place=True)
            return
        self._channel.send({"call": "send_weights", "kwargs": self._transfer.current})
        yield from self.worker.weights("trained", in_place=True, by_stage=True)

    def _join_weights(self, kwargs: dict[str, Any]) -> None:
        self._channel.send({"call": "join_weights", "kwargs": kwargs})

    def _stage(self, weight_version: int) -> StagedWeights:
        if self._constants is None and self.worker.constants:
            self._constants = stage_constants(self._read("constants"))
        return self._weights.stage(self._read("trained"), weight_version, self._constants)

    def _read(self, part: WeightPart, *, in_place: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The others are told with the first tensor: in a collective they would wait for whoever is to read."""
        self._channel.send({"call": "weights", "kwargs": {"part": part}})
        yield from self.worker.weights(part, in_place=in_place)

    async def send(self) -> None:
        """Returns when every rollout replica that can has the staged weights. The student may work meanwhile."""
        staged, self._staged = self._staged, None
        version, self._waited_for = self._waited_for, None
        if staged is not None:
            await self._weights.send(staged)
        if version is not None:
            await self._weights.ask_for(version)

    async def save(self, folder: Path, state: Mapping[str, Any], *, is_async: bool) -> None:
        """Write model, optimizer, schedule and RNG of all ranks into ``folder``, with the JSON-able ``state``; when
        ``is_async``, return once all is copied, and write beside what comes next."""
        async with self._own_turn():
            await self._call("save", folder=str(folder), state=dict(state), is_async=is_async)

    @property
    def is_saving(self) -> bool:
        """``finish_save`` would wait."""
        return self.worker.saving.is_busy

    async def finish_save(self) -> None:
        """Returns when what an asynchronous ``save`` writes is whole; raises what went wrong, on every rank."""
        await self._call("finish_save")

    async def load(self, folder: Path, *, cure: str = "") -> dict[str, Any]:
        """Read what ``save`` wrote, at this run's layout; returns its ``state``. ``cure`` ends the line of an error, on
        every rank."""
        async with self._own_turn():
            state: dict[str, Any] = await self._call("load", folder=str(folder), cure=cure)
        self._constants, self._has_given_constants = None, False
        if self._transfer is not None:
            self._transfer.send_constants()
        return state

    async def save_hf(self, folder: Path) -> None:
        """Write the student as a Hugging Face folder."""
        await self._call("save_hf", folder=str(folder))

    async def close(self) -> None:
        """Returns when the ranks are through with what they were told; nothing more can be asked of them."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
        if self._transfer is not None:
            await self._transfer.close()


class StudentHere:
    """Implements ``MemoryHolder`` and ``StudentTurns`` for a student in this process, also before there is a
    ``StudentGroup`` that speaks to it."""

    def __init__(self, worker: StudentWorker, channel: CommandChannel) -> None:
        self._worker, self._channel = worker, channel
        self.group: StudentGroup | None = None
        self.turns: GpuTurns | None = None

    async def give_back(self) -> None:
        """See ``MemoryHolder.give_back``."""
        if self.group is not None:
            await self.group.lend()
        else:
            await asyncio.to_thread(self._lend)

    async def take(self) -> None:
        """See ``MemoryHolder.take``. Before there is a group, nobody asks for it."""
        assert self.group is not None
        await self.group.restore()

    async def begin(self) -> None:
        """See ``StudentTurns.begin``."""
        assert self.turns is not None
        await self.turns.begin("student")

    async def end(self) -> None:
        """See ``GpuTurns.end``."""
        assert self.turns is not None
        self.turns.end()

    async def expect(self) -> None:
        """See ``GpuTurns.expect``."""
        assert self.turns is not None
        self.turns.expect("student")

    def _lend(self) -> None:
        _use_device(self._worker)
        self._channel.send({"call": "lend", "kwargs": {}})
        execute(self._worker, "lend", {})


def _use_device(worker: StudentWorker) -> None:
    """CUDA's current device belongs to a thread."""
    if worker.layout.device.type == "cuda":
        torch.cuda.set_device(worker.layout.device)


def execute(worker: StudentWorker, name: str, kwargs: dict[str, Any]) -> Any:
    """Run one command on this rank; the names are all there is."""
    if name == "forward_backward":
        return worker.forward_backward(MicroBatchPlan.from_json(kwargs["plan"]), diagnostics=kwargs["diagnostics"])
    if name == "optim_step":
        return worker.optim_step()
    if name == "logprobs":
        samples = [SampleMeta(**meta) for meta in kwargs["samples"]]
        return worker.logprobs(samples, temperature=kwargs["temperature"])
    if name == "weights":
        return sum(1 for _ in worker.weights(kwargs["part"]))
    if name == "save":
        return worker.save(Path(kwargs["folder"]), kwargs["state"], is_async=kwargs["is_async"])
    if name == "finish_save":
        return worker.saving.finish()
    if name == "load":
        try:
            return worker.load(Path(kwargs["folder"]))
        except UserError as error:
            raise UserError(f"{error}{kwargs['cure']}") from error
    if name == "lend":
        return worker.lend()
    if name == "restore":
        return worker.restore()
    if name == "save_hf":
        return worker.save_hf(Path(kwargs["folder"]))
    raise RuntimeError(f"unknown command {name!r} from rank 0")


def serve(worker: StudentWorker, channel: CommandChannel) -> bool:
    """Follow rank 0 until it says stop; whether that is because the run was asked to."""
    sender = StageSender(worker, longest_s=worker.recipe.schedule.wait_timeout_s)
    while (command := channel.receive())["call"] != "stop":
        if command["call"] == "join_weights":
            sender.join(**command["kwargs"])
        elif command["call"] == "send_weights":
            sender.send(**command["kwargs"])
        else:
            execute(worker, command["call"], command["kwargs"])
    return bool(command["kwargs"]["is_asked"])
