"""The job that a command line asks for, run on this process alone or on all ranks that torchrun started."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from mopd.base.text import visible
from mopd.base.types import UserError
from mopd.conversion.job import Job, Stopped
from mopd.conversion.jobs import rewriting, streaming
from mopd.conversion.torch_dist.plan import TargetLayout
from mopd.launch import failure
from mopd.launch.checks.inputs import check_model_folder
from mopd.report.terminal import Terminal

TIMEOUT_S = 12 * 3600.0
"""Deadline of a wait between ranks: the slowest rank's share. A rank that dies is seen by its launcher, at once."""
_POLL_S = 0.5
_LINE_EVERY_S = 30.0
_T = TypeVar("_T")
JOBS: Mapping[str, Callable[..., Job]] = {
    "hf-to-megatron": streaming.hf_to_megatron,
    "megatron-to-hf": streaming.megatron_to_hf,
    "megatron-to-peft": streaming.megatron_to_peft,
    "reshard": streaming.reshard,
    "merge": rewriting.merge,
    "merge-lora": rewriting.merge_lora,
    "pad-vocab": rewriting.pad,
    "unpad-vocab": rewriting.unpad,
    "extract-head": rewriting.extract_head,
}
OPTIONS = ("dtype", "allow_pickle", "side_files", "weights", "base", "multiple", "vocab_size", "max_file_bytes")
"""Arguments of the command line that jobs take by the same names."""


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse arguments that cannot work before any file is opened."""
    if "tensor_model_parallel_size" in args:
        _layout(args).check_degrees()
    if args.action == "merge":
        sources = [*args.models, *([args.base] if args.base else [])]
    else:
        sources = [] if args.action in ("megatron-to-hf", "megatron-to-peft", "reshard") else [args.source]
    for folder in sources:
        check_model_folder(folder, "convert")
    if args.max_file_bytes < 1:
        raise UserError(f"--max-file-bytes is {args.max_file_bytes}: set 1 or more")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())) and not args.resume:
        raise UserError(f"convert: {str(args.out)!r} exists and is not an empty folder: name another")


def job_maker(args: argparse.Namespace) -> Callable[[], Job]:
    """Opens the files of the job when it is called."""
    inputs = [getattr(args, name) for name in ("models", "source", "adapter") if name in args]
    layout = [_layout(args)] if "tensor_model_parallel_size" in args else []
    options = {name: getattr(args, name) for name in OPTIONS if name in args}
    return partial(JOBS[args.action], *inputs, args.out, *layout, **options)


def _layout(args: argparse.Namespace) -> TargetLayout:
    degrees = {field.name: getattr(args, field.name) for field in dataclasses.fields(TargetLayout)}
    if degrees["expert_tensor_parallel_size"] is None:
        degrees["expert_tensor_parallel_size"] = degrees["tensor_model_parallel_size"]
    return TargetLayout(**degrees)


def run_job(make: Callable[[], Job], *, resume: bool) -> dict[str, object]:
    """Run one job to its end on all ranks; returns what to tell about it.

    Raises:
        UserError: on every rank, whichever rank it befell; everything that was written is removed then.
    """
    rank, size = failure.rank_and_world_size() if failure.is_rank() else (0, 1)
    start_s = time.monotonic()
    with _joined(size):
        job = _together(make, size)
        # Rank 0 alone knows the work folder; the others learn whether there is work from its error, or its absence.
        is_needed = _together(lambda: job.begin(resume=resume) if rank == 0 else True, size)
        if all(_gather(is_needed, size)):
            try:
                with _progress(job) if rank == 0 else nullcontext():
                    _together(lambda: _write(job, rank, size), size)
                    _together(lambda: job.complete() if rank == 0 else None, size)
            except UserError:
                if rank == 0:
                    job.discard()
                _gather(None, size)  # a rank that ends before has the launcher end rank 0 too
                raise
            except KeyboardInterrupt:
                print(f"mopd: {job.work} is kept: the same command with --resume goes on", file=sys.stderr)
                raise
    seconds = time.monotonic() - start_s
    written = sum(path.stat().st_size for path in job.target.rglob("*") if path.is_file()) if rank == 0 else 0
    return {"folder": str(job.target), "bytes": written, "seconds": round(seconds, 3), "files": len(job.files)}


def _write(job: Job, rank: int, size: int) -> None:
    try:
        job.write_share(rank, size)
    except BaseException:
        if size > 1:
            job.stop()
        raise


@contextmanager
def _joined(size: int) -> Iterator[None]:
    if size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    yield
    if size > 1:  # after an error nothing is waited for
        dist.barrier()
        dist.destroy_process_group()


def _together(action: Callable[[], _T], size: int) -> _T:
    """Run an action on every rank and wait for all; one rank's ``UserError`` is raised on each."""
    result, message = None, ""
    try:
        result = action()
    except UserError as error:
        if size == 1:
            raise
        message = str(error) or "unknown error"
    except Stopped:
        pass
    if problem := next(filter(None, _gather(message, size)), ""):
        raise UserError(problem)
    return result  # type: ignore[return-value]


def _gather(value: _T, size: int) -> list[_T]:
    """Every rank's value, in rank order, on every rank."""
    values: list[Any] = [value]
    if size > 1:
        values *= size
        dist.all_gather_object(values, value)
    return values


@contextmanager
def _progress(job: Job) -> Iterator[None]:
    """Bytes on disk of all ranks, their rate and the time left: a bar on a terminal, a line now and then elsewhere."""
    console = Terminal(stderr=True)
    is_over = threading.Event()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task(visible(job.target.name), total=job.num_bytes)

    def watch() -> None:
        start_s = told_s = time.monotonic()
        first = _bytes_on_disk(job)
        while not is_over.wait(_POLL_S):
            done, now_s = _bytes_on_disk(job), time.monotonic()
            bar.update(task, completed=done)
            if not console.is_terminal and now_s - told_s >= _LINE_EVERY_S:
                told_s = now_s
                rate = (done - first) / (now_s - start_s)
                left = f", {(job.num_bytes - done) / rate:.0f} s left" if rate > 0 else ""
                print(f"{done / 1e9:.2f} of {job.num_bytes / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s{left}", file=sys.stderr)

    watcher = threading.Thread(target=watch, daemon=True)
    with bar:
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join(timeout=10 * _POLL_S)


def _bytes_on_disk(job: Job) -> int:
    try:
        with os.scandir(job.out) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())
    except FileNotFoundError:  # it has just got its final name
        return job.num_bytes
