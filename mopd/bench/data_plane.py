"""``mopd bench data_plane``: what each trainer rank receives beside what it needs, and how long the planes take.

::

    ranks           the storage ──> 8 ranks, TP2 x PP2 x DP2: bytes counted where they arrive
    local           this process, the storage's own ──> consumer
    transfer_queue  this process ── storage units ──> consumer

As in a run, the orchestrator has opened the plane, and ranks are processes with readers. Samples travel
in units; each ends in padded tensors, as a micro-batch does, so that all bytes are read.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mopd.base.files.temporary import TemporaryFolder
from mopd.base.types import LOSS_FIELDS, UserError
from mopd.bench.harness import BenchReport, Comparison, Goals, at_most, rounds, rows, say
from mopd.bench.models import make_samples
from mopd.bench.processes import TIMEOUT_S, children, received
from mopd.config.data import TransferQueueConfig
from mopd.config.student import ParallelConfig
from mopd.data.packing import PackingRules, pack
from mopd.data_plane.frames import packed, unpacked
from mopd.data_plane.interface import Storage
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.reading import open_reader
from mopd.placement.storage import open_queue
from mopd.student import parallel
from mopd.student.reading import StageReader

MIB = 2**20
SIZES, QUICK_SIZES = (64 * MIB, 1024 * MIB), (8 * MIB, 32 * MIB)
TOP_K = 64
LAYOUT = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2)
NUM_RANKS = 8
RULES = PackingRules(is_packed=True, max_tokens=32_768, micro_batch_size=None, square_cost=0.0)
MOST_RECEIVED = 1.05
"""Largest allowed ratio of the bytes into a rank to the bytes that it needs."""
MEAN_RESPONSE, LONGEST_RESPONSE, PROMPT, VOCAB_SIZE = 1024, 8192, 128, 151_936
UNIT = 16
"""Number of samples of one put, and of one micro-batch."""


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure and print. Return the exit code.

    Raises:
        UserError: an impossible option, or a package is missing.
    """
    if args.rounds < 1:
        raise UserError(f"--rounds is {args.rounds}: set 1 or more")
    report = BenchReport(benchmark="data_plane", arguments=arguments, as_json=args.json, device=torch.device("cpu"))
    sizes = QUICK_SIZES if args.quick else SIZES
    say("data_plane: 8 ranks, TP2 x PP2 x DP2")
    report.add(*measure_ranks(step_lengths(min(SIZES[0], sizes[-1]))))
    asyncio.run(measure_planes(report, sizes, args.rounds))
    return report.finish()


