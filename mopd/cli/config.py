"""``mopd config``: a recipe with every default filled in, and where each value comes from."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from mopd.base.hardware import this_hardware
from mopd.base.text import json_lines, visible
from mopd.cli.ranks import add_recipe
from mopd.config.load import differences, dump, load_recipe, to_tree
from mopd.launch.preparing import settled

ABOUT = "print a recipe, resolved"
EXAMPLES = "example: mopd config my.yaml seed=1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add_recipe(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, without origins")
    parser.add_argument("--diff", metavar="OTHER", help="print only what differs from another recipe")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print; the exit code."""
    hardware = this_hardware()
    loaded = settled(load_recipe(args.recipe, args.set), hardware)
    # Where standard output may not have all characters, a recipe printed there would not read back.
    only_ascii = not (sys.stdout.encoding or "").lower().startswith("utf")
    if args.diff is not None:
        other = settled(load_recipe(args.diff), hardware)
        found = differences(loaded.named, other.named)
        if args.json:
            print(json_lines(found, only_ascii=only_ascii))
            return 0
        for key, (one, two) in found.items():
            print(visible(f"{key}: {json.dumps(one, ensure_ascii=False)} -> {json.dumps(two, ensure_ascii=False)}"))
    elif args.json:
        print(json_lines(to_tree(loaded.named), only_ascii=only_ascii))
    else:
        sys.stdout.write(dump(loaded, only_ascii=only_ascii))
    return 0
