"""A small all-reduce over one process of each node: do they reach one another as ranks do, and how fast?"""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from mopd.base.text import first_line
from mopd.launch.checks.meeting import Meeting

NUM_VALUES = {"gloo": 2**20, "nccl": 2**24}
"""fp32: 4 and 64 MiB."""
ROUNDS = 3
DEADLINE_S = 60.0
OPERATION_S = {"gloo": 30.0, "nccl": 300.0}
"""Deadline of each: gloo's own reason comes first; NCCL ends the process at its deadline, and nothing would be told."""


class AllReduce(threading.Thread):
    """Runs in a thread of its own, as a library that waits for a node in vain cannot be interrupted."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(daemon=True)
        self._meeting = meeting
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._found: dict[str, Any] = {}

    def measured(self) -> dict[str, Any]:
        """``bytes_per_s`` (of the bus: 2 (n - 1) / n of the data over the time) and ``backend``, or ``error``."""
        self.start()
        self.join(DEADLINE_S)
        if self.is_alive():
            return {"backend": self._backend, "error": f"no end in {DEADLINE_S:.0f} s"}
        return {"backend": self._backend, **self._found}

    def run(self) -> None:
        try:
            self._found = {"bytes_per_s": self._rate()}
        except (RuntimeError, ValueError) as error:  # what torch raises for a backend's failure; told by node and line
            self._found = {"error": first_line(error)}

    def _rate(self) -> float:
        place = self._meeting.place
        device = torch.device("cuda", 0) if self._backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            self._backend,
            store=self._meeting.store_for("all_reduce"),
            rank=place.node_rank,
            world_size=place.num_nodes,
            timeout=datetime.timedelta(seconds=OPERATION_S[self._backend]),
        )
        values = torch.empty(NUM_VALUES[self._backend], device=device)
        seconds = []
        for _ in range(ROUNDS):
            values.fill_(place.node_rank + 1.0)
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(values)
            summed = values[-1].item()  # waits for the device
            seconds.append(time.perf_counter() - begun)
            expected = place.num_nodes * (place.num_nodes + 1) / 2
            if summed != expected:
                raise RuntimeError(f"the sum over nodes is {summed}, not {expected}")
        dist.destroy_process_group()
        num_bytes = values.numel() * values.element_size()
        return 2 * (place.num_nodes - 1) / place.num_nodes * num_bytes / min(seconds)
