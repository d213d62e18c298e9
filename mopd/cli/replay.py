"""``mopd replay``: train with other settings on the very samples of a run, in their order, from the same start."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.cli import train
from mopd.config.load import load_recipe
from mopd.report.run_files import RunFiles

ABOUT = "train another loss on the very samples of a run"
EXAMPLES = """\
examples:
  mopd replay runs/mine loss.type=topk_reverse_kl
  mopd replay runs/mine student.optimizer.lr=2e-6 run_dir=runs/mine-lr --steps 50
  mopd compare runs/mine runs/mine-replay-topk_reverse_kl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="folder of a run with metrics.keep_samples: true")
    add("set", metavar="KEY=VALUE", nargs="*", action="extend", default=[], help="keys of the run's recipe to change")
    add("--set", metavar="KEY=VALUE", dest="set", action="append", default=[], help=argparse.SUPPRESS)
    add("--steps", type=int, metavar="N", help="optimizer steps (default: those of the run)")
    add("--resume", action="store_true", help="go on with a replay that was begun")
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Do as the ``mopd train`` that it prints, with the run's recipe and samples; return the exit code."""
    files = RunFiles(args.run)
    files.require_run()
    overrides = _overrides(files, args)
    _require_steps(files, load_recipe(files.recipe, overrides).recipe.schedule.steps)
    flags = [f"--{name}" for name in ("resume", "json") if getattr(args, name)]
    command = ["train", str(files.recipe), *overrides, *flags]
    print(f"mopd {shlex.join(command)}", file=sys.stderr)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return train.run(parser.parse_args(command[1:]), command)


def _overrides(files: RunFiles, args: argparse.Namespace) -> list[str]:
    """Return what a replay changes of the run's recipe, the user's own keys last."""
    recipe = load_recipe(files.recipe).recipe
    changes: dict[str, Any] = {
        "loss.temperature": recipe.loss.temperature,
        "data.scored": [str(files.samples_kept)],
        "data.scores_cache": recipe.data.scores_cache or str(files.path / "scores"),
        "schedule.on_policy_fraction": 0,
        "schedule.max_staleness": 0,
        "schedule.sync_every_steps": 1,
        "rollout.on_new_weights": "auto",
        # the samples have their lengths and domains already
        "rollout.horizon": None,
        "data.domain_weights": {},
        "metrics.keep_samples": False,
    }
    # a loss of another type would begin with its own defaults, and ask for other scores than those that are kept
    changes |= {"loss.top_k": recipe.loss.top_k} if recipe.loss.top_k else {}
    changes |= {} if args.steps is None else {"schedule.steps": args.steps}
    overrides: list[str] = [f"{key}={json.dumps(value)}" for key, value in changes.items()] + args.set
    replayed = load_recipe(files.recipe, overrides).recipe
    if replayed.run_dir == recipe.run_dir:
        target = f"{os.path.normpath(files.path)}-replay-{replayed.loss.type}"
        overrides.insert(0, f"run_dir={json.dumps(target)}")
    return overrides


def _require_steps(files: RunFiles, steps: int) -> None:
    """Raise ``UserError`` unless the run has kept the samples of its first ``steps`` steps."""
    from mopd.base.files.records import Records
    from mopd.orchestrator.kept.samples import steps_of

    kept = {*steps_of(Records(files.samples_kept))}
    first = next((step for step in range(1, steps + 1) if step not in kept), None)
    if first is not None:
        cure = f"set --steps {first - 1}" if first > 1 else "train a run with metrics.keep_samples: true from its start"
        raise UserError(
            f"{shown_path(files.samples_kept)} does not hold the samples of step {first} of {steps}: {cure}"
        )
