"""``mopd init``: a first recipe from the names of models and data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.cli.plan import add_gpu, given_of

if TYPE_CHECKING:
    from mopd.planning.first_recipe import GivenNames, Layout, Limits

ABOUT = "write a first recipe"
EXAMPLES = """\
examples:
  mopd init --student models/Qwen3-1.7B --teacher math=models/math-expert --teacher code=models/code-expert \\
    --train data/train.parquet --validation data/validation.parquet --output mine.yaml
  mopd init … --gpu h100 --nodes 4 --slurm --output mine.yaml   for a job on four nodes of eight H100
  mopd init … --domains math=gsm8k,aime --domains code=mbpp     which teacher answers for which domain
  mopd init … | mopd check --static                            look at it before it is a file
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add = parser.add_argument
    add("--student", metavar="MODEL", required=True, help="folder, or name of the Hub")
    add("--teacher", metavar="NAME=MODEL", action="append", required=True, help="one for each teacher")
    add("--domains", metavar="NAME=A,B", action="append", default=[], help="a teacher's domains, if not clear by name")
    add("--train", metavar="DATA", nargs="+", required=True, help="parquet or JSONL files, or data sets of the Hub")
    add("--validation", metavar="DATA", nargs="+", default=[], help="held-out prompts; without them, no validation")
    add("--lora", action="store_true", help="train low-rank adapters beside the student's weights")
    add("--run-dir", metavar="FOLDER", default="runs/first", help="folder of the run (default: %(default)s)")
    add_gpu(parser)
    add("--nodes", type=int, metavar="N", help="nodes (default: 1)")
    add("--gpus-per-node", type=int, metavar="N", help="with --gpu (default: those of the GPU's usual server)")
    add("--configs", type=Path, metavar="DIR", help="where DIR/NAME/config.json stands for models that are not here")
    add("--slurm", action="store_true", help="write a section for a Slurm job on these nodes")
    add("--output", type=Path, metavar="FILE", help="recipe file to write; default: standard output")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Write the recipe; the exit code. A file that is there is left alone."""
    from mopd.base.files.writing import write_text
    from mopd.planning.first_recipe import first_recipe, limits_of, read_names

    if args.output is not None and args.output.exists():
        raise UserError(f"--output {shown_path(args.output)}: is there already: remove it or name another file")
    names = read_names(
        args.student,
        args.teacher,
        args.domains,
        train=args.train,
        validation=args.validation,
        run_dir=args.run_dir,
        lora=args.lora,
    )
    limits = limits_of(names, args.configs)
    text = first_recipe(names, _layout(args, names, limits), limits)
    if args.output is None:
        sys.stdout.write(text)
    else:
        write_text(args.output, text)
        print(args.output)
    return 0


def _layout(args: argparse.Namespace, names: GivenNames, limits: Limits) -> Layout:
    """Find the layout of a first recipe on the GPUs that are named, or on those of this machine.

    Raises:
        UserError: nothing fits, or the GPUs are named and a model's config is nowhere.
    """
    from mopd.base.files.temporary import TemporaryFolder
    from mopd.base.hardware import this_hardware
    from mopd.config.load import load_recipe
    from mopd.planning.devices import GIB, rates_of
    from mopd.planning.first_recipe import Layout, first_recipe
    from mopd.planning.suggest import suggest

    is_named = args.gpu is not None or args.gpu_memory is not None
    if not is_named and not this_hardware().num_gpus:
        if args.nodes is not None or args.slurm:
            raise UserError("--nodes and --slurm are of GPUs, and this machine has none: name them with --gpu")
        return Layout(keys={}, reason="one rank, as there is no GPU here: --gpu h100 --nodes 1 lays it out for some")
    given_args = argparse.Namespace(
        **vars(args), suggest=True, probe=False, prompt_length=None, response_length=None, image_length=0.0
    )
    with TemporaryFolder("mopd-init-") as folder:
        draft = Path(folder, "recipe.yaml")
        draft.write_text(first_recipe(names, Layout(keys={}, reason=""), limits), encoding="utf-8")
        try:
            _, given, _, rates = given_of(given_args, load_recipe(draft))
        except UserError as error:
            text = str(error).removeprefix(f"{draft}").lstrip(":0123456789 ")
            raise UserError(f"--gpu: {text}") from error
    best = suggest(given, rates or rates_of("h100"))[0]
    cluster, times = given.cluster, best.split.times
    reason = (
        f"the fastest of what fits {cluster.nodes} x {cluster.gpus_per_node} {cluster.name}, by mopd plan --suggest: "
        f"{times.step_s:.3g} s a step, bound by {times.bound_by}; the fullest GPU has {best.num_bytes / GIB:.1f} of "
        f"{cluster.usable_bytes / GIB:.1f} GiB"
    )
    slurm = {"nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node, "time": "24:00:00"} if args.slurm else {}
    return Layout(keys=best.keys, reason=reason, slurm=slurm)
