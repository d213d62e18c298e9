"""The ``mopd`` command. Light to import, as every command is: what it runs is imported when it runs."""

from __future__ import annotations

import argparse
import io
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mopd import __version__
from mopd.base.files.writing import refusal
from mopd.base.text import one_line, visible
from mopd.base.types import UserError
from mopd.cli import (
    bench,
    check,
    completion,
    config,
    convert,
    data,
    eval,
    generate,
    init,
    plan,
    replay,
    score,
    serve,
    slurm,
    train,
)
from mopd.cli.completion import parts_of
from mopd.cli.watching import compare, logs, report, status, stop
from mopd.launch import failure

DESCRIPTION = "Distil several domain teachers into one student, on-policy, on Megatron-Core."
EXAMPLES = """\
examples:
  mopd init --student MODEL --teacher NAME=MODEL --train FILE --output my.yaml
  mopd check my.yaml                                what is missing or wrong, before anything trains
  mopd train my.yaml schedule.steps=10              with another value than the recipe's
  mopd report runs/mine                             one HTML page and report.json
  mopd COMMAND --help                               options, defaults and examples of a command

exit codes: 0 done, 1 failure, 2 an error that one line explains, 69 a process or machine was lost and 75 asked to
  stop (go on with --resume), 130 interrupted
"""
GROUPS = {
    "prepare": (init, config, data, check, plan),
    "run": (train, slurm, replay, score, serve),
    "inspect": (status, logs, stop, report, compare),
    "models": (generate, eval, convert),
    "develop": (bench, completion),
}
"""Kind of work -> its commands, each by the name of its file, as ``mopd --help`` lists them."""
FREE_TEXTS = ("set", "prompts", "by")
"""Arguments that are no paths and no names."""
ON_RANKS = (train, check, eval, convert)
"""Commands that torchrun may start, several times beside one another."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` defaults to the command line."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):  # a terminal that is not UTF-8 shows escapes instead of ending the command
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    args = parse(arguments)
    try:
        _check_names(args)
        if args.command in ON_RANKS and failure.is_rank():
            return failure.run_as_rank(lambda: args.command.run(args, arguments))
        code = int(args.command.run(args, arguments))
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"mopd: error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("mopd: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left, as in `mopd config … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        refused = refusal(error)
        if refused is None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what it holds cannot be written either
        print(f"mopd: error: {one_line(refused)}", file=sys.stderr)
        return 2


def _check_names(args: argparse.Namespace) -> None:
    """``UserError`` for a path or a name that a line or a script could not hold, as the reader of recipes has it."""
    for key, value in vars(args).items():
        for item in value if isinstance(value, list) else [value]:
            shown = visible(str(item))
            if key not in FREE_TEXTS and isinstance(item, (str, Path)) and shown != str(item):
                raise UserError(f"'{shown[:300]}' holds a control character, such as a line end: rename it")


def _open_standard_streams() -> None:
    """Open those that were closed when the process started: another file must not get their number and the output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if number == 0 else "w"))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, overrides behind an option included: ``train my.yaml --resume seed=1``."""
    parser = _parser()
    args, rest = parser.parse_known_args(_with_auto_joined(arguments))
    unknown = [word for word in rest if word.startswith("-") or "=" not in word]
    if rest and (unknown or "set" not in args):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        args.set = [*args.set, *rest]
    return args


def _with_auto_joined(arguments: Sequence[str]) -> list[str]:
    """Return the command line with ``--resume auto`` of ``train`` as one word. To argparse the value would be optional,
    and then it takes whatever comes next for it: ``--resume seed=1``."""
    words = list(arguments)
    for place in range(1, len(words) - 1):
        if words[0] == "train" and words[place : place + 2] == ["--resume", "auto"]:
            words[place : place + 2] = ["--resume=auto"]
    return words


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    usage = "mopd [-h] [--version] COMMAND ..."
    parser = argparse.ArgumentParser(
        prog="mopd", usage=usage, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"mopd {__version__}")
    named = {group: [(it.__name__.rpartition(".")[2], it) for it in members] for group, members in GROUPS.items()}
    # The groups stand in the description: argparse can only list all commands as one.
    lines = [
        line
        for group, members in named.items()
        for line in (f"{group}:", *(f"  {name:<12}{command.ABOUT}" for name, command in members))
    ]
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", prog="mopd", title="commands", description="\n".join(lines),
        help=argparse.SUPPRESS,
    )  # fmt: skip
    for name, command in itertools.chain.from_iterable(named.values()):
        about, examples = command.ABOUT, command.EXAMPLES
        made = commands.add_parser(name, description=about, epilog=examples, formatter_class=raw)
        command.add_arguments(made)
        made.set_defaults(command=command)
        for part, nested in parts_of(made).items():
            nested.formatter_class = raw
            shown = [line for line in examples.splitlines() if f" {name} {part} " in f"{line} "]
            nested.epilog = "\n".join(["examples:", *shown])
    parser.set_defaults(parser=parser)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
