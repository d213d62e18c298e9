"""Peak memory of processes: resident as Linux counts it, or a whole GPU's as CUDA does."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

RESET_PEAK = "5"
"""See proc(5), clear_refs."""
LOOK_EVERY_S = 0.002


class HostPeaks:
    """How much more memory processes take for a while."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """By name; the while begins here. What this process has freed is given back before, so that none of it is
        taken again unseen."""
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        self._pids = pids
        for pid in pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)
        self._before = {name: _bytes(pid, "VmRSS") for name, pid in pids.items()}

    def extra_bytes(self) -> dict[str, int]:
        """Each process's peak since then above what it had."""
        return {name: _bytes(pid, "VmHWM") - self._before[name] for name, pid in self._pids.items()}


class DevicePeaks:
    """How much more of GPUs is taken for a while: looked at every other millisecond, as CUDA keeps no peak of other
    processes' memory. What allocators keep for the next time is not seen again."""

    def __init__(self, gpus: Mapping[str, int]) -> None:
        """Numbers by name; the while begins here."""
        self._gpus = gpus
        self._before = self._taken()
        self._most = dict(self._before)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def extra_bytes(self) -> dict[str, int]:
        """Each GPU's peak since then above what it had; ends the while."""
        self._is_over.set()
        self._thread.join()
        return {name: self._most[name] - self._before[name] for name in self._gpus}

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            for name, taken in self._taken().items():
                self._most[name] = max(self._most[name], taken)

    def _taken(self) -> dict[str, int]:
        memory = {name: torch.cuda.mem_get_info(gpu) for name, gpu in self._gpus.items()}
        return {name: total - free for name, (free, total) in memory.items()}


def _bytes(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024
