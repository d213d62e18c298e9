"""``recorded``, whose orchestrator and rank 0 do harm at a chosen moment of a weight update (``python -m
tests.integration.struck``): the one as it orders the update, the other as it sends.

What it is to do stands in ``fault.json`` in the journal's folder; when it is done, ``done_<id>`` is there. Beside the
journal it leaves what a third party needs to see which weights drew a sample: ``drawn``, the samples of each step with
their log-probs and versions, by the process that was rank 0, and ``versions``, the weights that left each of its ranks.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import TCPStore

from mopd.launch import leading
from mopd.orchestrator.__main__ import run
from mopd.orchestrator.weights.targets import TransferTargets
from mopd.orchestrator.weights.transfer import GroupTransfer
from mopd.student.sending import WeightSender
from mopd.student.worker import StudentWorker
from mopd.weights.carrying import TravellingParts
from mopd.weights.group import GroupOrder
from tests.integration.recorded import JOURNAL, run_recorded

PHASES = ("join", "start", "bucket", "flight", "finish", "after")
"""``bucket``: before a part leaves, all before the last having arrived; ``flight``: just after it has begun to."""
FAULT, HANDED_ON, GO = "fault.json", "handed_on.json", "go"
MODULE = "tests.integration.struck"
LONGEST_WAIT_S = 40.0


@dataclass(frozen=True, kw_only=True)
class Act:
    """What befalls one process."""

    does: str
    """``KILL``, ``STOP``, ``TERM``; ``flip`` a bit of the part; ``wait`` for the file ``GO``; ``forge`` an
    entry of the store; ``wall``, a firewall that lets no new connection come to this process's network."""
    role: str = ""
    pid: int = 0
    """0: rank 0 itself."""
    resume_after_s: float | None = None
    """After ``STOP``, or until a ``wall`` falls."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One moment."""

    number: int
    phase: str
    bucket: int = 0
    """Of this many parts before."""
    after_s: float = 0.0
    """Beside what the phase does, rather than before it."""
    acts: list[Act] = field(default_factory=list)

    def write(self, journal: Path) -> None:
        """For the run whose ``journal`` this is."""
        (journal / GO).unlink(missing_ok=True)
        path = journal / "fault.new"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        path.rename(journal / FAULT)


