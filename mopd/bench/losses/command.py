"""``mopd bench losses``, also ``python -m mopd.bench.losses``: needs torch alone (and triton for its rows)."""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch

from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.bench.harness import BenchReport, Comparison, is_disturbed, say
from mopd.bench.losses.cases import REPEATS, Case, add_arguments, make_cases
from mopd.bench.losses.contenders import BASELINE, FLOOR, head_baseline, head_contenders, logits_contenders
from mopd.bench.losses.inputs import make_head_inputs, make_inputs
from mopd.bench.losses.measure import Row, measure

COLUMNS = {
    "loss": "loss:",
    "forward ms": "forward_ms:,.2f",
    "fwd+bwd ms": "total_ms:,.2f",
    "of floor": "floor_share:.0%",
    "x base": "speedup:.2f",
    "extra, x [T,V] fp32": "extra_over_logits:.3f",
    "error": "error:.1e",
}


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure and print; the exit code, 1 if a row of ours failed.

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
    """All contenders of one case, and what failed of ours."""
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
    part = Comparison(
        title=case.title, columns=COLUMNS, rows=figures(case, rows, base, floor_ms), facts=facts, remarks=remarks
    )
    return part, [
        f"failed: {case.title}: {row.name} ({row.loss}): {row.reason}" for row in rows if row.status == "failed"
    ]


def figures(case: Case, rows: Sequence[Row], base: str, floor_ms: float | None) -> list[dict[str, Any]]:
    """Rows beside the floor, the baseline and the logits, the fastest first within each loss."""
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
    """The benchmark without the rest of the command line."""
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
