"""Output of checks on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mopd.base.text import json_lines, one_line

if TYPE_CHECKING:
    from mopd.launch.checks.inputs import Check


def print_checks(checks: Sequence[Check], *, as_json: bool) -> None:
    """Print all of them as a table or as JSON."""
    if as_json:
        rows = [{"name": c.name, "status": c.status, "detail": c.detail} for c in checks]
        numbers = [{} if c.numbers is None else {"numbers": dict(c.numbers)} for c in checks]
        print(json_lines([row | more for row, more in zip(rows, numbers, strict=True)]))
    else:
        _print_table(checks)
    sys.stdout.flush()


def print_failures(checks: Sequence[Check]) -> None:
    """Print a line on standard error for each that failed."""
    for check in checks:
        if check.status == "failed":
            print(f"mopd: error: {one_line(check.detail)}", file=sys.stderr)


def _print_table(checks: Sequence[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    from mopd.report.terminal import Terminal

    table = Table("check", "status", "detail")
    colours = {"ok": "green", "failed": "red", "warning": "yellow", "skipped": "dim"}
    for check in checks:
        table.add_row(check.name, Text(check.status, style=colours[check.status]), check.detail)
    Terminal().print(table)
