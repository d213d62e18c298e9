"""Measurement of launch parameters: ``tune`` times the streaming kernels on scratch tensors.

``mopd.losses.triton.table``, which kernels of a training step use, reads and stores them. The gradient is written out
of place on a scratch buffer, so that the logits stay the same from run to run.

Shape legend: T rows, V columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

from mopd.losses.call import VocabShard
from mopd.losses.triton import launches
from mopd.losses.triton.launches import Logits
from mopd.losses.triton.table import Entry, Launch, device_name

BLOCKS = (128, 256, 512, 1024, 2048, 4096, 8192)
WARPS = (1, 2, 4, 8, 16)
STAGES = (1, 2)
SPLITS = (1, 2, 4, 8, 16, 32)
FLUSH_BYTES = 256 << 20
"""Bytes written between two timed runs to push operands out of the cache: more than the L2 cache of any GPU."""
BYTES_OF_A_LANE = (16, 64)
"""Smallest and largest share of a tile per lane. Fewer bytes are no whole group, more do not fit the registers."""
MOST_PROGRAMS_OF_SPLIT_ROWS = 16_384

T = TypeVar("T")


def tune(
    device: torch.device | str,
    shapes: Iterable[tuple[int, int]],
    dtypes: Iterable[torch.dtype],
    *,
    repeats: int = 10,
    report: Callable[[str], None] | None = None,
) -> list[Entry]:
    """Time the streaming kernels on scratch tensors and return the fastest entry of each bucket.

    Args:
        device: a CUDA device.
        shapes: ``(T, V)``: rows, columns of one rank.
        dtypes: dtypes of the logits.
        repeats: timed runs of each candidate; the median counts.
        report: called with one line for each bucket.

    Raises ValueError for a device that is not CUDA.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device is {device}: tuning times kernels on a CUDA device")
    entries = []
    for dtype in dtypes:
        for rows, width in shapes:
            stats, splits, stats_ms = fastest_stats(device, rows, width, dtype, repeats)
            dense, dense_ms = fastest_dense(device, rows, width, dtype, repeats)
            name = str(dtype).removeprefix("torch.")
            entries.append(Entry(width, name, rows, device_name(device), stats, splits, dense))
            if report is not None:
                report(f"{name} T={rows} V={width}: stats {stats_ms:.3f} ms, dense {dense_ms:.3f} ms, {entries[-1]}")
    return entries


def median_ms(run: Callable[[], None], flush: Tensor, repeats: int) -> float:
    """Return the median time of ``run`` in ms by CUDA events, its operands pushed out of the cache before each run."""
    run()
    times: list[float] = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def _fastest(candidates: Iterable[T], run: Callable[[T], None], device: torch.device, repeats: int) -> tuple[T, float]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    tried = list(candidates)
    times = [median_ms(partial(run, candidate), flush, repeats) for candidate in tried]
    return tried[times.index(min(times))], min(times)


def _shapes(dtype: torch.dtype, stages: Iterable[int]) -> list[Launch]:
    low, high = (size // dtype.itemsize for size in BYTES_OF_A_LANE)
    return [
        Launch(block, warps, stage)
        for block, warps, stage in product(BLOCKS, WARPS, stages)
        if low <= block // (32 * warps) <= high
    ]


def _scratch(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> Logits:
    x = torch.empty(rows, width, dtype=dtype, device=device).normal_(std=3)
    return Logits(x, launches.layout(x), VocabShard(0, width, width, 0, 1, None), scale=1.0)


def fastest_stats(
    device: torch.device, rows: int, width: int, dtype: torch.dtype, repeats: int
) -> tuple[Launch, int, float]:
    """Return the best launch and splits of the statistics pass, and its median ms."""
    logits = _scratch(device, rows, width, dtype)
    pay = torch.zeros(rows, 2 * max(SPLITS), device=device)
    candidates = [
        (how, splits)
        for how, splits in product(_shapes(dtype, STAGES), SPLITS)
        if splits == 1 or (splits * how.block * how.stages <= width and rows * splits <= MOST_PROGRAMS_OF_SPLIT_ROWS)
    ]

    def run(candidate: tuple[Launch, int]) -> None:
        how, splits = candidate
        marks = launches.new_marks(logits, how, splits)  # unwritten: a marked group takes as long
        launches.stats(logits, marks, None, pay, False, how, splits)

    (how, splits), ms = _fastest(candidates, run, device, repeats)
    return how, splits, ms


def fastest_dense(
    device: torch.device, rows: int, width: int, dtype: torch.dtype, repeats: int
) -> tuple[Launch, float]:
    """Return the best launch of the gradient pass, and its median ms."""
    logits = _scratch(device, rows, width, dtype)
    out = torch.empty_like(logits.x)
    row_data = torch.full((2, rows), -1e-4, device=device)

    def run(how: Launch) -> None:
        launches.dense(logits, out, row_data, None, how)

    return _fastest(_shapes(dtype, (1,)), run, device, repeats)
