"""``mopd logs``: what the ranks, the orchestrator and the servers of a run wrote, on all nodes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from mopd.base.types import UserError

ABOUT = "print what the processes of a run wrote"
EXAMPLES = """\
examples:
  mopd logs runs/mine --follow
  mopd logs runs/mine --node node-2 --role "rank_*" --lines 50
"""
POLL_S = 0.5
MAX_LINES = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the run's folder")
    add("--follow", action="store_true", help="go on with what is written from now on, until Ctrl-C")
    add("--node", default="*", metavar="N", help="only of this node, or of those that match a pattern (default: all)")
    add(
        "--role",
        default="*",
        metavar="R",
        help="only of this role: launcher, rank_3, orchestrator, teachers.math.0, … (default: all)",
    )
    add("--lines", type=int, default=20, metavar="L", help="last lines of each log (default: %(default)s)")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print each line after ``NODE/ROLE``; the exit code. ``UserError`` for a folder without logs."""
    if not 0 <= args.lines <= MAX_LINES:
        raise UserError(f"--lines is {args.lines}: set 0 to {MAX_LINES}")
    from mopd.report.run_files import Logs

    logs = Logs(args.run / "logs", node=args.node, role=args.role)
    for line in logs.last(args.lines):
        print(line)
    while args.follow:
        time.sleep(POLL_S)
        for line in logs.new():
            print(line, flush=True)
    return 0
