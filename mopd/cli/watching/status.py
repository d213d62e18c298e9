"""``mopd status``: how a run does."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mopd.base.text import json_lines, one_line

if TYPE_CHECKING:
    from mopd.run.status import RunStatus

ABOUT = "tell how a run does: its steps, checkpoints, servers"
EXAMPLES = "example: mopd status runs/quickstart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Look once and print; the exit code. ``UserError`` for a folder that holds no run."""
    from mopd.launch.slurm.job import job_of
    from mopd.run.status import status_of

    status = status_of(args.run)
    job = job_of(args.run / "job" / "job.json")
    if args.json:
        print(json_lines({**asdict(status), "job": job}))
    else:
        for name, value in [*_lines(status), *([] if job is None else [("slurm", job)])]:
            print(f"{name:<11}{one_line(value)}")
    return 0


def _lines(status: RunStatus) -> Iterator[tuple[str, str]]:
    yield "run", f"{status.run} {status.state}"
    if status.stop is not None:
        yield "stop", f"asked for by {status.stop}"
    if status.steps is not None:
        age = "" if status.last_step_age_s is None else f", the last one {_duration(status.last_step_age_s)} ago"
        yield "step", f"{status.step} of {status.steps}{age}"
        steps = status.checkpoints
        yield "checkpoint", f"after step {steps[-1]}, {len(steps)} in all" if steps else "none yet"
    if status.starts is not None:
        yield "starts", f"{status.starts} by --resume=auto since the newest checkpoint"
    for server in status.servers:
        state = "alive" if server.is_alive else f"silent for {_duration(server.silent_s)}"
        yield "server", f"{server.group} {server.url} on {server.host}: {state}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
