"""``mopd convert``: from the command line to jobs, and what they tell at their end. Light to import."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mopd.base.text import json_lines
from mopd.launch import failure

DTYPES = ("float32", "bfloat16", "float16")
"""Spelled as in ``mopd.conversion.mapped.WEIGHT_DTYPES``, which is heavy to import."""
LAYOUT_OPTIONS = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model", "expert_tensor")
UNEVEN_OPTIONS = ("--num-layers-in-first-pipeline-stage", "--num-layers-in-last-pipeline-stage")
ABOUT = "convert, check and combine checkpoints; each writes a new folder, whole or not at all"
EXAMPLES = """\
examples:
  mopd convert hf-to-megatron models/qwen3 out/megatron --tensor-model-parallel-size 2
  mopd convert megatron-to-hf runs/mine/checkpoints/step_00000100 out/hf
  mopd convert megatron-to-peft runs/mine/checkpoints/step_00000100 out/adapter
  torchrun --nproc-per-node 8 -m mopd convert hf-to-megatron models/large out/megatron --resume
  mopd convert verify models/qwen3 out/megatron
  mopd convert inspect out/megatron --json
  mopd convert reshard out/megatron out/pp2 --pipeline-model-parallel-size 2
  mopd convert merge out/average models/math models/code
  mopd convert merge out/arithmetic models/math models/code --base models/base --weights 0.5 0.5
  mopd convert merge-lora models/base adapters/math out/math
  mopd convert pad-vocab models/qwen3 out/padded --multiple 128
  mopd convert unpad-vocab out/padded out/plain --vocab-size 151669
  mopd convert extract-head models/large out/head
"""
MISMATCH_CODE = 1
"""Exit code of ``verify`` when it found a difference."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands; ``args.action`` names the chosen one."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=text)
        made.add_argument("--json", action="store_true", help="print the result as JSON")
        return made

    _add_conversions(add("hf-to-megatron", "a Hugging Face folder to Megatron's distributed format"), has_layout=True)
    _add_conversions(add("megatron-to-hf", "a distributed checkpoint to a Hugging Face folder"), has_layout=False)
    peft = add("megatron-to-peft", "the adapters of a run's checkpoint to a folder in PEFT's format")
    peft.add_argument("source", type=Path, metavar="FROM", help="step folder of a run with student.lora")
    _add_output(peft)
    _add_conversions(add("reshard", "cut a distributed checkpoint for another layout (weights alone)"), has_layout=True)
    _add_reading(add("verify", "compare two checkpoints: tensors, then logits"), add("inspect", "what a folder holds"))
    _add_combining(
        add("merge", "average of models, or task arithmetic with --base"),
        add("merge-lora", "a PEFT LoRA adapter into its base model"),
    )
    _add_vocabulary(
        add("pad-vocab", "zero rows below embedding and LM head, up to a multiple"),
        add("unpad-vocab", "cut embedding and LM head to the true vocabulary"),
        add("extract-head", "the LM head alone, with config and tokenizer"),
    )


def _add_conversions(parser: argparse.ArgumentParser, *, has_layout: bool) -> None:
    is_from_megatron = "hf-to-megatron" not in parser.prog
    parser.add_argument("source", type=Path, metavar="FROM", help="folder to read")
    _add_output(parser)
    if has_layout:
        for name in LAYOUT_OPTIONS:
            option = f"--{name.replace('_', '-')}-parallel-size"
            is_expert_tensor = name == "expert_tensor"
            default, shown = (None, "the tensor degree") if is_expert_tensor else (1, "1")
            parser.add_argument(
                option, type=int, default=default, metavar="N", help=f"degree of the cut (default: {shown})"
            )
        for option in UNEVEN_OPTIONS:
            parser.add_argument(option, type=int, metavar="N", help="where it has another number than the others")
    if "reshard" not in parser.prog:
        parser.add_argument("--dtype", choices=DTYPES, help="dtype of the result; default: each tensor's own")
    if is_from_megatron:
        parser.add_argument("--side-files", type=Path, metavar="FOLDER", help="where config and tokenizer are")
    parser.add_argument("--allow-pickle", action="store_true", help="read formats that are pickles, as tensors alone")


