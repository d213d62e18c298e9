"""``mopd init``: a first recipe from the names of models and data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mopd.base.files.reading import shown_path
from mopd.base.types import UserError

ABOUT = "write a first recipe"
EXAMPLES = """\
examples:
  mopd init --student models/Qwen3-1.7B --teacher math=models/math-expert --teacher code=models/code-expert \\
    --train data/train.parquet --validation data/validation.parquet --output mine.yaml
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
    add("--run-dir", metavar="FOLDER", default="runs/first", help="folder of the run (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="recipe file to write; default: standard output")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Write the recipe; the exit code. A file that is there is left alone."""
    from mopd.base.files.writing import write_text
    from mopd.base.hardware import this_hardware
    from mopd.planning.first_recipe import first_recipe, read_names

    if args.output is not None and args.output.exists():
        raise UserError(f"--output {shown_path(args.output)}: is there already: remove it or name another file")
    names = read_names(
        args.student, args.teacher, args.domains, train=args.train, validation=args.validation, run_dir=args.run_dir
    )
    text = first_recipe(names, this_hardware())
    if args.output is None:
        sys.stdout.write(text)
    else:
        write_text(args.output, text)
        print(args.output)
    return 0
