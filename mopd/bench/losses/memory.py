"""Peak memory of one run of a contender, above what was allocated before it.

On CUDA the caching allocator keeps count. On a CPU the profiler reports every allocation and release of PyTorch's
allocator, those inside operators and compiled code included; what libraries take from elsewhere is not seen on either.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """Largest number of bytes that lived at one moment of ``work`` and did not live before it."""
    return _peak_cpu(work) if device.type == "cpu" else _peak_cuda(work, device)


def _peak_cuda(work: Callable[[], None], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_cpu(work: Callable[[], None]) -> int:
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet():
        profiler.__enter__()
    try:
        work()
    finally:
        with _quiet():
            profiler.__exit__(None, None, None)
    recorded: Any = profiler.profiler
    events = recorded.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = peak = 0
    for _, num_bytes in sorted(changes, key=lambda change: change[0]):
        live += num_bytes
        peak = max(peak, live)
    return peak


@contextmanager
def _quiet() -> Iterator[None]:
    """Some builds of the profiler write to the error stream when they start and stop."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
