"""``mopd train``: start the student's ranks; each trains until the recipe's last step."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

from mopd.base.hardware import node_name
from mopd.base.tasks import StopRequested
from mopd.base.types import UserError
from mopd.cli.ranks import add_recipe, on_students_ranks
from mopd.config.load import Loaded, load_recipe
from mopd.launch.failure import STOPPED_CODE, Ended, is_our_launchers, is_rank, leave_stopped, rank_and_world_size
from mopd.launch.node import add_node_arguments, place_of
from mopd.launch.nodes import NodeLostError, Nodes
from mopd.launch.preparing import agreed
from mopd.launch.signals import asked_by_sigterm, outlive_sigterm
from mopd.run.folder import RunDir
from mopd.run.stopping import forget_request, is_users_stop, request_stop

USERS_SIGNALS = (128 + signal.SIGINT, 128 + signal.SIGHUP)
"""Exit codes of a run that a person ended at its terminal, or with it."""

ABOUT = "train a student"
EXAMPLES = """\
examples:
  mopd train recipes/quickstart.yaml schedule.steps=10 run_dir=runs/short   with other values than the recipe's
  mopd train recipes/quickstart.yaml --resume                     go on from the newest complete checkpoint
  mopd train recipes/quickstart.yaml --resume --from step_150     go back to an older one
  mopd train my.yaml --resume auto                                begin, or go on: the same command every time
  torchrun --nproc-per-node 8 -m mopd train my.yaml               the same under your own torchrun
  mopd train my.yaml --nnodes 4 --node-rank 1 --rdzv-endpoint 10.0.0.1:29500   on the second of four nodes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add_recipe(parser)
    parser.add_argument("--resume", action="store_true", help="go on with the run in run_dir")
    auto_help = "the same if there is a run in run_dir, else start it: for a job that is started again and again"
    # A word of its own, which cli.main also makes of two (--resume auto).
    parser.add_argument("--resume=auto", dest="resume_auto", action="store_true", help=auto_help)
    from_help = "with --resume: this checkpoint instead of the newest; later ones are set aside"
    parser.add_argument("--from", dest="from_step", metavar="STEP_N", help=from_help)
    parser.add_argument("--json", action="store_true", help="at the end print report.json instead of the table")
    add_node_arguments(parser)


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Check, start the ranks, wait for their end; the exit code. In a rank: train."""
    if args.from_step is not None and not args.resume:
        raise UserError("--from names a checkpoint to resume from: add --resume")
    if is_rank():
        loaded = agreed(partial(load_recipe, args.recipe, args.set), "train")
        run_dir = RunDir(loaded.recipe.run_dir)
        return on_students_ranks(loaded, arguments, lambda: _train(loaded, run_dir, args)).code
    return start(partial(load_recipe, args.recipe, args.set), args, arguments).code


def start(
    load: Callable[[], Loaded],
    args: argparse.Namespace,
    arguments: Sequence[str],
    watch: Callable[[], None] = lambda: None,
) -> Ended:
    """Check, start this node's ranks with the command line ``arguments``, and wait for their end, which is printed.

    Args:
        load: reads the recipe.
        watch: is called again and again while the ranks run; its error ends them.
    """
    place = place_of(args)
    try:
        with asked_by_sigterm(_stop_now), Nodes(place) as nodes:
            try:
                nodes.join()
                return _launch(load, args, arguments, nodes, watch)
            except NodeLostError:
                from mopd.launch.launch import ended_by_others

                return ended_by_others(nodes)
    except StopRequested as asked:
        print(f"mopd: {asked}", file=sys.stderr)
        return Ended(code=STOPPED_CODE, line=str(asked))


def _stop_now() -> None:
    """End the command: no rank has been started yet."""
    raise StopRequested("SIGTERM")


def _launch(
    load: Callable[[], Loaded],
    args: argparse.Namespace,
    arguments: Sequence[str],
    nodes: Nodes,
    watch: Callable[[], None],
) -> Ended:
    loaded = agreed(load, "train", nodes=nodes)
    run_dir = RunDir(loaded.recipe.run_dir)
    is_new = not run_dir.path.exists()
    is_first = nodes.place.is_first
    is_counted = False

    def checks() -> None:
        nonlocal is_counted
        if is_first:
            _check_folder(loaded, run_dir, args)
            is_counted = args.resume_auto

    if is_first:
        forget_request(run_dir.path)
    try:
        ended = on_students_ranks(
            loaded,
            arguments,
            lambda: None,
            checks,
            nodes=nodes,
            cure=lambda: f"; {run_dir.cure()}",
            ask=lambda: request_stop(run_dir.path, f"SIGTERM on {node_name()}"),
            watch=watch,
        )
    except KeyboardInterrupt:
        if is_counted:
            _note_end(run_dir, "interrupted", is_users=True)
        raise
    if ended.line:
        run_dir.log_launch(ended.line)
    if is_first:
        if is_counted:
            is_users = ended.code in USERS_SIGNALS or (ended.code == STOPPED_CODE and is_users_stop(run_dir.path))
            _note_end(run_dir, ended.line, is_users=is_users)
        if ended.code != 0 and is_new:
            run_dir.discard_if_unused()
    return ended


def _note_end(run_dir: RunDir, line: str, *, is_users: bool) -> None:
    from mopd.run import resuming

    resuming.note_end(run_dir, line, is_users=is_users)


def _check_folder(loaded: Loaded, run_dir: RunDir, args: argparse.Namespace) -> None:
    """Refuse what a rank would refuse, before ranks start, and credentials that Weights & Biases refuses."""
    from mopd.report.sinks import verify_wandb
    from mopd.run import resuming
    from mopd.run.manifests import check_commits, check_plugins, plugin_hashes

    resume = _resumes(args, run_dir)
    resuming.check_layout(run_dir)
    run_dir.check(loaded, resume=resume)
    if resume and resuming.choose(run_dir, loaded.recipe, wanted=args.from_step) is not None:
        resuming.check_files(run_dir)
        check_commits(run_dir.manifest, loaded.commits)
        check_plugins(run_dir.manifest, plugin_hashes(loaded.recipe))
    if loaded.recipe.metrics.wandb is not None:
        verify_wandb(loaded.recipe.metrics.wandb)
    if args.resume_auto:
        resuming.count_start(run_dir)


def _resumes(args: argparse.Namespace, run_dir: RunDir) -> bool:
    """``--resume=auto`` goes on with a run that has begun."""
    return bool(args.resume or (args.resume_auto and run_dir.recipe.is_file()))


def _train(loaded: Loaded, run_dir: RunDir, args: argparse.Namespace) -> int:
    """Train on this rank from the newest checkpoint or the one that ``--from`` names (``step_100``); the exit code.

    Raises:
        UserError: anything the user can cure; nothing is half-written.
    """
    with run_dir.telling():
        if rank_and_world_size()[0]:
            return _follow(loaded, run_dir)
        return _lead(loaded, run_dir, args)


def _follow(loaded: Loaded, run_dir: RunDir) -> int:
    from mopd.launch.leading import follow_rank_0

    outlive_sigterm()
    if not follow_rank_0(loaded.recipe, run_dir.logs_here):
        return 0
    leave_stopped("")
    return STOPPED_CODE


def _lead(loaded: Loaded, run_dir: RunDir, args: argparse.Namespace) -> int:
    from mopd.launch.leading import start_orchestrator
    from mopd.report.terminal import log_to_terminal

    log_to_terminal()
    if not is_our_launchers():  # which has done it
        forget_request(run_dir.path)
    options = {"resume": _resumes(args, run_dir), "from_step": args.from_step, "as_json": args.json}
    ask = partial(request_stop, run_dir.path, f"SIGTERM on {node_name()}")
    stopped = start_orchestrator(loaded, "train", options, run_dir, ask)
    if stopped is None:
        return 0
    leave_stopped(stopped)
    return STOPPED_CODE
