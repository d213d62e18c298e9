"""Time and memory of work on one device: clocks, the device's copy rate, peaks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

CPU_FLUSH_BYTES = 128 << 20
"""Size of the buffer that flushes a CPU's caches: more than the last-level cache of current servers, so that no
contender finds its inputs there."""
HEAD_START_CYCLES = 4_000_000
"""About 2 ms of a GPU's clock, for which it waits before a timed region, so that the host, which queues kernels
meanwhile, is not what is measured. A contender that waits for the device in its middle pays for it."""
COPY_LIMIT_BYTES = 1 << 32
"""Size of the largest copy that is timed."""


class Clock:
    """Stopwatch for the parts of one run: by wall clock, on a GPU by device time between events."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda, size = device.type == "cuda", CPU_FLUSH_BYTES
        if self._is_cuda:
            size = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)
        self._marks: list[Any] = []

    def start(self) -> None:
        """Empty the caches and begin the first part."""
        if self._is_cuda:
            torch.cuda.synchronize()
        self._flush.fill_(1)
        if self._is_cuda:
            torch.cuda._sleep(HEAD_START_CYCLES)
        self._marks = []
        self.mark()

    def mark(self) -> None:
        """End a part and begin the next."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def stop(self) -> list[float]:
        """Return the seconds of each part, in order."""
        parts = zip(self._marks[:-1], self._marks[1:], strict=True)
        if not self._is_cuda:
            return [b - a for a, b in parts]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in parts]


def copy_rate(like: Tensor, clock: Clock) -> float:
    """Measure the bytes a second, read and written, of a plain copy of a tensor as large as ``like`` into memory that
    was written before. The floor follows from this rate."""
    source = like.detach().flatten()[: COPY_LIMIT_BYTES // like.element_size()]
    target = torch.zeros_like(source)
    clock.start()
    target.copy_(source)
    clock.mark()
    return 2 * source.nbytes / clock.stop()[0]


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Measure the largest number of bytes that live at one moment of ``work`` and did not live before it.

    On CUDA the caching allocator keeps count. On a CPU the profiler reports every allocation and release of PyTorch's
    allocator, those inside operators and compiled code included; what libraries take from elsewhere is not seen on
    either.
    """
    if device.type == "cpu":
        return _peak_on_cpu(work)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(work: Callable[[], object]) -> int:
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
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
    """Close the error stream to what C++ libraries write: the profiler of some builds reports its start and stop."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
