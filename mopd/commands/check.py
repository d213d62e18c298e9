"""``mopd check``: the checks before a run, without the run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mopd.commands.ranks import add_recipe, on_students_ranks
from mopd.config.load import Loaded, draft_recipe, load_recipe
from mopd.config.reading.tree import STANDARD_INPUT
from mopd.launch.failure import is_rank, rank_and_world_size
from mopd.launch.node import add_node_arguments, node_of_step, place_of
from mopd.run.preparing import agreed
from mopd.tasks import Stop
from mopd.text import json_lines, one_line
from mopd.types import UserError

if TYPE_CHECKING:
    from mopd.preflight.inputs import Check

ABOUT = "run the checks before a run"
EXAMPLES = """\
examples:
  mopd check recipes/quickstart.yaml            every mistake in recipe, files and data, then the models
  mopd check recipes/quickstart.yaml --static   what needs no model, in about a second
  mopd init … | mopd check --static             of a recipe from standard input
  mopd check my.yaml --nodes --nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29400   on each of two nodes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add_recipe(parser, default="-")
    parser.add_argument("--static", action="store_true", help="only what needs no model and fetches nothing")
    parser.add_argument("--nodes", action="store_true", help="one process on each node: do the nodes go together?")
    add_node_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Check what needs no model; then start the ranks and wait for their end; the exit code. In a rank: check."""
    if args.nodes:
        return _check_nodes(args)
    if args.nnodes > 1:
        raise UserError(f"--nnodes {args.nnodes} is for the check of several nodes: add --nodes, or leave it out")
    if not is_rank():
        failed = _check_statically(args)
        if args.static or failed:
            return 2 if failed else 0
    loaded = agreed(partial(load_recipe, args.recipe, args.set), "check")
    return on_students_ranks(loaded, arguments, lambda: _check(loaded, as_json=args.json)).code


def _check_nodes(args: argparse.Namespace) -> int:
    """On one of several nodes: whether they go together; the exit code, the same on all. In a Slurm step, whose
    nodes share an output, node 0 alone prints."""
    from mopd.preflight.nodes.conducting import check_nodes

    if args.recipe == STANDARD_INPUT:
        raise UserError("recipe: every node has to read it: write it to a file and name that")
    step = node_of_step()
    if step is not None and args.nnodes == 1:
        args.nnodes, args.node_rank = step
    place = place_of(args)
    checks = check_nodes(place, lambda: load_recipe(args.recipe, args.set))
    failed = any(check.status == "failed" for check in checks)
    if place.is_first or step is None:
        if args.json or not failed:
            _print(checks, as_json=args.json)
        _print_failures(checks)
    return 2 if failed else 0


def _check_statically(args: argparse.Namespace) -> bool:
    """Whether anything failed. Prints the outcomes, without ``--static`` and ``--json`` only the lines of those."""
    from mopd.hardware import this_hardware
    from mopd.preflight.static import StaticChecks

    checks = list(StaticChecks(draft_recipe(args.recipe, args.set), this_hardware()).run())
    failed = any(check.status == "failed" for check in checks)
    if args.static or (args.json and failed):
        _print(checks, as_json=args.json)
    _print_failures(checks)
    return failed


def _check(loaded: Loaded, *, as_json: bool) -> None:
    """Run the preflight on this rank and print its outcomes; writes nothing. ``UserError`` for failed ones."""
    from mopd.launch.ranks import StudentGroup
    from mopd.preflight.checks import Preflight
    from mopd.report.terminal import log_to_terminal
    from mopd.run.leading import follow, lead
    from mopd.run.manifests import make_manifests
    from mopd.run.workers import Workers

    if rank_and_world_size()[0]:
        follow(loaded.recipe)
        return
    log_to_terminal()
    manifests = make_manifests(loaded.recipe)

    async def work(workers: Workers, student: StudentGroup, _: Stop) -> None:
        await student.publish(0)
        preflight = Preflight(loaded.recipe, workers, student, manifests, is_fresh=True)
        checks = [outcome async for outcome in preflight.run()]
        failed = [check for check in checks if check.status == "failed"]
        _print(checks, as_json=as_json)
        _print_failures(failed[:-1])
        if failed:
            raise UserError(failed[-1].detail)

    lead(loaded.recipe, None, work)


def _print(checks: Sequence[Check], *, as_json: bool) -> None:
    """All of them as a table or as JSON."""
    if as_json:
        print(json_lines([{"name": c.name, "status": c.status, "detail": c.detail} for c in checks]))
    else:
        _print_table(checks)
    sys.stdout.flush()


def _print_failures(checks: Sequence[Check]) -> None:
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
