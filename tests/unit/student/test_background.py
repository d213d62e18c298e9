from __future__ import annotations

import multiprocessing
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mopd.base.types import UserError
from mopd.student.checkpoints.checkpoint import CheckpointThread
from mopd.student.worker import StudentWorker

CPU = torch.device("cpu")


def refuse() -> None:
    raise UserError("no space")


def test_work_goes_on_beside_and_its_error_is_told_once() -> None:
    may_end = threading.Event()

    def work() -> None:
        assert may_end.wait(60)
        refuse()

    with CheckpointThread(CPU, timeout_s=60) as background:
        background.finish()  # of nothing
        assert not background.is_busy
        background.start(work)
        assert background.is_busy
        with pytest.raises(RuntimeError, match="before the last one is finished"):
            background.start(work)
        may_end.set()
        with pytest.raises(UserError, match="no space"):
            background.finish()
        background.finish()
        background.start(lambda: None)  # a later one starts anew


def test_an_error_waits_for_what_was_begun() -> None:
    may_end, ended = threading.Event(), threading.Event()

    def work() -> None:
        assert may_end.wait(60)
        ended.set()
        refuse()

    background = CheckpointThread(CPU, timeout_s=60)
    background.start(work)
    threading.Timer(0.05, may_end.set).start()
    with pytest.raises(ZeroDivisionError), background:
        _ = 1 / 0
    assert ended.is_set()


def test_the_end_of_the_block_tells_of_the_last_one() -> None:
    with pytest.raises(UserError, match="no space"), CheckpointThread(CPU, timeout_s=60) as background:
        background.start(refuse)


def test_the_wait_has_a_deadline() -> None:
    may_end = threading.Event()

    def work() -> None:
        assert may_end.wait(60)

    background = CheckpointThread(CPU, timeout_s=0.05)
    background.start(work)
    with pytest.raises(UserError, match=r"schedule\.wait_timeout_s: a checkpoint was not written within 0\.05 s"):
        background.finish()
    may_end.set()


def finishing(number: int, folder: str, may_end: Event, end: Connection) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=300))
    with CheckpointThread(CPU, timeout_s=300) as saving:
        layout = SimpleNamespace(control_group=dist.group.WORLD)
        worker: Any = SimpleNamespace(saving=saving, layout=layout)
        saving.start(lambda: None if number == 0 else _require(may_end.wait(300)))
        end.send("begun")
        StudentWorker.finish_save(worker)
        end.send(may_end.is_set())
        end.poll(300)


def _require(is_there: bool) -> None:
    assert is_there


@pytest.mark.multirank
def test_ranks_finish_a_checkpoint_together(tmp_path: Path) -> None:
    """A rank whose files are written would wait in the next command's collective for those of another and its reads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([StudentWorker.__module__])
    may_end = context.Event()
    ends, processes = [], []
    for number in range(2):
        end, other = context.Pipe()
        processes.append(context.Process(target=finishing, args=(number, str(tmp_path), may_end, other), daemon=True))
        processes[-1].start()
        ends.append(end)
    for end in ends:
        assert end.poll(300) and end.recv() == "begun"
    assert not ends[0].poll(0.5)
    may_end.set()
    for end in ends:
        assert end.poll(300) and end.recv() is True
        end.send("end")
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
