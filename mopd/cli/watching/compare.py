"""``mopd compare``: two or more runs side by side, finished or not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mopd.base.files.writing import write_text
from mopd.base.text import json_lines

ABOUT = "two or more runs side by side"
EXAMPLES = "example: mopd compare runs/quickstart runs/higher_lr --html compare.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, or files of `mopd eval --json`"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one page with tables and curves")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print, and write the page; the exit code. ``UserError`` for a folder that holds no run, or a damaged one."""
    from mopd.report.compare import comparison, comparison_page, print_comparison, read_runs

    runs = read_runs(args.runs)
    if args.html is not None:
        write_text(args.html, comparison_page(runs))
    if args.json:
        print(json_lines(comparison(runs)))
    else:
        print_comparison(runs)
        if args.html is not None:
            print(args.html)
    return 0
