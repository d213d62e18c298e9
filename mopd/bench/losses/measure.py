"""Runs the contenders of one case against each other: the same tensors, one process, in turns."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mopd.bench.clock import Clock, Copy, Others, make_clock
from mopd.bench.losses.contenders import Contender
from mopd.bench.losses.results import Row, Status
from mopd.text import first_line

WARM_UP_RUNS = {"cuda": 3, "cpu": 1}
"""Runs before the first round, beside the one that checks the gradient and the one that counts memory."""
ENOUGH_ROUNDS = 5
ENOUGH_S = {"cuda": 1.0, "cpu": 60.0}
"""A contender with so many rounds that took so long in all sits out the rest: else the slow ones take all the time."""


@dataclass
class Deadline:
    """The moment after which no new round and no new contender begins."""

    limit_s: float | None
    _start: float = field(default_factory=time.monotonic)

    @property
    def passed(self) -> bool:
        """The time is over."""
        return self.limit_s is not None and time.monotonic() - self._start > self.limit_s


@dataclass
class _Timed:
    contender: Contender
    row: Row
    forward_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)


def measure(
    entries: Sequence[Contender], *, device: torch.device, repeats: int, deadline: Deadline, copy: Copy | None
) -> tuple[list[Row], float | None, float | None]:
    """Every contender first runs alone (gradient against float64, peak memory, warm-up); then come rounds in which each
    runs once, each round starting with another one. A contender that cannot run gets a row that says why.

    Returns:
        Rows in the order of ``entries``; the median rate of ``copy`` in bytes/s read and written, None where none was
        timed; cores that other processes kept busy during the rounds.
    """
    clock = make_clock(device)
    rows: list[Row] = []
    for entry in entries:
        if isinstance(entry.forward, str):
            rows.append(_empty(entry, "not available", entry.forward))
        elif deadline.passed:
            rows.append(_empty(entry, "not reached", "time limit"))
        else:
            rows.append(_prepare(entry, device))
    timed = [_Timed(entry, row) for entry, row in zip(entries, rows, strict=True) if row.status == "measured"]
    others, copies = Others(), []
    gc.collect()
    gc.disable()  # a collection in the middle of a run would be charged to it
    try:
        for turn in range(repeats):
            if turn > 0 and deadline.passed:
                break
            if copy is not None:
                copies.append(copy.time(clock))
            first = turn % max(1, len(timed))
            for one in (*timed[first:], *timed[:first]):
                done = len(one.total_s) >= ENOUGH_ROUNDS and sum(one.total_s) > ENOUGH_S[device.type]
                if one.row.status == "measured" and not done:
                    _time_one(one, clock)
    finally:
        gc.enable()
    others_cores = others.cores()
    for one in timed:
        if one.row.status == "measured":
            one.row.forward_ms, one.row.total_ms = (1000 * median(times) for times in (one.forward_s, one.total_s))
            one.row.total_ms_range = (1000 * min(one.total_s), 1000 * max(one.total_s))
            one.row.rounds = len(one.total_s)
    rate = copy.num_bytes / median(copies) if copy is not None and copies else None
    return rows, rate, others_cores


def _time_one(one: _Timed, clock: Clock) -> None:
    """One more time; memory that ran out, because others left it in pieces, ends the contender's part."""
    try:
        clock.start()
        _run(one.contender, clock.mark)
        forward_s, backward_s = clock.stop()
    except torch.OutOfMemoryError:
        one.row.status, one.row.reason = "out of memory", "out of memory"
    else:
        one.forward_s.append(forward_s)
        one.total_s.append(forward_s + backward_s)
    one.contender.restore()


def _prepare(contender: Contender, device: torch.device) -> Row:
    """Errors, peak memory and warm-up. Running out of memory is a result; an error of ours is a failure of the run."""
    row = _empty(contender, "measured", contender.note or None)
    status: Status = "failed" if contender.group == "ours" else "not available"
    try:
        _measure_alone(contender, row, device)
    except torch.OutOfMemoryError:
        row.status, row.reason = "out of memory", "out of memory"
    except Exception as error:  # the row carries it; ours makes the command fail in the end
        first = first_line(error)
        row.status, row.reason = status, f"{type(error).__name__}: {first:.200}"
        if status == "failed":
            traceback.print_exc()
    if row.status != "measured":
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        contender.restore()
    return row


def _measure_alone(contender: Contender, row: Row, device: torch.device) -> None:
    gradients = _run(contender)
    if contender.check is not None:
        row.errors = contender.check(gradients)
    own = 0 if contender.overwrites else sum(gradient.nbytes for gradient in gradients)
    del gradients
    contender.restore()
    row.extra_bytes = max(0, peak_bytes(lambda: _run(contender), device) - own)
    contender.restore()
    for _ in range(WARM_UP_RUNS[device.type]):
        _run(contender)
        contender.restore()


def _run(contender: Contender, mark: Callable[[], None] = lambda: None) -> tuple[Tensor, ...]:
    """The gradients; ``mark`` is called after forward and after backward."""
    assert not isinstance(contender.forward, str)
    loss = contender.forward()
    mark()
    gradients = torch.autograd.grad(loss, contender.leaves, contender.upstream)
    mark()
    return gradients


def _empty(entry: Contender, status: Status, reason: str | None) -> Row:
    return Row(name=entry.name, group=entry.group, loss=entry.loss, status=status, reason=reason)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Largest number of bytes that lived at one moment of ``work`` and did not live before it.

    On CUDA the caching allocator keeps count. On a CPU the profiler reports every allocation and release of PyTorch's
    allocator, those inside operators and compiled code included; what libraries take from elsewhere is not seen on
    either.
    """
    return _peak_cpu(work) if device.type == "cpu" else _peak_cuda(work, device)


def _peak_cuda(work: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_cpu(work: Callable[[], object]) -> int:
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
