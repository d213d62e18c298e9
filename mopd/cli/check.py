"""``mopd check``: the checks before a run, without the run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mopd.base.types import UserError
from mopd.cli.ranks import add_recipe, on_students_ranks
from mopd.config.load import Loaded, draft_recipe, load_recipe
from mopd.config.reading.tree import STANDARD_INPUT
from mopd.launch.failure import is_rank, rank_and_world_size
from mopd.launch.node import add_node_arguments, node_of_step, place_of
from mopd.launch.preparing import agreed
from mopd.orchestrator.preflight.showing import print_checks, print_failures

ABOUT = "run the checks before a run"
EXAMPLES = """\
examples:
  mopd check recipes/quickstart.yaml            every mistake in recipe, files and data, then the models
  mopd check recipes/quickstart.yaml --static   what needs no model, in about a second
  mopd init … | mopd check --static             of a recipe from standard input
  mopd check my.yaml --beside math=models/math   what the quantised teacher math costs, beside its plain folder
  mopd check my.yaml --nodes --nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29400   on each of two nodes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add_recipe(parser, default="-")
    parser.add_argument("--static", action="store_true", help="only what needs no model and fetches nothing")
    parser.add_argument("--nodes", action="store_true", help="one process on each node: do the nodes go together?")
    add_node_arguments(parser)
    about = "also: what the teacher NAME's low precision costs beside this plain model; once for each"
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=FOLDER", help=about)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Check what needs no model; then start the ranks and wait for their end; the exit code. In a rank: check."""
    beside = _read_beside(args)
    if args.nodes:
        return _check_nodes(args)
    if args.nnodes > 1:
        raise UserError(f"--nnodes {args.nnodes} is for the check of several nodes: add --nodes, or leave it out")
    if not is_rank():
        failed = _check_statically(args)
        if args.static or failed:
            return 2 if failed else 0
    further = {f"--beside {name}": folder for name, folder in beside.items()}
    loaded = agreed(partial(load_recipe, args.recipe, args.set), "check", further_models=further)
    beside = {name: str(Path(*loaded.located.get(folder, (folder,)))) for name, folder in beside.items()}

    def checks() -> None:
        if beside:
            from mopd.orchestrator.preflight.precision import check_beside

            check_beside(loaded.recipe, beside)

    return on_students_ranks(loaded, arguments, lambda: _check(loaded, beside, as_json=args.json), checks).code


def _read_beside(args: argparse.Namespace) -> dict[str, str]:
    """Return teacher -> plain folder of ``--beside``. ``UserError`` for a word that is none, or beside what loads no
    model."""
    found: dict[str, str] = {}
    for word in args.beside:
        name, _, folder = word.partition("=")
        if not (name and folder):
            raise UserError(f"--beside {word!r}: write NAME=FOLDER, a teacher of the recipe and its plain model")
        if name in found:
            raise UserError(f"--beside names {name!r} twice: name it once")
        found[name] = folder
    if found and (args.static or args.nodes):
        raise UserError(f"--beside loads models, and --{'static' if args.static else 'nodes'} does not: leave one out")
    return found


def _check_nodes(args: argparse.Namespace) -> int:
    """Check from one of several nodes whether they go together; return the exit code, the same on all. In a Slurm step,
    whose nodes share an output, node 0 alone prints."""
    from mopd.launch.checks.conducting import check_nodes

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
            print_checks(checks, as_json=args.json)
        print_failures(checks)
    return 2 if failed else 0


def _check_statically(args: argparse.Namespace) -> bool:
    """Return whether anything failed. Prints the outcomes, without ``--static`` and ``--json`` only the lines of
    those."""
    from mopd.base.hardware import this_hardware
    from mopd.launch.checks.static import StaticChecks

    checks = list(StaticChecks(draft_recipe(args.recipe, args.set), this_hardware()).run())
    failed = any(check.status == "failed" for check in checks)
    if args.static or (args.json and failed):
        print_checks(checks, as_json=args.json)
    print_failures(checks)
    return failed


def _check(loaded: Loaded, beside: dict[str, str], *, as_json: bool) -> None:
    """Run the preflight with this rank; writes nothing. ``UserError`` for failed checks."""
    from mopd.launch.leading import follow_rank_0, start_orchestrator
    from mopd.report.terminal import log_to_terminal

    if rank_and_world_size()[0]:
        follow_rank_0(loaded.recipe)
    else:
        log_to_terminal()
        start_orchestrator(loaded, "check", {"as_json": as_json, "beside": beside})
