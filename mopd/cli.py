"""The ``mopd`` command. Light to import: a command imports what it runs inside its own function."""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mopd import __version__
from mopd.bench.losses.plan import add_arguments as add_losses_arguments
from mopd.commands.convert_arguments import DESCRIPTION as CONVERT_DESCRIPTION
from mopd.commands.convert_arguments import EXAMPLES as CONVERT_EXAMPLES
from mopd.commands.convert_arguments import add_arguments as add_convert_arguments
from mopd.config.load import Loaded, differences, dump, load_recipe, to_tree
from mopd.files.reading import shown_path
from mopd.files.writing import refusal
from mopd.text import json_lines, one_line, visible
from mopd.types import UserError

DESCRIPTION = "Distil several domain teachers into one student, on-policy, on Megatron-Core."
EXAMPLES = """\
examples:
  mopd config recipes/quickstart.yaml                       every value of a recipe and where it comes from
  mopd check recipes/quickstart.yaml                        the checks before a run, without the run
  mopd train recipes/quickstart.yaml                        start the ranks that the recipe needs, and train
  mopd train recipes/quickstart.yaml --resume               go on from the newest complete checkpoint
  mopd train recipes/quickstart.yaml --resume --from step_150   go back to an older one
  mopd train my.yaml --set schedule.steps=10 --set run_dir=runs/short
  torchrun --nproc-per-node 8 -m mopd train my.yaml         the same under your own torchrun (several machines)
  mopd eval my.yaml --model runs/mine/hf                    validation rewards of any Hugging Face folder
  mopd serve my.yaml --teacher math --port 8000             one teacher behind HTTP (see placement: external)
  mopd report runs/quickstart                               one HTML page and report.json
  mopd convert megatron-to-hf runs/mine/checkpoints/step_00000100 out/hf
  mopd bench losses --quick                                 time, memory and error of the losses beside others
  mopd bench teachers                                       the path from teachers to tensors beside the bare engine

exit codes: 0 done, 1 failure, 2 an error that one line explains, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` defaults to the command line."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):  # a terminal that is not UTF-8 shows escapes instead of ending the command
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    args = _parser().parse_args(arguments)
    try:
        if args.on_ranks:
            from mopd.launch import failure

            if failure.is_rank():
                return failure.run_as_rank(lambda: args.command(args, arguments))
        code = int(args.command(args, arguments))
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"mopd: error: {one_line(error)}", file=sys.stderr)
        return 2
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


def _open_standard_streams() -> None:
    """Where this process was started with one of them closed, nothing else may get its number and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if number == 0 else "w"))


