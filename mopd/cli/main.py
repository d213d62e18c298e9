"""The ``mopd`` command. Light to import, as every command is: what it runs is imported when it runs."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mopd import __version__
from mopd.base.files.writing import refusal
from mopd.base.text import one_line, visible
from mopd.base.types import UserError
from mopd.cli import bench, check, config, convert, eval, generate, init, plan, replay, score, serve, slurm, train
from mopd.cli.watching import compare, logs, report, status, stop
from mopd.launch import failure

DESCRIPTION = "Distil several domain teachers into one student, on-policy, on Megatron-Core."
EXAMPLES = """\
examples:
  mopd init --student MODEL --teacher NAME=MODEL --train FILE   a first recipe, with the domains of the data
  mopd config recipes/quickstart.yaml                       every value of a recipe and where it comes from
  mopd plan my.yaml --gpu h100                              what goes where, whether it fits, how long a step takes
  mopd check recipes/quickstart.yaml                        the checks before a run, without the run
  mopd train recipes/quickstart.yaml                        start the ranks that the recipe needs, and train
  mopd train recipes/quickstart.yaml --resume               go on from the newest complete checkpoint
  mopd train recipes/quickstart.yaml --resume --from step_150   go back to an older one
  mopd status runs/quickstart                               how a run does; mopd logs: what its processes wrote
  mopd stop runs/quickstart                                 end a run after its step, with a checkpoint
  mopd train my.yaml schedule.steps=10 run_dir=runs/short   with other values than the recipe's
  torchrun --nproc-per-node 8 -m mopd train my.yaml         the same under your own torchrun
  mopd eval my.yaml --model runs/mine/hf                    validation rewards of any Hugging Face folder
  mopd replay runs/mine loss.type=topk_reverse_kl           another loss on the very samples of a run
  mopd score my.yaml                                        the teachers' scores of stored responses
  mopd serve my.yaml --teacher math --port 8000             one teacher behind HTTP (see placement: external)
  mopd slurm my.yaml --wait                                 the run as a job of a Slurm cluster
  mopd report runs/quickstart                               one HTML page and report.json
  mopd compare runs/quickstart runs/mine --html compare.html   tables, recipe differences and curves side by side
  mopd generate runs/quickstart "a prompt" --samples 4       what the student answers now
  mopd convert megatron-to-hf runs/mine/checkpoints/step_00000100 out/hf
  mopd bench losses --quick                                 time, memory and error of the losses beside others
  mopd bench teachers                                       the path from teachers to tensors beside the bare engine

exit codes: 0 done, 1 failure, 2 an error that one line explains, 69 a process or machine was lost and 75 asked to
  stop (go on with --resume), 130 interrupted
"""
COMMANDS = (
    init, train, check, config, plan, eval, replay, score, serve, slurm, status, logs, stop, report, compare, generate,
    convert, bench,
)  # fmt: skip
"""Each by the name of its file."""
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
    args = _parse(arguments)
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


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, overrides behind an option included: ``train my.yaml --resume seed=1``."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-") or "=" not in word]
    if rest and (unknown or "set" not in args):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        args.set = [*args.set, *rest]
    return args


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="mopd", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"mopd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        name, about, examples = command.__name__.rpartition(".")[2], command.ABOUT, command.EXAMPLES
        made = commands.add_parser(name, help=about, description=about, epilog=examples, formatter_class=raw)
        command.add_arguments(made)
        made.set_defaults(command=command)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
