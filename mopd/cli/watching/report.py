"""``mopd report``: one HTML page and ``report.json`` of a run, finished or not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mopd.base.text import json_lines

ABOUT = "write report.html and report.json of a run"
EXAMPLES = "example: mopd report runs/quickstart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--json", action="store_true", help="print report.json instead of the table")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Write and print; the exit code. ``UserError`` for a folder that holds no run, or a damaged one."""
    from mopd.report.build import build_report, print_summary

    report = build_report(args.run)
    if args.json:
        print(json_lines(asdict(report)))
    else:
        print_summary(report)
        print(args.run / "report.html")
    return 0