class _Striker:
    """Of this process: the orchestrator, or rank 0, to which faults while tensors travel are handed on."""

    def __init__(self, journal: Path, rank_0: int) -> None:
        self.journal, self._rank_0 = journal, rank_0
        self._armed: Fault | None = None
        self.order: GroupOrder | None = None
        """Of the group that replicas are about to join."""
        self._num_parts = 0
        self.kept: Tensor | None = None
        """Memory that a part leaves from."""

    def arm(self) -> bool:
        """At an update's beginning; whether it is to make its group anew."""
        try:
            tree = json.loads((self.journal / FAULT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return False
        (self.journal / FAULT).unlink()
        fault = Fault(**{**tree, "acts": [Act(**act) for act in tree["acts"]]})
        if fault.phase in ("bucket", "flight"):
            (self.journal / "handed_on.new").write_text(json.dumps(tree), encoding="utf-8")
            (self.journal / "handed_on.new").rename(self.journal / HANDED_ON)
        else:
            self._armed = fault
        return fault.phase == "join"

    def take_over(self) -> None:
        """On rank 0, as it begins to send."""
        self._num_parts = 0
        path = self.journal / HANDED_ON
        if path.exists():
            tree = json.loads(path.read_text(encoding="utf-8"))
            self._armed = Fault(**{**tree, "acts": [Act(**act) for act in tree["acts"]]})
            path.unlink()

    def reach(self, phase: str) -> Fault | None:
        """The moment is there, of the fault that is given back."""
        fault = self._armed
        if fault is None or fault.phase != phase:
            return None
        if phase in ("bucket", "flight") and self._num_parts < fault.bucket:
            return None
        self._armed = None
        if fault.after_s:
            threading.Timer(fault.after_s, self._strike, [fault]).start()
        else:
            self._strike(fault)
        return fault

    def sent(self) -> None:
        self._num_parts += 1

    def _strike(self, fault: Fault) -> None:
        path = self.journal / f"done_{fault.number}"
        path.write_text(json.dumps({"at": time.time()}), encoding="utf-8")
        for act in fault.acts:  # those of others first: rank 0 may not survive its own
            if act.does == "wait":
                deadline = time.monotonic() + LONGEST_WAIT_S
                while not (self.journal / GO).exists() and time.monotonic() < deadline:
                    time.sleep(0.02)
            elif act.does == "forge":
                assert self.order is not None
                stranger = TCPStore(self.order.host, self.order.port, is_master=False)
                stranger.set(f"{self.order.group_id}/verdict", "go")
            elif act.does == "wall":
                rule = "INPUT -p tcp ! -i lo --syn -j DROP"
                subprocess.run(f"iptables -A {rule}".split(), check=True)
                subprocess.Popen(["sh", "-c", f"sleep {act.resume_after_s}; iptables -D {rule}"])
            elif act.does != "flip":
                _signal(act, act.pid or self._rank_0)


def _signal(act: Act, pid: int) -> None:
    if act.resume_after_s is not None:  # by somebody else: it may be ourselves who stops
        subprocess.Popen(["sh", "-c", f"sleep {act.resume_after_s}; kill -CONT {pid}"])
    os.kill(pid, getattr(signal, f"SIG{act.does}"))


def strike_and_keep() -> None:
    """Into this process, a rank."""
    journal, rank = Path(os.environ[JOURNAL]), int(os.environ["RANK"])
    (journal / f"rank_{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")
    _keep_weights(journal, rank)
    if rank == 0:
        leading.MODULE = MODULE
        _keep_samples(journal)
        _strike_sending(_Striker(journal, os.getpid()))


def _strike_orders(striker: _Striker) -> None:
    publish = GroupTransfer.publish

    async def watched_publish(self: GroupTransfer, *args: Any, **options: Any) -> None:
        if striker.arm():
            await self.close()
        await publish(self, *args, **options)
        await asyncio.to_thread(striker.reach, "after")

    def watch(phase: str) -> None:
        call = getattr(TransferTargets, phase)

        async def watched(self: TransferTargets, *args: Any, **options: Any) -> Any:
            if phase == "join":
                striker.order = args[1]
            await asyncio.to_thread(striker.reach, phase)
            return await call(self, *args, **options)

        setattr(TransferTargets, phase, watched)

    for phase in ("join", "start", "finish"):
        watch(phase)
    GroupTransfer.publish = watched_publish  # type: ignore[method-assign]


def _strike_sending(striker: _Striker) -> None:
    send, carry = WeightSender.send, TravellingParts.carry

    def watched_send(self: WeightSender, *args: Any, **options: Any) -> Any:
        striker.take_over()
        return send(self, *args, **options)

    def watched_carry(self: TravellingParts, number: int, buffer: Tensor, sender: int) -> Any:
        fault = striker.reach("bucket")
        if fault is not None and any(act.does == "flip" for act in fault.acts):
            buffer = buffer.clone()  # it changes on its way, not in the student
            buffer.view(-1)[buffer.nbytes // 3] ^= 4
            striker.kept = buffer
        pending = carry(self, number, buffer, sender)
        striker.reach("flight")
        striker.sent()
        return pending

    WeightSender.send = watched_send  # type: ignore[method-assign]
    TravellingParts.carry = watched_carry  # type: ignore[method-assign]


def _keep_weights(journal: Path, rank: int) -> None:
    """Each sender has a part; of a student with adapters the first rank has all."""
    make, leader = StudentWorker.__init__, torch.tensor([os.getpid()])

    def made(self: StudentWorker, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        torch.distributed.broadcast(leader, group_src=0, group=self.layout.control_group)

    def keeping(gather: Any) -> Any:
        def kept(self: StudentWorker, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor | None]]:
            version, tensors = self.weight_version, {}
            for name, tensor in gather(self, *args, **options):
                if tensor is not None:
                    tensors[name] = tensor.clone()
                yield name, tensor
            if tensors:  # else this rank sends nothing, or what no step changes
                _write(journal / "versions" / f"{int(leader)}_{version:06d}.{rank}.safetensors", tensors)

        return kept

    StudentWorker.__init__ = made  # type: ignore[method-assign]
    StudentWorker.sender_weights = keeping(StudentWorker.sender_weights)  # type: ignore[method-assign]
    StudentWorker.adapter_weights = keeping(StudentWorker.adapter_weights)  # type: ignore[method-assign]


def _keep_samples(journal: Path) -> None:
    step = StudentWorker.optim_step
    names = ("tokens", "rollout_logprobs", "token_versions")

    def kept(self: StudentWorker) -> dict[str, float]:
        plan = self._plan
        values = step(self)
        assert plan is not None
        ids = [sample.sample_id for micro in plan.micro_batches[self.layout.dp_rank] for sample in micro]
        fields = self.reader._reader.fetch(ids, names)
        flat = {f"{name}.{i}": tensor.clone() for name in names for i, tensor in enumerate(fields[name])}
        _write(journal / "drawn" / f"{os.getpid()}_{self.weight_version:06d}.safetensors", flat)
        return values

    StudentWorker.optim_step = kept  # type: ignore[method-assign]


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def be_orchestrator(descriptor: int) -> int:
    """Be the orchestrator, whose parent is rank 0; the exit code."""
    _strike_orders(_Striker(Path(os.environ[JOURNAL]), os.getppid()))
    return run(descriptor)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        sys.exit(be_orchestrator(int(sys.argv[1])))
    sys.exit(run_recorded(MODULE, strike_and_keep))
