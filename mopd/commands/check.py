"""``mopd check``: the checks before a run, without the run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mopd.commands.ranks import add_recipe, on_students_ranks
from mopd.config.load import Loaded, load_recipe
from mopd.launch.failure import rank_and_world_size
from mopd.run.preparing import prepare
from mopd.text import json_lines
from mopd.types import UserError

ABOUT = "run the checks before a run"
EXAMPLES = "example: mopd check recipes/quickstart.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add_recipe(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start the ranks, wait for their end; the exit code. In a rank: check."""
    loaded = prepare(load_recipe(args.recipe, args.set))
    return on_students_ranks(loaded, arguments, lambda: _check(loaded, as_json=args.json))


def _check(loaded: Loaded, *, as_json: bool) -> None:
    """Run the preflight on this rank and print its outcomes; writes nothing. ``UserError`` for the first failed one."""
    from mopd.preflight.checks import Check, Preflight
    from mopd.report.terminal import log_to_terminal
    from mopd.run.leading import follow, lead
    from mopd.run.manifests import make_manifests
    from mopd.run.workers import Workers

    if rank_and_world_size()[0]:
        follow(loaded.recipe)
        return
    log_to_terminal()
    manifests = make_manifests(loaded.recipe)

    async def work(workers: Workers) -> None:
        await workers.student.publish(0)
        checks: list[Check] = []
        async for outcome in Preflight(loaded.recipe, workers, manifests, is_fresh=True).run():
            checks.append(outcome)
            if outcome.status == "failed":
                break
        if as_json:
            print(json_lines([{"name": c.name, "status": c.status, "detail": c.detail} for c in checks]))
        else:
            _print_table([(check.name, check.status, check.detail) for check in checks])
        if checks[-1].status == "failed":
            raise UserError(checks[-1].detail)

    lead(loaded.recipe, None, work)


def _print_table(rows: Sequence[tuple[str, str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from mopd.report.terminal import Terminal

    table = Table("check", "status", "detail")
    colours = {"ok": "green", "failed": "red", "warning": "yellow", "skipped": "dim"}
    for name, status, detail in rows:
        table.add_row(name, Text(status, style=colours[status]), detail)
    Terminal().print(table)
