"""Bytes into each of 8 trainer ranks, TP2 x PP2 x DP2, beside what each needs: real processes, real readers.

The ranks are forked from a server that has imported everything and done nothing else (a process group or threads of
this process would come along), and read a step as a student worker does. What arrives is counted where it arrives:
frames of the data plane's socket, tensors of a neighbour or of a broadcast.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from mopd.bench.data_plane.steps import StepData
from mopd.config.student import ParallelConfig
from mopd.data.packing import PackingRules, pack
from mopd.data_plane.frames import packed, unpacked
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.reading import open_reader
from mopd.files.temporary import TemporaryFolder
from mopd.student import parallel
from mopd.student.reading import StageReader
from mopd.types import LOSS_FIELDS, SampleMeta, UserError

LAYOUT = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2)
NUM_RANKS = 8
RULES = PackingRules(is_packed=True, max_tokens=32_768, micro_batch_size=None, square_cost=0.0)
TIMEOUT_S = 300.0
GOAL = 1.05
"""Bytes into a rank / bytes that it needs."""


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """One rank of one way to read a step."""

    rank: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    received: int
    needed: int
    """Bytes of its own samples' tensors, those that its stage reads."""
    seconds: float

    @property
    def ratio(self) -> float | None:
        """None where nothing is needed."""
        return self.received / self.needed if self.needed else None


def measure_ranks(make: Callable[[], StepData]) -> dict[str, list[RankBytes]]:
    """By way: ``local``, and ``broadcast``, which sends every field of every sample to every rank. ``make`` gives the
    same step in every process, and can be pickled.

    Raises:
        UserError: a rank ended, or said nothing in time.
    """
    step = make()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with TemporaryFolder("mopd-bench-") as folder:
        ends: list[Connection] = []
        processes = []
        for rank in range(NUM_RANKS):
            end, other = context.Pipe()
            process = context.Process(target=_rank, args=(rank, folder, make, other), daemon=True)
            process.start()
            other.close()
            ends.append(end)
            processes.append(process)
        plane = LocalDataPlane()
        try:
            plane.serve(host=None)
            asyncio.run(plane.put(step.metas, step.fields))
            for end in ends:
                end.send_bytes(packed(plane.address))
            return _collect(ends)
        finally:
            asyncio.run(plane.close())
            for process in processes:
                process.terminate()
                process.join()


def _collect(ends: list[Connection]) -> dict[str, list[RankBytes]]:
    found: dict[str, list[RankBytes]] = {}
    deadline = time.monotonic() + TIMEOUT_S
    for rank, end in enumerate(ends):
        if not end.poll(max(0.0, deadline - time.monotonic())):
            raise UserError(f"bench data_plane: rank {rank} said nothing within {TIMEOUT_S:g} s")
        try:
            said = end.recv_bytes()
        except (EOFError, ConnectionResetError) as error:
            raise UserError(f"bench data_plane: rank {rank} ended before it had read its samples") from error
        for way, row in unpacked(said).items():
            found.setdefault(way, []).append(RankBytes(**row))
    return found


def _rank(rank: int, folder: str, make: Callable[[], StepData], end: Connection) -> None:
    """A rank's whole life."""
    torch.set_num_threads(1)
    step = make()
    store = dist.FileStore(str(Path(folder) / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    layout = parallel.initialize(LAYOUT, timeout_s=TIMEOUT_S, seed=0)
    plan = pack(step.metas, RULES, dp_size=layout.dp_size)
    own = _Own(step, layout, plan.micro_batches[layout.dp_rank])
    reader = open_reader(unpacked(end.recv_bytes()), timeout_s=TIMEOUT_S)
    stage = StageReader(reader, layout)
    ways = {
        "local": own.measure(lambda: _read(own, stage)),
        "broadcast": own.measure(lambda: _broadcast(step, layout)),
    }
    reader.close()
    end.send_bytes(packed({way: asdict(found) for way, found in ways.items()}))
    end.poll(TIMEOUT_S)  # groups that end at different times would abort one another


class _Own:
    """One rank's share of the step."""

    def __init__(self, step: StepData, layout: parallel.Layout, share: Sequence[Sequence[SampleMeta]]) -> None:
        self.step, self.layout, self.share = step, layout, share

    def measure(self, work: Callable[[], int]) -> RankBytes:
        """``work`` returns the bytes that came."""
        dist.barrier(group=self.layout.control_group)
        started = time.perf_counter()
        received = work()
        seconds = time.perf_counter() - started
        layout = self.layout
        return RankBytes(
            rank=layout.rank,
            tp_rank=layout.tp_rank,
            pp_rank=layout.pp_rank,
            dp_rank=layout.dp_rank,
            received=received,
            needed=self._needed(),
            seconds=seconds,
        )

    def _needed(self) -> int:
        names: Sequence[str] = LOSS_FIELDS if self.layout.is_last_stage else ("tokens",)
        if not self.layout.is_last_stage and not self.layout.is_first_stage:
            names = ()
        ids = [sample.sample_id for batch in self.share for sample in batch]
        return sum(self.step.fields[name][i].nbytes for name in names for i in ids)


def _read(own: _Own, stage: StageReader) -> int:
    """As a student worker reads, micro-batch by micro-batch; what comes is held against what was put."""
    for batch in own.share:
        for name, tensors in stage.fetch(batch, LOSS_FIELDS).items():
            for sample_id, tensor in tensors.items():
                if not torch.equal(tensor, own.step.fields[name][sample_id]):
                    raise RuntimeError(f"sample {sample_id}: field {name!r} is not what was put")
    return stage.bytes_received


def _broadcast(step: StepData, layout: parallel.Layout) -> int:
    """Rank 0 holds the samples, and the others get them all."""
    received = 0
    for tensors in step.fields.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        arrived = flat if layout.rank == 0 else torch.empty_like(flat)
        dist.broadcast(arrived.view(torch.uint8), group_src=0, group=layout.control_group)
        received += 0 if layout.rank == 0 else arrived.nbytes
    return received
