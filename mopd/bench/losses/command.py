"""``mopd bench losses``, also ``python -m mopd.bench.losses``: needs torch alone (and triton for its rows).

The contenders of one case run against each other on the same tensors, in one process, in turns.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from mopd.base.text import first_line, one_line
from mopd.base.types import UserError
from mopd.bench.clock import Clock, copy_rate, peak_bytes
from mopd.bench.harness import BenchReport, Comparison, Others, is_disturbed, rounds, say
from mopd.bench.losses.cases import REPEATS, Case, add_arguments, make_cases
from mopd.bench.losses.contenders import BASELINE, FLOOR, Contender, head_baseline, head_contenders, logits_contenders
from mopd.bench.losses.inputs import make_head_inputs, make_inputs

COLUMNS = {
    "loss": "loss:", "forward ms": "forward_ms:,.2f", "fwd+bwd ms": "total_ms:,.2f", "of floor": "floor_share:.0%",
    "x base": "speedup:.2f", "extra, x [T,V] fp32": "extra_over_logits:.3f", "error": "error:.1e",
}  # fmt: skip


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure and print. Return the exit code, 1 if a row of ours failed.

    Raises:
        UserError: impossible options, or a device that is not there.
    """
    has_cuda = torch.cuda.is_available()
    if args.device == "cuda" and not has_cuda:
        raise UserError(f"--device cuda: torch {torch.__version__} sees no CUDA device: set --device cpu")
    kind = args.device or ("cuda" if has_cuda else "cpu")
    cases = make_cases(args, device=kind)
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    give_up_at = math.inf if args.time_limit is None else time.monotonic() + args.time_limit
    if args.tune:
        _tune(cases, device, give_up_at)
    report = BenchReport(benchmark="losses", arguments=arguments, as_json=args.json, device=device, output=args.output)
    for case in cases:
        if time.monotonic() > give_up_at:
            report.not_reached.append(case.title)
            continue
        say(f"measuring {case.title}")
        part, failures = measure_case(case, device, args.repeats or REPEATS[kind], give_up_at)
        report.failures += failures
        report.add(part)
    return report.finish()


def measure_case(case: Case, device: torch.device, repeats: int, give_up_at: float) -> tuple[Comparison, list[str]]:
    """Measure all contenders of one case. Return its table, and lines about those of ours that failed."""
    copied, floor_ms, base = None, None, BASELINE
    if case.hidden is None:
        inputs = make_inputs(case, device)
        entries, copied = logits_contenders(inputs), inputs.logits
        del inputs
    else:
        base, entries = head_baseline(device), head_contenders(make_head_inputs(case, device))
    rows, rate, others_cores = measure(entries, device=device, repeats=repeats, give_up_at=give_up_at, copied=copied)
    del entries, copied
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    floor = "two reads and one write of the logits" if case.hidden is None else FLOOR
    if case.hidden is not None:
        floor_ms = next(row.total_ms for row in rows if row.name == FLOOR)
    elif rate is not None:
        floor_ms = 1000 * 3 * case.rows * case.columns * getattr(torch, case.dtype).itemsize / rate
        floor += f" at the measured copy rate of {rate / 1e9:.1f} GB/s"
    reckoned = "not known" if floor_ms is None else f"{floor_ms:.3g} ms"
    remarks = [
        *(f"{row.name} ({row.loss}): {row.status}: {row.reason}" for row in rows if row.reason is not None),
        f"floor: {floor}: {reckoned}; x base: speed relative to {base!r}",
        "extra: peak memory above inputs and gradients; error of dlogits relative to float64",
    ]
    if is_disturbed(others_cores):
        remarks.append(f"disturbed: other processes kept {others_cores:.1f} cores busy meanwhile: measure again")
    facts: dict[str, Any] = {"case": asdict(case), "floor_ms": floor_ms, "copy_gb_per_s": rate and rate / 1e9}
    facts |= {"base": base, "others_cores": others_cores}
    made = figures(case, rows, base, floor_ms)
    failed = [f"{row.name} ({row.loss}): {row.reason}" for row in rows if row.status == "failed"]
    part = Comparison(title=case.title, columns=COLUMNS, rows=made, facts=facts, remarks=remarks)
    return part, [f"failed: {case.title}: {line}" for line in failed]


