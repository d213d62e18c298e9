"""``mopd convert``: from the command line to jobs, and what they tell at their end."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

from rich.table import Table

from mopd.commands.convert_arguments import LAYOUT_OPTIONS
from mopd.commands.convert_ranks import run_job
from mopd.conversion.job import Job
from mopd.conversion.jobs import combining, lora, streaming, vocabulary
from mopd.conversion.jobs.describe import describe
from mopd.conversion.torch_dist.plan import TargetLayout
from mopd.launch import failure
from mopd.preflight.inputs import check_model_folder
from mopd.report.terminal import Terminal
from mopd.text import json_lines
from mopd.types import UserError

MISMATCH_CODE = 1
"""Exit code of ``verify`` when it found a difference."""


def run(args: argparse.Namespace) -> int:
    """One ``mopd convert`` command; the exit code.

    Raises:
        UserError: see the functions of ``mopd.conversion``.
    """
    if args.action == "inspect":
        _print(describe(args.path, allow_pickle=args.allow_pickle, lists_tensors=args.tensors), as_json=args.json)
        return 0
    if args.action == "verify":
        # Megatron and torch warn at import and at deprecated calls, of nothing that a user can change.
        warnings.filterwarnings("ignore", module=r"megatron\.|torch\.|mopd\.cpu_shim")
        from mopd.commands.convert_verify import verify

        report = verify(
            args.first, args.second, text=args.text, tolerance=args.tolerance, compares_logits=not args.no_logits,
            allow_pickle=args.allow_pickle,
        )  # fmt: skip
        _print(report, as_json=args.json)
        return 0 if report["same"] else MISMATCH_CODE
    _check_arguments(args)
    told = run_job(_maker(args), resume=args.resume)
    if not failure.is_rank() or failure.rank_and_world_size()[0] == 0:
        _print(told, as_json=args.json)
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    """What can be refused before any file is opened."""
    if "tensor_model_parallel_size" in args:
        _layout(args).check_degrees()
    if args.action == "merge":
        sources = [*args.models, *([args.base] if args.base else [])]
    else:
        sources = [] if args.action in ("megatron-to-hf", "reshard") else [args.source]
    for folder in sources:
        check_model_folder(folder, "convert")
    if args.max_file_bytes < 1:
        raise UserError(f"--max-file-bytes is {args.max_file_bytes}: set 1 or more")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())) and not args.resume:
        raise UserError(f"convert: {str(args.out)!r} exists and is not an empty folder: name another")


def _maker(args: argparse.Namespace) -> Callable[[], Job]:
    size = args.max_file_bytes
    if args.action == "hf-to-megatron":
        return lambda: streaming.hf_to_megatron(
            args.source, args.out, _layout(args), dtype=args.dtype, max_file_bytes=size, allow_pickle=args.allow_pickle
        )
    if args.action == "megatron-to-hf":
        return lambda: streaming.megatron_to_hf(
            args.source, args.out, dtype=args.dtype, max_shard_bytes=size, allow_pickle=args.allow_pickle,
            side_files=args.side_files,
        )  # fmt: skip
    if args.action == "reshard":
        return lambda: streaming.reshard(
            args.source, args.out, _layout(args), max_file_bytes=size, allow_pickle=args.allow_pickle,
            side_files=args.side_files,
        )  # fmt: skip
    if args.action == "merge":
        return lambda: combining.merge(
            args.models, args.out, weights=args.weights, base=args.base, max_shard_bytes=size
        )
    if args.action == "merge-lora":
        return lambda: lora.merge_lora(args.source, args.adapter, args.out, max_shard_bytes=size)
    if args.action == "pad-vocab":
        return lambda: vocabulary.pad(args.source, args.out, multiple=args.multiple, max_shard_bytes=size)
    if args.action == "unpad-vocab":
        return lambda: vocabulary.unpad(args.source, args.out, vocab_size=args.vocab_size, max_shard_bytes=size)
    return lambda: vocabulary.extract_head(args.source, args.out, max_shard_bytes=size)


def _layout(args: argparse.Namespace) -> TargetLayout:
    degrees = {f"{name}_parallel_size": getattr(args, f"{name}_parallel_size") for name in LAYOUT_OPTIONS}
    if degrees["expert_tensor_parallel_size"] is None:
        degrees["expert_tensor_parallel_size"] = degrees["tensor_model_parallel_size"]
    return TargetLayout(**degrees)


def _print(report: dict[str, object], *, as_json: bool) -> None:
    """A flat report as lines of key and value, paths whole however narrow the terminal; lists of rows as tables."""
    if as_json:
        print(json_lines(report))
        return
    console = Terminal(soft_wrap=True)
    width = max(map(len, report))
    tables = {
        key: rows for key, rows in report.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)
    }
    for key, value in report.items():
        if key not in tables:
            console.print(f"{key:<{width}}  {_text(value)}", highlight=False)
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
