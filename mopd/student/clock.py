"""Compute time of a rank in a step: the vision tower's share of it, and the share of the pipeline's bubble.

Megatron's schedule starts and stops the timers of its configuration around each forward and backward pass. On a GPU the
times are CUDA events, read once after the step, so that nothing waits for the device before.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from mopd.student.parallel import Layout

TOWER = "vision-tower"
_PASSES = ("forward-compute", "backward-compute")
"""Megatron's names of the timers around forward and backward passes."""


class Span:
    """Start and stop times under one timer name: seconds, or CUDA events on a GPU."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._opened: Any = None
        self.closed: list[tuple[Any, Any]] = []

    def start(self, barrier: bool = False) -> None:
        """Note the start. ``barrier`` belongs to Megatron's interface and is ignored."""
        self._opened = self._now()

    def stop(self, barrier: bool = False) -> None:
        """Note the end, if the span was started."""
        if self._opened is not None:  # a backward pass need not begin where its end is seen
            self.closed.append((self._opened, self._now()))
            self._opened = None

    @property
    def seconds(self) -> float:
        """Total length of all closed spans."""
        return sum(_between(*span) for span in self.closed)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StageClock:
    """Replacement for Megatron's ``config.timers`` on one rank, which also times the vision tower. Call ``begin``
    before a step's passes and ``metrics`` after them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._spans: dict[str, Span] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Span:
        """Return the timer of a name. Of Megatron's timers only those of its passes are read."""
        if name not in self._spans:
            self._spans[name] = Span(on_gpu=self._layout.device.type == "cuda")
        return self._spans[name]

    def begin(self) -> None:
        """Clear the last step's times."""
        for span in self._spans.values():
            span.closed.clear()

    def metrics(self) -> dict[str, float]:
        """Return the step's shares under their metric names, equal on every rank. Collective."""
        rank, passes = dist.get_rank(), [self(name) for name in _PASSES]
        busy = sum(span.seconds for span in passes)
        begin = passes[0].closed[0][0]
        whole = max(_between(begin, span.closed[-1][1]) for span in passes if span.closed)
        # The tower runs on the first stage alone, so its share is one of that stage's time.
        first_stage = busy if self._layout.is_first_stage else 0.0
        table = torch.zeros(dist.get_world_size(), 4, dtype=torch.float64, device=self._layout.device)
        table[rank] = torch.tensor([busy, whole, first_stage, self(TOWER).seconds])
        dist.all_reduce(table)
        total_busy, _, total_first_stage, total_tower = table.sum(0).tolist()
        return {
            "rate/vision_tower_share": total_tower / total_first_stage,
            "rate/pipeline_bubble_share": 1 - total_busy / (len(table) * float(table[:, 1].max())),
        }


def _between(begin: Any, end: Any) -> float:
    """Return the seconds between two times; waits for the device if they are CUDA events."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
