"""``mopd bench data_plane``: how long the planes take to carry a step's samples.

::

    local           this process, the storage's own ──> consumer
    transfer_queue  this process ── storage units ──> consumer

As in a run, the orchestrator has opened the plane, and the consumer is a process with a reader. Samples travel
in units; each ends in padded tensors, as a micro-batch does, so that all bytes are read.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mopd.base.types import LOSS_FIELDS, UserError
from mopd.bench.harness import BenchReport, Comparison, rounds, rows, say
from mopd.bench.models import make_samples
from mopd.bench.processes import TIMEOUT_S, children, received
from mopd.config.data import TransferQueueConfig
from mopd.data_plane.frames import packed, unpacked
from mopd.data_plane.interface import Storage
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.reading import open_reader
from mopd.placement.storage import open_queue

MIB = 2**20
SIZES, QUICK_SIZES = (64 * MIB, 1024 * MIB), (8 * MIB, 32 * MIB)
TOP_K = 64
MEAN_RESPONSE, LONGEST_RESPONSE, PROMPT, VOCAB_SIZE = 1024, 8192, 128, 151_936
UNIT = 16
"""Number of samples of one put, and of one fetch."""


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure and print. Return the exit code.

    Raises:
        UserError: an impossible option, or a package is missing.
    """
    if args.rounds < 1:
        raise UserError(f"--rounds is {args.rounds}: set 1 or more")
    report = BenchReport(benchmark="data_plane", arguments=arguments, as_json=args.json, device=torch.device("cpu"))
    asyncio.run(measure_planes(report, QUICK_SIZES if args.quick else SIZES, args.rounds))
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
