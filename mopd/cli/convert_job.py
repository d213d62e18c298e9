"""The job that a command line asks for, run on this process alone or on all ranks that torchrun started."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from mopd.base.text import encodable, visible
from mopd.base.types import UserError
from mopd.conversion.job import Job, Stopped
from mopd.conversion.jobs import lora, rewriting, streaming
from mopd.conversion.torch_dist.plan import TargetLayout
from mopd.launch import failure
from mopd.launch.checks.inputs import check_model_folder
from mopd.report.terminal import Terminal

TIMEOUT_S = 12 * 3600.0
"""Deadline of a wait between ranks: the slowest rank's share. A rank that dies is seen by its launcher, at once."""
_POLL_S = 0.5
_LINE_EVERY_S = 30.0
_T = TypeVar("_T")


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse arguments that cannot work before any file is opened."""
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


def job_maker(args: argparse.Namespace) -> Callable[[], Job]:
    """Opens the files of the job when it is called."""
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
        return lambda: rewriting.merge(
            args.models, args.out, weights=args.weights, base=args.base, max_shard_bytes=size
        )
    if args.action == "merge-lora":
        return lambda: lora.merge_lora(args.source, args.adapter, args.out, max_shard_bytes=size)
    if args.action == "pad-vocab":
        return lambda: rewriting.pad(args.source, args.out, multiple=args.multiple, max_shard_bytes=size)
    if args.action == "unpad-vocab":
        return lambda: rewriting.unpad(args.source, args.out, vocab_size=args.vocab_size, max_shard_bytes=size)
    return lambda: rewriting.extract_head(args.source, args.out, max_shard_bytes=size)


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
        if all(part == b"1" for part in _gather(b"1" if is_needed else b"0", size)):
            try:
                with _progress(job) if rank == 0 else nullcontext():
                    _together(lambda: _write(job, rank, size), size)
                    _together(lambda: job.complete() if rank == 0 else None, size)
            except UserError:
                if rank == 0:
                    job.discard()
                _gather(b"", size)  # a rank that ends before has the launcher end rank 0 too
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
        message = ""
    messages = _gather(encodable(message).encode(), size)
    if any(messages):
        raise UserError(next(text for text in messages if text).decode())
    return result  # type: ignore[return-value]


def _gather(data: bytes, size: int) -> list[bytes]:
    """Every rank's bytes, in rank order, on every rank."""
    if size == 1:
        return [data]
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]))
    longest = max(1, *(int(length) for length in lengths))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(parts, padded)
    return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


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