def _add_reading(verify: argparse.ArgumentParser, inspect: argparse.ArgumentParser) -> None:
    verify.add_argument("first", type=Path, metavar="A", help="Hugging Face folder or distributed checkpoint")
    verify.add_argument("second", type=Path, metavar="B", help="the other one")
    verify.add_argument("--no-logits", action="store_true", help="compare tensors alone; builds no model")
    verify.add_argument(
        "--text", default=None, help="probe text of the logits; default: a paragraph of several scripts"
    )
    verify.add_argument(
        "--tolerance", type=float, default=1e-4, metavar="X", help="largest logit difference (default: 1e-4)"
    )
    inspect.add_argument("path", type=Path, metavar="PATH", help="Hugging Face folder or distributed checkpoint")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    for parser in (verify, inspect):
        parser.add_argument("--allow-pickle", action="store_true", help="read formats that are pickles")


def _add_combining(merge: argparse.ArgumentParser, lora: argparse.ArgumentParser) -> None:
    merge.add_argument("out", type=Path, metavar="TO", help="folder to write; must be absent or empty")
    merge.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="Hugging Face folders of one architecture")
    merge.add_argument("--weights", type=float, nargs="+", metavar="W", help="one per model; default: equal, sum 1")
    merge.add_argument("--base", type=Path, metavar="MODEL", help="task arithmetic: base + sum of W x (model - base)")
    lora.add_argument("source", type=Path, metavar="BASE", help="Hugging Face folder of the base model")
    lora.add_argument("adapter", type=Path, metavar="ADAPTER", help="folder with adapter_config.json")
    lora.add_argument("out", type=Path, metavar="TO", help="folder to write; must be absent or empty")
    for parser in (merge, lora):
        _add_job_options(parser)


def _add_vocabulary(
    pad: argparse.ArgumentParser, unpad: argparse.ArgumentParser, head: argparse.ArgumentParser
) -> None:
    for parser in (pad, unpad, head):
        parser.add_argument("source", type=Path, metavar="FROM", help="Hugging Face folder")
        _add_output(parser)
    pad.add_argument("--multiple", type=int, required=True, metavar="N", help="the vocabulary becomes a multiple of N")
    unpad.add_argument("--vocab-size", type=int, required=True, metavar="N", help="rows to keep")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="TO", help="folder to write; must be absent or empty")
    _add_job_options(parser)


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted conversion")
    parser.add_argument(
        "--max-file-bytes",
        type=int,
        default=2**30,
        metavar="N",
        help="size at which a file of weights ends (default: 1 GiB)",
    )


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """One ``mopd convert`` command; the exit code.

    Raises:
        UserError: see the functions of ``mopd.conversion``.
    """
    if args.action == "inspect":
        from mopd.conversion.jobs.contents import describe

        _print(describe(args.path, allow_pickle=args.allow_pickle, lists_tensors=args.tensors), as_json=args.json)
        return 0
    if args.action == "verify":
        failure.ignore_library_warnings()
        from mopd.cli.convert_verify import verify

        report = verify(
            args.first, args.second, text=args.text, tolerance=args.tolerance, compares_logits=not args.no_logits,
            allow_pickle=args.allow_pickle,
        )  # fmt: skip
        _print(report, as_json=args.json)
        return 0 if report["same"] else MISMATCH_CODE
    from mopd.cli.convert_job import check_arguments, job_maker, run_job

    check_arguments(args)
    outcome = run_job(job_maker(args), resume=args.resume)
    if not failure.is_rank() or failure.rank_and_world_size()[0] == 0:
        _print(outcome, as_json=args.json)
    return 0


def _print(report: dict[str, object], *, as_json: bool) -> None:
    """A flat report as lines of key and value, paths whole however narrow the terminal; lists of rows as tables."""
    if as_json:
        print(json_lines(report))
        return
    from rich.table import Table

    from mopd.report.terminal import Terminal

    console = Terminal(soft_wrap=True)
    width = max(map(len, report))
    tables = {
        key: rows for key, rows in report.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)
    }
    for key, value in report.items():
        if key not in tables:
            console.print(f"{key:<{width}}  {_text(value)}")
    for key, rows in tables.items():
        table = Table(*rows[0], title=key)
        for row in rows:
            table.add_row(*(_text(value) for value in row.values()))
        console.print(table)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(part)}" for key, part in value.items())
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
