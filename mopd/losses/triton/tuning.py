"""Measures launch parameters and keeps them: what a user of the table needs, under one name.

Reading the table is ``mopd.losses.triton.table``, which kernels of a training step use; timing is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from mopd.losses.triton.table import Entry, Launch, device_name, load_table, lookup, merge, save_table
from mopd.losses.triton.trials import fastest_dense, fastest_stats

__all__ = ["Entry", "Launch", "device_name", "load_table", "lookup", "merge", "save_table", "tune"]


def tune(
    device: torch.device | str,
    shapes: Iterable[tuple[int, int, int]],
    dtypes: Iterable[torch.dtype],
    *,
    repeats: int = 10,
    report: Callable[[str], None] | None = None,
) -> list[Entry]:
    """Times the streaming kernels on scratch tensors and returns the fastest entry of each bucket.

    Args:
        device: a CUDA device.
        shapes: ``(T, V, K)``: rows, columns of one rank, ids of a row.
        dtypes: of the logits.
        repeats: timed runs of each candidate; the median counts.
        report: called with one line for each bucket.

    Raises ValueError for a device that is not CUDA.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device is {device}: tuning times kernels on a CUDA device")
    entries = []
    for dtype in dtypes:
        for rows, width, k in shapes:
            stats, splits, stats_ms = fastest_stats(device, rows, width, k, dtype, repeats)
            dense, dense_ms = fastest_dense(device, rows, width, dtype, repeats)
            name = str(dtype).removeprefix("torch.")
            entries.append(Entry(width, name, k, rows, device_name(device), stats, splits, dense))
            if report is not None:
                report(
                    f"{name} T={rows} V={width} K={k}: stats {stats_ms:.3f} ms, dense {dense_ms:.3f} ms, {entries[-1]}"
                )
    return entries
