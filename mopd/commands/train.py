"""``mopd train``: start the student's ranks; each trains until the recipe's last step."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from mopd.commands.ranks import add_recipe, on_students_ranks
from mopd.config.load import Loaded, load_recipe
from mopd.launch.failure import rank_and_world_size
from mopd.run.folder import RunDir
from mopd.run.preparing import prepare
from mopd.types import UserError

logger = logging.getLogger(__name__)

ABOUT = "train a student"
EXAMPLES = "example: mopd train recipes/quickstart.yaml --resume"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add_recipe(parser)
    parser.add_argument("--resume", action="store_true", help="go on with the run in run_dir")
    from_help = "with --resume: this checkpoint instead of the newest; later ones are set aside"
    parser.add_argument("--from", dest="from_step", metavar="STEP_N", help=from_help)
    parser.add_argument("--json", action="store_true", help="at the end print report.json instead of the table")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Check, start the ranks, wait for their end; the exit code. In a rank: train."""
    if args.from_step is not None and not args.resume:
        raise UserError("--from names a checkpoint to resume from: add --resume")
    loaded = prepare(load_recipe(args.recipe, args.set))
    run_dir = RunDir(loaded.recipe.run_dir)

    def checks() -> None:
        from mopd.run import resuming
        from mopd.run.manifests import check_commits

        resuming.check_layout(run_dir)
        run_dir.check(loaded, resume=args.resume)
        if args.resume and resuming.choose(run_dir, loaded.recipe, wanted=args.from_step) is not None:
            resuming.check_files(run_dir)
            check_commits(run_dir.manifest, loaded.commits)

    is_new = not run_dir.path.exists()
    cure = "; go on with --resume"
    code = on_students_ranks(loaded, arguments, lambda: _train(loaded, run_dir, args), checks, cure=cure)
    if code != 0 and is_new:
        run_dir.discard_if_unused()
    return code


def _train(loaded: Loaded, run_dir: RunDir, args: argparse.Namespace) -> None:
    """On this rank, from the newest checkpoint or the one that ``--from`` names (``step_100``).

    Raises:
        UserError: anything the user can cure; nothing is half-written.
    """
    from mopd.producer.leading import lead_training
    from mopd.report.terminal import log_to_terminal
    from mopd.run import resuming
    from mopd.run.leading import follow
    from mopd.run.manifests import check_commits, check_unchanged, make_manifests
    from mopd.run.training import Led, begin, fresh_ledger, load_checkpoint, train

    with run_dir.telling():
        if rank_and_world_size()[0]:
            follow(loaded.recipe)
            return
        log_to_terminal()
        with run_dir:
            resuming.check_layout(run_dir)
            run_dir.open(loaded, resume=args.resume)
            manifests = make_manifests(loaded.recipe)
            start = resuming.choose(run_dir, loaded.recipe, wanted=args.from_step) if args.resume else None
            if start is not None:
                check_commits(run_dir.manifest, loaded.commits)
                check_unchanged(run_dir.manifest, manifests)
            elif args.resume:
                logger.warning("%s has no complete checkpoint: the run starts again from step 0", run_dir.checkpoints)

            async def work(led: Led) -> None:
                recipe, is_fresh = loaded.recipe, start is None
                ledger = fresh_ledger(recipe) if start is None else await load_checkpoint(recipe, run_dir, led, start)
                await led.student.publish(ledger.step)
                await begin(loaded, run_dir, led.maker, manifests, is_fresh=is_fresh)
                await train(recipe, run_dir, led, ledger, is_fresh=is_fresh, as_json=args.json)

            lead_training(loaded.recipe, run_dir, work)
