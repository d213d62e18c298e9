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
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mopd.bench.clock import Clock, Copy, Others
from mopd.bench.losses.contenders import Contender, Entry
from mopd.bench.losses.results import Row, Status, median_ms
from mopd.text import one_line

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


@dataclass(frozen=True)
class Measured:
    """One case: a row for every entry."""

    rows: list[Row]
    copy_rate: float | None
    """Median, in bytes/s read and written; None where no copy was timed."""
    others_cores: float | None
    """Cores that other processes kept busy during the rounds."""


@dataclass
class _Timed:
    contender: Contender
    row: Row
    forward_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)


def measure(
    entries: Sequence[Entry], *, clock: Clock, device: torch.device, repeats: int, deadline: Deadline, copy: Copy | None
) -> Measured:
    """Rows in the order of ``entries``, and what the machine did meanwhile.

    Every contender first runs alone (gradient against float64, peak memory, warm-up); then come rounds in which each
    runs once, each round starting with another one. A contender that cannot run gets a row that says why.
    """
    rows: list[Row] = []
    timed: list[_Timed] = []
    for entry in entries:
        if not isinstance(entry, Contender):
            rows.append(_empty(entry, "not available", entry.reason))
        elif deadline.passed:
            rows.append(_empty(entry, "not reached", "time limit"))
        else:
            row = _prepare(entry, device)
            rows.append(row)
            if row.status == "measured":
                timed.append(_Timed(entry, row))
    enough_s = ENOUGH_S[device.type]
    others = Others()
    copies = _rounds(timed, clock=clock, repeats=repeats, deadline=deadline, copy=copy, enough_s=enough_s)
    others_cores = others.cores()
    for one in timed:
        if one.row.status != "measured":
            continue
        one.row.forward_ms, one.row.total_ms = median_ms(one.forward_s), median_ms(one.total_s)
        one.row.total_ms_range = (1000 * min(one.total_s), 1000 * max(one.total_s))
        one.row.rounds = len(one.total_s)
    rate = copy.num_bytes / (median_ms(copies) / 1000) if copy is not None and copies else None
    return Measured(rows, rate, others_cores)


def _rounds(
    timed: Sequence[_Timed],
    *,
    clock: Clock,
    repeats: int,
    deadline: Deadline,
    copy: Copy | None,
    enough_s: float,
) -> list[float]:
    """Time everybody ``repeats`` times, at least once; returns the copies' times."""
    copies = []
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
                done = len(one.total_s) >= ENOUGH_ROUNDS and sum(one.total_s) > enough_s
                if one.row.status == "measured" and not done:
                    _time_one(one, clock)
    finally:
        gc.enable()
    return copies


def _time_one(one: _Timed, clock: Clock) -> None:
    """One more time; memory that ran out, because others left it in pieces, ends the contender's part."""
    try:
        forward_s, backward_s = _time(one.contender, clock)
    except torch.OutOfMemoryError:
        one.row.status, one.row.reason = "out of memory", "out of memory"
        one.contender.restore()
    else:
        one.forward_s.append(forward_s)
        one.total_s.append(forward_s + backward_s)


def _time(contender: Contender, clock: Clock) -> tuple[float, float]:
    clock.start()
    loss = contender.forward()
    clock.mark()
    gradients = torch.autograd.grad(loss, contender.leaves, contender.upstream)
    clock.mark()
    forward_s, backward_s = clock.stop()
    del loss, gradients
    contender.restore()
    return forward_s, backward_s


def _prepare(contender: Contender, device: torch.device) -> Row:
    """Errors, peak memory and warm-up. Running out of memory is a result; an error of ours is a failure of the run."""
    row = _empty(contender, "measured", contender.note or None)
    status: Status = "failed" if contender.group == "ours" else "not available"
    try:
        _measure_alone(contender, row, device)
    except torch.OutOfMemoryError:
        row.status, row.reason = "out of memory", "out of memory"
    except Exception as error:  # the row carries it; ours makes the command fail in the end
        first = one_line(str(error).strip().partition("\n")[0])
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

    def work() -> None:
        _run(contender)

    row.extra_bytes = max(0, peak_bytes(work, device) - own)
    contender.restore()
    for _ in range(WARM_UP_RUNS[device.type]):
        _run(contender)
        contender.restore()


def _run(contender: Contender) -> tuple[Tensor, ...]:
    return torch.autograd.grad(contender.forward(), contender.leaves, contender.upstream)


def _empty(entry: Entry, status: Status, reason: str | None) -> Row:
    return Row(name=entry.name, group=entry.group, loss=entry.loss, status=status, reason=reason)


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """Largest number of bytes that lived at one moment of ``work`` and did not live before it.

    On CUDA the caching allocator keeps count. On a CPU the profiler reports every allocation and release of PyTorch's
    allocator, those inside operators and compiled code included; what libraries take from elsewhere is not seen on
    either.
    """
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
