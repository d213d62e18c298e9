"""``mopd bench losses``, also ``python -m mopd.bench.losses``: needs torch alone (and triton for its rows)."""

from __future__ import annotations

import argparse
import gc
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from typing import Any

import torch

from mopd import __version__
from mopd.bench.clock import Copy
from mopd.bench.losses import heads, released
from mopd.bench.losses.contenders import BASELINE, logits_contenders
from mopd.bench.losses.inputs import make_head_inputs, make_inputs
from mopd.bench.losses.measure import Deadline, measure
from mopd.bench.losses.plan import REPEATS, Case, add_arguments, make_cases
from mopd.bench.losses.results import BenchReport, CaseResult, plot, table
from mopd.files.writing import write_text
from mopd.text import one_line
from mopd.types import UserError


def run(args: argparse.Namespace, command: str) -> int:
    """Measure what the options name; ``command`` goes into the result. Returns 1 if a row of ours failed.

    Raises:
        UserError: impossible options, or a device that is not there.
    """
    has_cuda = torch.cuda.is_available()
    if args.device == "cuda" and not has_cuda:
        raise UserError(f"--device cuda: torch {torch.__version__} sees no CUDA device: set --device cpu")
    kind = args.device or ("cuda" if has_cuda else "cpu")
    cases = make_cases(args, device=kind)
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    deadline = Deadline(args.time_limit)
    if args.tune:
        _tune(cases, device, deadline)
    report = BenchReport(
        machine=machine(device),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        repeats=REPEATS[kind] if args.repeats is None else args.repeats,
    )
    try:
        for case in cases:
            if deadline.passed:
                report.not_reached.append(case.title)
                continue
            report.cases.append(_measure(case, args.seed, device, deadline, report.repeats))
            if args.output is not None:  # after every shape: what is known so far
                write_text(args.output, report.to_json())
            if not args.json:
                table(report.cases[-1])
    finally:
        released.close()
    report.complete = not report.not_reached
    if args.output is not None:
        write_text(args.output, report.to_json())
    if args.plot is not None:
        plot(report, args.plot)
    if args.json:
        sys.stdout.write(report.to_json())
    for title in report.not_reached:
        _say(f"not measured, time limit: {title}")
    for line in report.failures:
        _say(f"failed: {line}")
    return 1 if report.failures else 0


def _measure(case: Case, seed: int, device: torch.device, deadline: Deadline, repeats: int) -> CaseResult:
    _say(f"measuring {case.title}")
    copy = None
    if case.hidden is None:
        inputs = make_inputs(case, device, seed)
        result = CaseResult(case=case, baseline=BASELINE, floor="two reads and one write of the logits")
        entries, copy = logits_contenders(inputs), Copy(inputs.logits)
        del inputs
    else:
        result = CaseResult(case=case, baseline=heads.baseline(device), floor=heads.FLOOR)
        entries = heads.head_contenders(make_head_inputs(case, device, seed))
    result.rows, rate, result.others_cores = measure(
        entries, device=device, repeats=repeats, deadline=deadline, copy=copy
    )
    if rate is not None:
        num_bytes = 3 * case.rows * case.columns * getattr(torch, case.dtype).itemsize
        result.copy_gb_per_s, result.floor_ms = rate / 1e9, 1000 * num_bytes / rate
    elif case.hidden is not None:
        result.floor_ms = next(row.total_ms for row in result.rows if row.name == heads.FLOOR)
    result.finish()
    del entries, copy
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    found: dict[str, Any] = {
        "device": device.type,
        "name": _cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mopd": __version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "cuda": torch.version.cuda,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
        }
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except FileNotFoundError:  # not Linux
        return platform.processor()
    return names[0] if names else platform.processor()


def _tune(cases: Sequence[Case], device: torch.device, deadline: Deadline) -> None:
    """Tune shape by shape and store the table after each: what a time limit cuts off is not lost."""
    if device.type != "cuda":
        raise UserError("--tune measures Triton kernels: it needs a CUDA device")
    if find_spec("triton") is None:
        raise UserError("--tune measures Triton kernels: install triton")
    from mopd.losses.triton import table as launches
    from mopd.losses.triton.tuning import tune

    shapes = dict.fromkeys((case.rows, case.columns, case.dtype) for case in cases)
    for rows, columns, dtype in shapes:
        if deadline.passed:
            _say(f"not tuned, time limit: T={rows} V={columns} {dtype}")
            continue
        found = tune(device, [(rows, columns)], [getattr(torch, dtype)], report=_say)
        launches.save_table(launches.merge(launches.load_table(), found))
    _say("stored the table of the Triton layer")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The benchmark without the rest of the command line."""
    parser = argparse.ArgumentParser(prog="python -m mopd.bench.losses", description=__doc__)
    add_arguments(parser)
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        return run(parser.parse_args(arguments), shlex.join(["python", "-m", "mopd.bench.losses", *arguments]))
    except UserError as error:
        print(f"mopd: error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mopd: interrupted", file=sys.stderr)
        return 130
