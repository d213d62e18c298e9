"""Time, the device's copy rate, and caches that hold nothing of the inputs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import Tensor

CPU_FLUSH_BYTES = 128 << 20
"""More than the last-level cache of current servers' sockets, so that no contender finds its inputs there."""
HEAD_START_CYCLES = 4_000_000
"""About 2 ms of a GPU's clock: the GPU waits that long before a timed region, so that the host, which queues kernels
meanwhile, is not what is measured. A contender that waits for the device in its middle pays for it."""
COPY_LIMIT_BYTES = 1 << 32
"""Size of the largest copy that is timed."""


STATISTICS = Path("/proc/stat")
"""Where Linux counts what its cores did: user, nice, system, idle, iowait, irq, softirq, steal, in ticks."""


def own_busy_s() -> float:
    """Busy seconds of this process with its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def family_busy_s() -> float:
    """Busy seconds of this process and its children, those included that still run."""
    busy_s = own_busy_s()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            times = process.cpu_times()
            busy_s += times.user + times.system + times.children_user + times.children_system
    return busy_s


class Others:
    """What other processes than those of ``own_s`` take of the machine from now on."""

    def __init__(self, own_s: Callable[[], float] = own_busy_s) -> None:
        self._own_s = own_s
        self._start = self._now()

    def cores(self) -> float | None:
        """Cores that they kept busy on average; None where the system does not say."""
        if self._start is None:
            return None
        busy, own, wall = (b - a for a, b in zip(self._start, self._now() or self._start, strict=True))
        most = os.cpu_count() or 1  # the system counts in ticks, so that a short time may seem to hold more
        return min(max(0.0, busy - own) / wall, most) if wall > 0 else 0.0

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds: all cores' busy time, our own processes', wall clock."""
        if not STATISTICS.is_file():
            return None
        ticks = [int(number) for number in STATISTICS.read_text().split("\n", 1)[0].split()[1:9]]
        wall = time.monotonic()  # at once: to look at all processes takes a while
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return busy, self._own_s(), wall


class CpuClock:
    """Times one run of a contender in parts, by wall clock."""

    def __init__(self) -> None:
        self._flush = torch.empty(CPU_FLUSH_BYTES, dtype=torch.uint8)
        self._times: list[float] = []

    def start(self) -> None:
        """Empty the caches and begin."""
        self._flush.fill_(1)
        self._times = [time.perf_counter()]

    def mark(self) -> None:
        """End a part."""
        self._times.append(time.perf_counter())

    def stop(self) -> list[float]:
        """Seconds of each part, in order."""
        return [b - a for a, b in zip(self._times[:-1], self._times[1:], strict=True)]


class CudaClock:
    """The same by device time between events."""

    def __init__(self, device: torch.device) -> None:
        size = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        torch.cuda.synchronize()
        self._flush.fill_(1)
        torch.cuda._sleep(HEAD_START_CYCLES)
        self._events = []
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def stop(self) -> list[float]:
        torch.cuda.synchronize()
        pairs = zip(self._events[:-1], self._events[1:], strict=True)
        return [a.elapsed_time(b) / 1000 for a, b in pairs]


Clock = CpuClock | CudaClock


def make_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return CpuClock() if device.type == "cpu" else CudaClock(device)


class Copy:
    """A plain copy of a tensor as large as the logits: the rate that the floor is reckoned with."""

    def __init__(self, like: Tensor) -> None:
        self._source = like.detach().flatten()[: COPY_LIMIT_BYTES // like.element_size()]
        self.num_bytes = 2 * self._source.nbytes
        """Read plus written."""

    def time(self, clock: Clock) -> float:
        """Seconds of one copy into memory that was written before."""
        target = torch.zeros_like(self._source)
        clock.start()
        target.copy_(self._source)
        clock.mark()
        return clock.stop()[0]
