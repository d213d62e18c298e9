"""``mopd eval``: validation rewards of a Hugging Face folder or of a checkpoint of a run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.cli.ranks import add_recipe, on_students_ranks
from mopd.config.load import Loaded, load_recipe
from mopd.launch.failure import rank_and_world_size
from mopd.launch.preparing import agreed

ABOUT = "validation rewards of a model"
EXAMPLES = "example: mopd eval my.yaml --model runs/mine/hf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add_recipe(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    which = parser.add_mutually_exclusive_group()
    model_help = "Hugging Face folder or name of the Hub; default: student.model"
    which.add_argument("--model", metavar="FOLDER", help=model_help)
    which.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="checkpoint folder of a run")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start the ranks, wait for their end; the exit code. In a rank: evaluate."""
    further = {} if args.model is None else {"--model": args.model}
    # A checkpoint is read by all ranks, a folder by rank 0 alone.
    options = further if args.checkpoint is None else {"--checkpoint": str(args.checkpoint)}
    loaded = agreed(partial(load_recipe, args.recipe, args.set), "eval", options, further_models=further)
    model = None if args.model is None else Path(*loaded.located.get(args.model, (args.model,)))
    if loaded.recipe.validation is None:
        raise UserError(f"{loaded.path}: eval needs validation: add a validation section")

    def checks() -> None:
        from mopd.launch.checks.inputs import check_model_folder

        if model is not None:
            check_model_folder(model, "--model")
        if args.checkpoint is not None and not os.path.isfile(args.checkpoint / "manifest.json"):
            shown = shown_path(args.checkpoint)
            raise UserError(f"--checkpoint: {shown!r} is no complete checkpoint (no manifest.json): name a step folder")

    def work() -> None:
        _evaluate(loaded, model, args.checkpoint, as_json=args.json)

    return on_students_ranks(loaded, arguments, work, checks, groups=("rollout",)).code


def _evaluate(loaded: Loaded, model: Path | None, checkpoint: Path | None, *, as_json: bool) -> None:
    """Evaluate on this rank. All ranks read a checkpoint; the orchestrator alone reads a Hugging Face folder."""
    from mopd.launch.leading import follow_rank_0, start_orchestrator

    if rank_and_world_size()[0] == 0:
        named = {"model": model, "checkpoint": checkpoint}
        options = {name: None if path is None else str(path) for name, path in named.items()}
        start_orchestrator(loaded, "eval", {**options, "as_json": as_json})
    elif checkpoint is not None:
        follow_rank_0(loaded.recipe)
