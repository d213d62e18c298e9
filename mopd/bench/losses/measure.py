"""Runs the contenders of one case against each other: the same tensors, one process, in turns."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from mopd.base.text import first_line
from mopd.bench.clock import Clock, copy_rate, peak_bytes
from mopd.bench.harness import Others, rounds
from mopd.bench.losses.contenders import Contender

WARM_UP_RUNS = {"cuda": 3, "cpu": 1}
"""Runs before the first round, beside the one that checks the gradient and the one that counts memory."""
ENOUGH_ROUNDS = 5
ENOUGH_S = {"cuda": 1.0, "cpu": 60.0}
"""A contender with so many rounds that took so long in all sits out the rest: else the slow ones take all the time."""


@dataclass(kw_only=True)
class Row:
    """One contender of one case."""

    name: str
    group: str
    loss: str
    status: Literal["measured", "out of memory", "not available", "failed", "not reached"] = "measured"
    reason: str | None = None
    """Why there are no numbers, or a remark."""
    forward_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    """Forward and backward of each round."""
    extra_bytes: int | None = None
    """Peak memory of forward and backward above inputs and gradients."""
    error: float | None = None
    """Error of the gradient against float64: see ``mopd.bench.losses.exact``."""

    @property
    def forward_ms(self) -> float | None:
        """Median over rounds."""
        return 1000 * median(self.forward_s) if self.total_ms is not None else None

    @property
    def total_ms(self) -> float | None:
        """Median over rounds; None where the contender did not come through."""
        return 1000 * median(self.total_s) if self.status == "measured" and self.total_s else None


def measure(
    entries: Sequence[Contender],
    *,
    device: torch.device,
    repeats: int,
    give_up_at: float = math.inf,
    copied: Tensor | None = None,
) -> tuple[list[Row], float | None, float | None]:
    """Run every contender alone (gradient against float64, peak memory, warm-up), then in turns. A contender that
    cannot run gets a row that says why. After ``give_up_at`` (``time.monotonic``) no new round and no new contender
    begins.

    Returns:
        Rows in the order of ``entries``; the median rate of copies of ``copied`` in bytes/s read and written, None
        without; cores that other processes kept busy during the rounds.
    """
    clock = Clock(device)
    rows = [_prepare(entry, device, give_up_at) for entry in entries]
    running = [(entry, row) for entry, row in zip(entries, rows, strict=True) if row.status == "measured"]
    others, rates = Others(), []
    gc.collect()
    gc.disable()  # a collection in the middle of a run would be charged to it
    try:
        for number, order in enumerate(rounds(running, repeats)):
            if number > 0 and time.monotonic() > give_up_at:
                break
            if copied is not None:
                rates.append(copy_rate(copied, clock))
            for entry, row in order:
                is_done = len(row.total_s) >= ENOUGH_ROUNDS and sum(row.total_s) > ENOUGH_S[device.type]
                if row.status == "measured" and not is_done:
                    _time_one(entry, row, clock)
    finally:
        gc.enable()
    return rows, median(rates) if rates else None, others.cores()


def _time_one(contender: Contender, row: Row, clock: Clock) -> None:
    """One more time; memory that ran out, because others left it in pieces, ends the contender's part."""
    try:
        clock.start()
        _run(contender, clock.mark)
        forward_s, backward_s = clock.stop()
    except torch.OutOfMemoryError:
        row.status = row.reason = "out of memory"
    else:
        row.forward_s.append(forward_s)
        row.total_s.append(forward_s + backward_s)
    contender.restore()


def _prepare(contender: Contender, device: torch.device, give_up_at: float) -> Row:
    """Errors, peak memory and warm-up. Running out of memory is a result; an error of ours is a failure of the run."""
    row = Row(name=contender.name, group=contender.group, loss=contender.loss, reason=contender.note or None)
    if isinstance(contender.forward, str):
        row.status, row.reason = "not available", contender.forward
        return row
    if time.monotonic() > give_up_at:
        row.status, row.reason = "not reached", "time limit"
        return row
    try:
        _measure_alone(contender, row, device)
    except torch.OutOfMemoryError:
        row.status = row.reason = "out of memory"
    except Exception as error:  # the row carries it; ours makes the command fail in the end
        row.status = "failed" if contender.group == "ours" else "not available"
        row.reason = f"{type(error).__name__}: {first_line(error):.200}"
        if row.status == "failed":
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
        row.error = contender.check(gradients)
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
