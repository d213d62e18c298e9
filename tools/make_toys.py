"""Make toys that can tell one loss or schedule from another: tiny students and teachers, prompts, and a recipe each.

    python tools/make_toys.py                          # all, within seconds; again: at once
    python tools/make_toys.py stochastic long --out /tmp/toys

    runs/toys/TOY/recipe.yaml                          mopd train runs/toys/TOY/recipe.yaml
    runs/toys/TOY/models/{base, teachers/DOMAIN}       Hugging Face folders
    runs/toys/TOY/models/{train, validation}.jsonl     prompts, columns as in docs/data.md

What each toy can tell stands in ``tools/toys/grammars.py``. Nothing is trained: a teacher is a table of which word
follows which, written into the weights. ``stochastic`` has no right answers, only a distance from its teachers, which
``tools/measure_learning.py`` measures. Left out on purpose: whatever needs a larger model to be seen.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":  # run as a file: make `tools` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.quickstart.cache import PartsFolder, fingerprint
from tools.toys import grammars
from tools.toys.recipes import SETTINGS, write_recipe

MAKES = Path(grammars.__file__).read_text()
"""What makes the models: another text makes them again."""


def main() -> int:
    """Make what is missing of the toys that are named, and print how sure each teacher is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("toys", nargs="*", default=list(SETTINGS), metavar="TOY", help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/toys"), metavar="FOLDER")
    args = parser.parse_args()
    unknown = sorted(set(args.toys) - set(SETTINGS))
    if unknown:
        parser.error(f"no toy {unknown[0]!r}: name some of {', '.join(SETTINGS)}")
    for toy in args.toys:
        started = time.monotonic()
        facts = make(toy, args.out / toy)
        print(f"{toy}: {facts}, {time.monotonic() - started:.0f} s", flush=True)
    return 0


def make(toy: str, root: Path) -> dict[str, Any]:
    """Make one toy, unless it is there. Returns entropy and top-16 mass by teacher."""
    folder, made_from = PartsFolder(root), fingerprint(MAKES, toy)
    with folder.locked():
        facts = folder.facts("models", made_from)
        if facts is None:
            facts = folder.build("models", made_from, lambda out: grammars.make(toy, out))
        write_recipe(toy, root)
    return facts


if __name__ == "__main__":
    sys.exit(main())