def figures(case: Case, rows: Sequence[Row], base: str, floor_ms: float | None) -> list[dict[str, Any]]:
    """Set the rows beside the floor, the baseline and the logits, the fastest first within each loss."""
    base_ms = next((row.total_ms for row in rows if row.name == base), None)
    found = []
    for row in sorted(rows, key=lambda row: (row.loss, row.total_ms or math.inf)):
        own = {**asdict(row), "forward_ms": row.forward_ms, "total_ms": row.total_ms}
        if row.total_ms is not None:
            own |= {"floor_share": floor_ms and floor_ms / row.total_ms, "speedup": base_ms and base_ms / row.total_ms}
        if row.extra_bytes is not None:
            own["extra_over_logits"] = row.extra_bytes / (4 * case.rows * case.columns)
        found.append(own)
    return found


def _tune(cases: Sequence[Case], device: torch.device, give_up_at: float) -> None:
    """Tune shape by shape and store the table after each: what a time limit cuts off is not lost."""
    if device.type != "cuda":
        raise UserError("--tune measures Triton kernels: it needs a CUDA device")
    if find_spec("triton") is None:
        raise UserError("--tune measures Triton kernels: install triton")
    from mopd.losses.triton import table as launches
    from mopd.losses.triton.tuning import tune

    for rows, columns, dtype in dict.fromkeys((case.rows, case.columns, case.dtype) for case in cases):
        if time.monotonic() > give_up_at:
            say(f"not tuned, time limit: T={rows} V={columns} {dtype}")
            continue
        found = tune(device, [(rows, columns)], [getattr(torch, dtype)], report=say)
        launches.save_table(launches.merge(launches.load_table(), found))
    say("stored the table of the Triton layer")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark without the rest of the command line."""
    parser = argparse.ArgumentParser(prog="python -m mopd.bench.losses", description=__doc__)
    add_arguments(parser)
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        return run(parser.parse_args(arguments), ["python", "-m", "mopd.bench.losses", *arguments])
    except UserError as error:
        print(f"mopd: error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mopd: interrupted", file=sys.stderr)
        return 130


WARM_UP_RUNS = {"cuda": 3, "cpu": 1}
"""Number of runs before the first round, beside the one that checks the gradient and the one that counts memory."""
ENOUGH_ROUNDS = 5
ENOUGH_S = {"cuda": 1.0, "cpu": 60.0}
"""A contender with so many rounds that took so long in all sits out the rest, or slow ones would take all the time."""


@dataclass(kw_only=True)
class Row:
    """One contender of one case."""

    name: str
    group: str
    loss: str
    status: Literal["measured", "out of memory", "not available", "failed", "not reached"] = "measured"
    reason: str | None = None
    """Reason for missing numbers, or a remark."""
    forward_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    """Seconds of forward and backward of each round."""
    extra_bytes: int | None = None
    """Peak memory of forward and backward above inputs and gradients."""
    error: float | None = None
    """Error of the gradient against float64: see ``mopd.bench.losses.contenders``."""

    @property
    def forward_ms(self) -> float | None:
        """Median time of forward over rounds."""
        return 1000 * median(self.forward_s) if self.total_ms is not None else None

    @property
    def total_ms(self) -> float | None:
        """Median time of forward and backward over rounds; None if the contender was not measured to the end."""
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
    """Time one more run. If fragmented memory does not suffice, the contender takes no further part."""
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
    """Check the gradient, count peak memory and warm up. Running out of memory is a result; an error of ours is a
    failure of the run."""
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
    """Run once and return the gradients; ``mark`` is called after forward and after backward."""
    assert not isinstance(contender.forward, str)
    loss = contender.forward()
    mark()
    gradients = torch.autograd.grad(loss, contender.leaves, contender.upstream)
    mark()
    return gradients
