"""``mopd slurm``: a run as a job of a Slurm cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mopd.cli.ranks import add_recipe
from mopd.config.load import load_recipe

ABOUT = "submit a run to a Slurm cluster"
EXAMPLES = """\
examples:
  mopd slurm my.yaml --dry-run            the job's script; needs no Slurm
  mopd slurm my.yaml                      submit it, into the queue
  mopd slurm my.yaml --wait               and wait for its end; the job's exit code
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add_recipe(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="print the script; write and submit nothing")
    how.add_argument("--wait", action="store_true", help="wait for the job's end and return its exit code")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Check, write the script and submit it; the exit code, with ``--wait`` the job's."""
    from mopd.launch.slurm.submitting import prepare_job, submit_job, wait_for

    job = prepare_job(load_recipe(args.recipe, args.set))
    if args.dry_run:
        print(job.text, end="")
        return 0
    job_id = submit_job(job)
    run = job.folder.parent
    print(f"job {job_id} of {run}: mopd status {run}, mopd logs {run} --follow, mopd stop {run}", flush=True)
    return wait_for(job, job_id) if args.wait else 0
