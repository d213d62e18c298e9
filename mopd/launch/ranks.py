"""The work of the trainer ranks: rank 0 receives a command from the orchestrator and passes it on to the others, and
all execute it in their main threads.

Commands are small JSON objects, over the link to rank 0 and over gloo from there. Tensors never travel with them:
student ranks fetch samples from the data plane, by id; weights go back over the link part by part, or to engines by a
group.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.base.types import MicroBatchPlan, SampleMeta, UserError
from mopd.config.schema import Recipe
from mopd.conversion.models.adapter_updates import sends_adapters
from mopd.launch.heartbeat import LeaderWatch
from mopd.launch.link import Frames, RankLink
from mopd.launch.rank_log import StallWatch
from mopd.student.sending import WeightSender, announced
from mopd.student.worker import StudentWorker


class CommandChannel:
    """JSON objects from rank 0 to every rank of ``group`` (gloo)."""

    def __init__(self, group: dist.ProcessGroup | None, leader: LeaderWatch | None = None) -> None:
        """``leader``: the other ranks' wait for rank 0; without it they wait for the group's timeout."""
        self._group, self._leader = group, leader
        self._alone = group is None or dist.get_world_size(group) == 1
        self.stopped: str | None = None
        """Line of a run that was asked to stop; set on rank 0 before the others are released."""
        self.watch: StallWatch | None = None
        """Is renewed by every command, and by signs of life between them."""

    def send(self, command: dict[str, Any]) -> None:
        """Send a command from rank 0 to the others."""
        self.note()
        if self._alone:
            return
        payload = torch.frombuffer(bytearray(json.dumps(command).encode()), dtype=torch.uint8)
        dist.broadcast(torch.tensor([payload.numel()]), src=0, group=self._group)
        dist.broadcast(payload, src=0, group=self._group)

    def receive(self) -> dict[str, Any]:
        """Wait for rank 0's next command; on every other rank."""
        size = torch.zeros(1, dtype=torch.int64)
        if self._leader is None or self._group is None:
            dist.broadcast(size, src=0, group=self._group)
        else:
            self._leader.on_sign = self.note
            self._leader.receive(size, self._group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self._group)
        command: dict[str, Any] = json.loads(payload.numpy().tobytes())
        self.note()
        return command

    def note(self) -> None:
        """Renew the watch of this rank's stalls."""
        if self.watch is not None:
            self.watch.alive()


class Rank:
    """One rank's share of every command; ``execute`` lists all commands."""

    def __init__(self, worker: StudentWorker, link: RankLink | None = None) -> None:
        """``link`` is that of rank 0, which answers."""
        self._worker, self._link = worker, link
        recipe = worker.recipe
        adapters = recipe.student.lora is not None and sends_adapters(recipe, worker.dims)
        self._sender = WeightSender(worker, longest_s=recipe.schedule.wait_timeout_s, adapters=adapters)

    def execute(self, name: str, kwargs: dict[str, Any]) -> tuple[Any, Frames]:
        """Run one command on this rank. Returns its value, as JSON, and frames beside it, for rank 0's answer."""
        worker = self._worker
        match name:
            case "forward_backward":
                plan = MicroBatchPlan.from_json(kwargs["plan"])
                sums = worker.forward_backward(plan, diagnostics=kwargs["diagnostics"])
                return {domain: asdict(one) for domain, one in sums.items()}, ()
            case "optim_step":
                return {"values": worker.optim_step() | worker.memory(), "weight_version": worker.weight_version}, ()
            case "logprobs":
                samples = [SampleMeta(**meta) for meta in kwargs["samples"]]
                return None, [_bytes(row) for row in worker.logprobs(samples, temperature=kwargs["temperature"])]
            case "weights":
                return self._sender.hand_on(**kwargs, give=self._give), ()
            case "save":
                worker.save(Path(kwargs["folder"]), kwargs["state"], is_async=kwargs["is_async"])
            case "is_saving":
                return worker.saving.is_busy, ()
            case "finish_save":
                worker.finish_save()
            case "load":
                return {"state": self._load(**kwargs), "weight_version": worker.weight_version}, ()
            case "lend":
                worker.lend()
            case "restore":
                worker.restore()
            case "save_hf":
                worker.save_hf(Path(kwargs["folder"]))
            case "share_memory":
                return self._sender.share_memory(**kwargs), ()
            case "join_weights":
                return self._sender.join(**kwargs), ()
            case "send_weights":
                return self._sender.send(**kwargs), ()
            case "leave_weights":
                self._sender.leave()
            case _:
                raise RuntimeError(f"unknown command {name!r}")
        return None, ()

    def _give(self, part: Tensor) -> None:
        """Send a part of the weights over the link."""
        assert self._link is not None, "the first rank alone hands weights on"
        self._link.send({"more": True}, [_bytes(part)])

    def _load(self, folder: str, cure: str) -> dict[str, Any]:
        try:
            return self._worker.load(Path(folder))
        except UserError as error:
            raise UserError(f"{error}{cure}") from error


def _bytes(row: Tensor) -> memoryview:
    return row.contiguous().numpy().view("uint8").data


def student_facts(recipe: Recipe, worker: StudentWorker) -> dict[str, Any]:
    """Return what the orchestrator needs to know of the student once it is built, as JSON."""
    return {"is_on_gpu": worker.layout.device.type == "cuda", "announced": announced(recipe, worker)}


def run_commands(worker: StudentWorker, channel: CommandChannel, link: RankLink) -> str | None:
    """Execute the orchestrator's commands, on rank 0, with the other ranks until the run ends. Returns the line of a
    run that was asked to stop.

    Raises as ``RankLink.next_command``.
    """
    rank = Rank(worker, link)
    link.on_sign = channel.note
    while True:
        command = link.next_command()
        if "end" in command:
            line: str | None = command["end"]
            return line
        channel.send(command)
        value, frames = rank.execute(command["call"], command["kwargs"])
        link.answer(value, frames)


def follow(worker: StudentWorker, channel: CommandChannel) -> bool:
    """Execute rank 0's commands until it says stop, on every other rank. Returns whether the run was asked to."""
    rank = Rank(worker)
    while (command := channel.receive())["call"] != "stop":
        rank.execute(command["call"], command["kwargs"])
    return bool(command["kwargs"]["is_asked"])