def _train(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from mopd.run.folder import RunDir

    if args.from_step is not None and not args.resume:
        raise UserError("--from names a checkpoint to resume from: add --resume")
    loaded = load_recipe(args.recipe, args.set)

    def work() -> None:
        from mopd.commands import train

        train.train(loaded, resume=args.resume, from_step=args.from_step)

    run = RunDir(loaded.recipe.run_dir)

    def checks() -> None:
        from mopd.run import resuming

        resuming.check_layout(run)
        run.check(loaded, resume=args.resume)
        if args.resume and resuming.choose(run, loaded.recipe, wanted=args.from_step) is not None:
            resuming.check_files(run)

    is_new = not run.path.exists()
    code = _with_student(loaded, arguments, work, checks)
    if code != 0 and is_new:
        run.discard_if_unused()
    return code


def _check(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    loaded = load_recipe(args.recipe, args.set)

    def work() -> None:
        from mopd.commands import train

        train.check(loaded, as_json=args.json)

    return _with_student(loaded, arguments, work)


def _eval(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    loaded = load_recipe(args.recipe, args.set)
    model = args.model or args.checkpoint
    if loaded.recipe.validation is None:
        raise UserError(f"{loaded.path}: eval needs validation: add a validation section")

    def work() -> None:
        from mopd.commands import eval

        eval.evaluate(loaded, model=model, as_json=args.json)

    def checks() -> None:
        from mopd.preflight.inputs import check_model_folder

        if args.model is not None:
            check_model_folder(args.model, "--model")
        if args.checkpoint is not None:
            _check_checkpoint(args.checkpoint, "--checkpoint")

    return _with_student(loaded, arguments, work, checks, groups=("rollout",))


def _config(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    loaded = load_recipe(args.recipe, args.set)
    if args.diff is not None:
        other = load_recipe(args.diff)
        for key, (one, two) in differences(loaded.recipe, other.recipe).items():
            print(visible(f"{key}: {json.dumps(one, ensure_ascii=False)} -> {json.dumps(two, ensure_ascii=False)}"))
    elif args.json:
        print(json_lines(to_tree(loaded.recipe), only_ascii=_shows_only_ascii()))
    else:
        sys.stdout.write(dump(loaded, only_ascii=_shows_only_ascii()))
    sys.stdout.flush()
    return 0


def _shows_only_ascii() -> bool:
    """Whether standard output may not have all characters, and a recipe printed there would not read back."""
    return not (sys.stdout.encoding or "").lower().startswith("utf")


def _serve(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from mopd.placement.engine_file import is_engine_file, read_engine_file, rollout_file, teacher_file
    from mopd.preflight.inputs import check_model_folder
    from mopd.serving.address import Address

    is_file = is_engine_file(args.recipe)
    loaded = None if is_file else load_recipe(args.recipe, args.set)
    if is_file == (args.teacher is not None or args.rollout):
        cure = "leave --teacher and --rollout out" if is_file else "name --teacher NAME or --rollout"
        raise UserError(f"serve {args.recipe}: a recipe has several engines, an engine file has one: {cure}")
    if loaded is None:
        file, where = read_engine_file(args.recipe), f"{args.recipe}: model"
    else:
        key = ("student", "model") if args.rollout else ("teachers", args.teacher, "model")
        make = rollout_file if args.rollout else partial(teacher_file, name=args.teacher)
        file, where = make(loaded.recipe, replica=args.replica), loaded.where(*key)
    address = Address(host=args.host, port=args.port, token_file=args.token_file, ready_file=args.ready_file)
    token = address.read_token()
    check_model_folder(file.model, where)
    with address.listen() as listener:
        from mopd.commands.serve import serve

        return serve(file, address, listener, token)


def _report(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    if not os.path.isfile(args.run / "recipe.yaml"):  # unlike Path.is_file, false for names that no file can have
        raise UserError(f"{shown_path(args.run)!r} holds no run: name the run_dir of a run that has begun")
    from mopd.report.build import build_report, print_summary

    report = build_report(args.run)
    if args.json:
        print(json_lines(asdict(report)))
    else:
        print_summary(report)
        print(args.run / "report.html")
    return 0


def _convert(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from mopd.commands import convert

    return convert.run(args)


def _bench_losses(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from mopd.bench.losses import command

    return command.run(args, shlex.join(["mopd", *arguments]))


def _bench_teachers(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from mopd.bench.teachers import command

    return command.run(args)


def _check_checkpoint(folder: Path, where: str) -> None:
    if not os.path.isfile(folder / "manifest.json"):
        shown = shown_path(folder)
        raise UserError(f"{where}: {shown!r} is no complete checkpoint (no manifest.json): name a step folder")


def _with_student(
    loaded: Loaded,
    arguments: Sequence[str],
    work: Callable[[], None],
    checks: Callable[[], None] = lambda: None,
    *,
    groups: Sequence[str] | None = None,
) -> int:
    """``_on_ranks`` with the student's layout, the recipe's inputs and the GPUs of ``groups`` (all) checked first."""
    from mopd.launch import failure
    from mopd.preflight.inputs import check_inputs, check_machine, check_world_size

    def all_checks() -> None:
        check_machine(loaded)
        check_inputs(loaded)
        from mopd.placement.gpus import check_gpus

        check_gpus(loaded, groups)
        checks()

    def checked_work() -> None:
        check_world_size(loaded, failure.rank_and_world_size()[1])
        check_inputs(loaded)
        work()

    return _on_ranks(arguments, checked_work, all_checks, world_size=loaded.recipe.student.parallel.world_size)


def _on_ranks(
    arguments: Sequence[str], work: Callable[[], None], checks: Callable[[], None], *, world_size: int
) -> int:
    """In a rank: do the work (``main`` relays its errors). Elsewhere: check, then start this command as ranks."""
    from mopd.launch import failure

    if failure.is_rank():
        work()
        return 0
    checks()
    from mopd.launch.launch import launch

    return launch([sys.executable, "-m", "mopd", *arguments], world_size=world_size)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="mopd", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"mopd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[..., int], text: str, example: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, epilog=f"example: {example}", formatter_class=raw)
        made.set_defaults(command=command, on_ranks=command not in (_config, _serve, _report))
        return made

    def add_with_recipe(name: str, command: Callable[..., int], text: str, example: str) -> argparse.ArgumentParser:
        made = add(name, command, text, example)
        made.add_argument("recipe", metavar="RECIPE", help="recipe file; docs/recipes.md lists every key")
        made.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override a key (YAML value)")
        return made

    train = add_with_recipe("train", _train, "train a student", "mopd train recipes/quickstart.yaml --resume")
    train.add_argument("--resume", action="store_true", help="go on with the run in run_dir")
    from_help = "with --resume: this checkpoint instead of the newest; later ones are set aside"
    train.add_argument("--from", dest="from_step", metavar="STEP_N", help=from_help)
    check = add_with_recipe("check", _check, "run the checks before a run", "mopd check recipes/quickstart.yaml")
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    config = add_with_recipe("config", _config, "print a recipe, resolved", "mopd config my.yaml --set seed=1")
    config_form = config.add_mutually_exclusive_group()
    config_form.add_argument("--json", action="store_true", help="print JSON, without origins")
    config_form.add_argument("--diff", metavar="OTHER", help="print only what differs from another recipe")
    evaluate = add_with_recipe("eval", _eval, "validation rewards of a model", "mopd eval my.yaml --model runs/mine/hf")
    evaluate.add_argument("--json", action="store_true", help="print the result as JSON")
    which = evaluate.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, metavar="FOLDER", help="Hugging Face folder; default: student.model")
    which.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="checkpoint folder of a run")
    serve = add_with_recipe(
        "serve", _serve, "one engine of a recipe behind HTTP", "mopd serve my.yaml --teacher math --port 8000"
    )
    which_engine = serve.add_mutually_exclusive_group()
    which_engine.add_argument("--teacher", metavar="NAME", help="serve this teacher's scores")
    which_engine.add_argument("--rollout", action="store_true", help="serve the student's sampler")
    serve.add_argument("--replica", type=int, default=0, metavar="N", help="number of this replica, for the logs")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=0, help="port to listen on; 0 (default) takes a free one")
    serve.add_argument("--token-file", type=Path, metavar="FILE", help="secret that clients must send")
    serve.add_argument("--ready-file", type=Path, metavar="FILE", help="written when the server answers: url and pid")
    report = add("report", _report, "write report.html and report.json of a run", "mopd report runs/quickstart")
    report.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    report.add_argument("--json", action="store_true", help="print report.json instead of the table")
    convert = add("convert", _convert, CONVERT_DESCRIPTION, "mopd convert hf-to-megatron models/qwen3 out/megatron")
    convert.epilog = CONVERT_EXAMPLES
    add_convert_arguments(convert)
    _add_bench(commands)
    return parser


def _add_bench(commands: Any) -> None:
    about = "measure a part of mopd"
    what = commands.add_parser("bench", help=about, description=about).add_subparsers(required=True, metavar="WHAT")

    def part(name: str, command: Callable[..., int], text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = what.add_parser(name, help=text, description=text)
        made.set_defaults(command=command, on_ranks=False)
        return made

    add_losses_arguments(part("losses", _bench_losses, "time, memory and error of the losses beside others"))
    text = "throughput, payload, decoding and balance of the path from teachers to tensors; exit code 1 below a goal"
    add = part("teachers", _bench_teachers, text).add_argument
    add("--engine", choices=("vllm", "torch"), default="vllm", help="engine on both sides (default: %(default)s)")
    add("--pairs", type=int, default=7, metavar="N", help="timed pairs, bare and whole path (default: %(default)s)")
    add("--sequences", type=int, default=64, metavar="N", help="sequences of the batch (default: %(default)s)")
    add("--top-k", type=int, default=64, metavar="K", help="scores per token (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of a table")


if __name__ == "__main__":
    raise SystemExit(main())
