"""``mopd data``: what a recipe's data is to a run, before any model is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from mopd.base.text import json_lines, visible
from mopd.cli.ranks import add_recipe
from mopd.config.load import load_recipe
from mopd.config.schema import Recipe

if TYPE_CHECKING:
    from mopd.data.overview import DomainOverview, Example

ABOUT = "show rows, lengths and rendered prompts of a recipe's data"
EXAMPLES = """\
examples:
  mopd data recipes/quickstart.yaml                       rows, domains, lengths, one prompt of each domain
  mopd data my.yaml data.overlong_prompts=filter          how many rows are too long, where a run would refuse them
  mopd data my.yaml --json                                the same as JSON
"""
MAX_CHARACTERS = 2000
"""Characters of a prompt that are printed; ``--json`` has all."""
BARS = " ▁▂▃▄▅▆▇█"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add_recipe(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Read the data as a run does, and print it; the exit code. Weights of models are not fetched.

    Raises:
        UserError: what a run would refuse of the data.
    """
    loaded = load_recipe(args.recipe, args.set)
    from mopd.data.overview import overview_of
    from mopd.data.stream import PromptStream
    from mopd.launch.checks.inputs import check_data_file, check_model_folder
    from mopd.orchestrator.workers import read_inputs
    from mopd.report.terminal import log_to_terminal
    from mopd.run.locating import apply, locate_inputs

    log_to_terminal()
    loaded = apply(loaded, locate_inputs(loaded))
    recipe = loaded.recipe
    check_model_folder(recipe.student.model, loaded.where("student", "model"))
    for split, entries in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        for file in recipe.data.files(entries):
            check_data_file(loaded, file.path, split)
    inputs = read_inputs(recipe)
    stream = PromptStream(inputs.train.rows_by_domain, recipe.data.fixed_weights, recipe.seed)
    found = overview_of("train", inputs.train, inputs.tokenizer, stream.shares(0))
    if inputs.validation is not None:
        found += overview_of("validation", inputs.validation, inputs.tokenizer, {})
    if args.json:
        print(json_lines([plain(one, recipe) for one in found]))
    else:
        _print(found, recipe)
    return 0


def plain(one: DomainOverview, recipe: Recipe) -> dict[str, object]:
    """Return an overview as plain values, with the domain's teachers and the texts of its prompts."""
    prompts = {"example": one.example, **{f"views.{name}": view for name, view in one.views.items()}}
    texts = {name: "".join(piece.text * piece.repeats for piece in shown.pieces) for name, shown in prompts.items()}
    return {**asdict(one), "teachers": _teachers(one, recipe), "texts": texts}


def _teachers(one: DomainOverview, recipe: Recipe) -> list[str]:
    return [] if one.domain in recipe.watched_domains else [*recipe.assignment.teachers_of(one.domain)]


def _print(found: Sequence[DomainOverview], recipe: Recipe) -> None:
    """Print a table, why rows are dropped, and a prompt of each domain, in which special tokens are highlighted."""
    from mopd.report.terminal import Terminal, make_table

    terminal = Terminal()
    table = make_table("prompts", "rows", "share", "dropped", "cut", "median", "90 %", "longest", "lengths")
    for one in found:
        sizes = [f"{one.tokens[name]:.0f}" for name in ("median", "p90", "max")]
        counts = [str(number) for number in (one.too_long + one.long_views, one.cut)]
        share = "" if one.share is None else f"{one.share:.0%}"
        bars = _bars([number for _, number in one.histogram])
        table.add_row(f"{one.split}: {one.domain}", str(one.rows), share, *counts, *sizes, bars)
    terminal.print(table)
    for one in found:
        for number, why in (
            (one.too_long, f"the prompt is longer than data.max_prompt_length {recipe.data.max_prompt_length}"),
            (one.long_views, "a teacher's view is longer than its max_prompt_length"),
        ):
            if number:
                print(f"{visible(one.split)}: {visible(one.domain)}: {number} rows are dropped: {why}")
    for one in found:
        views = {f", as teachers.{name} reads it": view for name, view in one.views.items()}
        for reader, shown in {f", teachers {', '.join(_teachers(one, recipe))}": one.example, **views}.items():
            print()
            terminal.print(f"{one.split}: {one.domain}{reader}: {shown.place}, {shown.num_tokens} tokens")
            terminal.print(_highlighted(shown))


def _bars(counts: Sequence[int]) -> str:
    """Return a bar for each count; one that is not 0 is always seen."""
    return "".join(BARS[-(-count * (len(BARS) - 1) // max(counts))] for count in counts)


def _highlighted(shown: Example) -> object:
    from rich.text import Text

    text, room = Text(), MAX_CHARACTERS
    for piece in shown.pieces:
        times = f" x {piece.repeats}" if piece.repeats > 1 else ""
        part = visible(piece.text, keep="\n\t") + times
        text.append(part[:room], style="reverse" if piece.is_special else "")
        room -= len(part)
        if room <= 0:
            text.append(" … (more with --json)")
            break
    return text
