"""``mopd score``: teachers' scores of stored responses, kept for runs to read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from mopd.base.text import json_lines
from mopd.cli.ranks import add_recipe
from mopd.config.load import load_recipe
from mopd.launch.preparing import agreed

ABOUT = "have the teachers score stored responses, without a student"
EXAMPLES = """\
examples:
  mopd score my.yaml data.scored='[runs/mine/samples]' schedule.on_policy_fraction=0 data.scores_cache=scores
  mopd score my.yaml --texts answers.jsonl   rows with prompt, response, domain; makes the samples of data.scored first
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add_recipe(parser)
    help_ = "JSONL or parquet with columns prompt, response, domain; once for each"
    parser.add_argument("--texts", action="append", default=[], metavar="FILE", help=help_)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Score, print what was done; the exit code. A command that was cut off goes on where it was."""
    loaded = agreed(partial(load_recipe, args.recipe, args.set), "score")
    from mopd.launch.checks.inputs import check_inputs
    from mopd.orchestrator.tasks.scoring import score
    from mopd.placement.gpus import check_gpus
    from mopd.report.terminal import log_to_terminal

    log_to_terminal()
    check_inputs(loaded)
    check_gpus(loaded, [f"teachers.{name}" for name in loaded.recipe.teachers])
    done = score(loaded.recipe, texts=args.texts)
    if args.json:
        print(json_lines(done))
    else:
        print(
            f"{done['prompts']} prompts, {done['response_tokens']} response tokens in {done['wall_s']:.1f} s, "
            f"{done['scores_found_share']:.0%} were found: {done['scores_cache']} "
            f"({done['scores_cache_bytes'] / 2**20:.1f} MiB)"
        )
    return 0