def step_lengths(num_bytes: int, *, top_k: int = TOP_K, mean: int = MEAN_RESPONSE) -> list[tuple[int, int]]:
    """Draw (prompt, response) lengths for fields of about ``num_bytes``; log-normal, the last one cut."""
    random = np.random.default_rng(0)
    per_prompt, per_token = 8 * PROMPT, 8 + 1 + 4 + 8 * top_k + 4
    found: list[tuple[int, int]] = []
    while num_bytes > 0:
        drawn = int(np.clip(random.lognormal(np.log(mean) - 0.5, 1.0), 8, LONGEST_RESPONSE))
        found.append((PROMPT, max(1, min(drawn, num_bytes // per_token))))
        num_bytes -= per_prompt + per_token * found[-1][1]
    return found


def measure_ranks(lengths: Sequence[tuple[int, int]], *, top_k: int = TOP_K) -> tuple[Comparison, Goals]:
    """Count the bytes of such samples into each rank beside what it needs.

    Raises:
        UserError: a rank ended, or said nothing in time.
    """
    step, plane = make_samples(lengths, vocab_size=VOCAB_SIZE, top_k=top_k), LocalDataPlane()
    with (
        TemporaryFolder("mopd-bench-") as folder,
        children(_rank, [(rank, folder, lengths, top_k) for rank in range(NUM_RANKS)]) as ends,
    ):
        try:
            plane.serve(host=None)
            asyncio.run(plane.put(step.metas, step.fields))
            for end in ends:
                end.send_bytes(packed(plane.address))
            found = [unpacked(received(end, f"rank {rank}")) for rank, end in enumerate(ends)]
        finally:
            asyncio.run(plane.close())
    columns = {"needs MiB": "needed_mib:.2f", "receives MiB": "received_mib:.2f", "ratio": "ratio:.4f", "s": "s:.2f"}
    title = f"{step.num_bytes / MIB:.0f} MiB, rank (TP, PP, DP)"
    part = Comparison(title=title, columns=columns, rows=found, facts={"num_bytes": step.num_bytes})
    return part, {"received_over_needed": at_most(max(row["ratio"] for row in found), MOST_RECEIVED)}


def _rank(end: Connection, rank: int, folder: str, lengths: Sequence[tuple[int, int]], top_k: int) -> None:
    """Run a rank's process: it reads a step as a student worker does, micro-batch by micro-batch, and compares what
    arrives with what was put."""
    torch.set_num_threads(1)
    step = make_samples(lengths, vocab_size=VOCAB_SIZE, top_k=top_k)
    store = dist.FileStore(str(Path(folder) / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    layout = parallel.initialize(LAYOUT, timeout_s=TIMEOUT_S, seed=0)
    share = pack(step.metas, RULES, dp_size=layout.dp_size).micro_batches[layout.dp_rank]
    reader = open_reader(unpacked(end.recv_bytes()), timeout_s=TIMEOUT_S)
    stage = StageReader(reader, layout)
    dist.barrier(group=layout.control_group)
    began = time.perf_counter()
    for batch in share:
        for name, tensors in stage.fetch(batch, LOSS_FIELDS).items():
            for sample_id, tensor in tensors.items():
                if not torch.equal(tensor, step.fields[name][sample_id]):
                    raise RuntimeError(f"sample {sample_id}: field {name!r} is not what was put")
    row: dict[str, Any] = {"s": time.perf_counter() - began, "received": stage.bytes_received}
    names: Sequence[str] = LOSS_FIELDS if layout.is_last_stage else ("tokens",)
    row["needed"] = sum(step.fields[name][one.sample_id].nbytes for name in names for batch in share for one in batch)
    row["ratio"] = row["received"] / row["needed"]
    row |= {f"{key}_mib": row[key] / MIB for key in ("needed", "received")}
    reader.close()
    end.send_bytes(packed({"name": f"{rank} ({layout.tp_rank}, {layout.pp_rank}, {layout.dp_rank})", **row}))
    end.poll(TIMEOUT_S)  # groups that end at different times would abort one another


async def measure_planes(report: BenchReport, sizes: Sequence[int], num_rounds: int) -> None:
    """Time both planes at every size.

    Raises:
        UserError: a package is missing, or Ray does not start.
    """
    local = LocalDataPlane()
    local.serve(host=None)
    queue = open_queue(TransferQueueConfig(type="transfer_queue"), timeout_s=TIMEOUT_S)
    planes: dict[str, Storage] = {"local": local, "transfer_queue": queue}
    try:
        with children(_consume, [({name: plane.address for name, plane in planes.items()},)]) as (consumer,):
            for size in (min(sizes) // 8, min(sizes)):  # until connections, memory and caches are as they stay
                await measure_size(planes, consumer, size, 1)
            for size in sizes:
                say(f"data_plane: {size / MIB:,.0f} MiB a step")
                report.add(await measure_size(planes, consumer, size, num_rounds))
    finally:
        for plane in planes.values():
            await plane.close()


async def measure_size(
    planes: Mapping[str, Storage], consumer: Connection, num_bytes: int, num_rounds: int
) -> Comparison:
    """Carry the same step through each plane in turns.

    Raises:
        RuntimeError: what arrives is not what was put.
    """
    step = make_samples(step_lengths(num_bytes), vocab_size=VOCAB_SIZE, top_k=TOP_K)
    ids, expected = [meta.sample_id for meta in step.metas], checksum(step.fields)
    units = [ids[low : low + UNIT] for low in range(0, len(ids), UNIT)]
    puts: dict[str, list[float]] = {name: [] for name in planes}
    gets: dict[str, list[float]] = {name: [] for name in planes}
    for order in rounds(planes, num_rounds):
        for name in order:
            began = time.perf_counter()
            for unit in units:
                fields = {key: [tensors[i] for i in unit] for key, tensors in step.fields.items()}
                await planes[name].put([step.metas[i] for i in unit], fields)
            puts[name].append(time.perf_counter() - began)
            consumer.send_bytes(packed([name, units]))
            get_s, total = unpacked(await asyncio.to_thread(received, consumer, "the consumer"))
            if total != expected:
                raise RuntimeError(f"{name}: what arrived is not what was put")
            gets[name].append(get_s)
            await planes[name].discard(ids)

    def figures(name: str, median_s: float) -> dict[str, float]:
        both = {"put_s": statistics.median(puts[name]), "get_s": statistics.median(gets[name])}
        return {**both, "mib_per_s": step.num_bytes / MIB / median_s}

    seconds = {name: [a + b for a, b in zip(puts[name], gets[name], strict=True)] for name in planes}
    return Comparison(
        title=f"{step.num_bytes / MIB:,.0f} MiB, {len(ids):,} samples",
        columns={"put s": "put_s:.4f", "get s": "get_s:.3f", "MiB/s": "mib_per_s:,.0f", "x local": "ratio:.2f"},
        rows=rows(seconds, "local", figures),
        facts={"num_bytes": step.num_bytes, "num_samples": len(ids)},
    )


def _consume(end: Connection, addresses: Mapping[str, dict[str, Any]]) -> None:
    """Run the consumer's process: for each message with a plane's name and units of ids it answers with the seconds
    that their tensors took and a checksum of all of them."""
    torch.set_num_threads(1)
    readers = {name: open_reader(address, timeout_s=TIMEOUT_S) for name, address in addresses.items()}
    while True:
        name, units = unpacked(end.recv_bytes())
        began = time.perf_counter()
        total = sum(checksum(readers[name].fetch(ids, LOSS_FIELDS)) for ids in units)
        end.send_bytes(packed([time.perf_counter() - began, total]))


def checksum(values: Mapping[str, Sequence[Tensor]]) -> int:
    """Pad every field to one tensor, as a micro-batch holds it, so that all bytes are read whatever brought them; the
    sum of the fields that are quick to add up is the same number whoever carried them."""
    batch = {name: pad_sequence(list(tensors), batch_first=True) for name, tensors in values.items()}
    return sum(int(batch[name].sum()) for name in ("tokens", "loss_mask"))
