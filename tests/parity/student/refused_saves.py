"""Checkpoints that a thread beside the steps cannot write: what every rank is told, and what is left of them."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mopd.base.files.writing import WriteRefusedError
from mopd.student.checkpoints import checkpoint
from mopd.student.checkpoints import checkpoint as saving
from mopd.student.worker import StudentWorker

MAX_FILE_BYTES = 4096


def refused_saves(worker: StudentWorker, exported: Path) -> dict[str, Any]:
    """What two ranks hear, by case; after all of them a checkpoint of the same name, which ``verify`` accepts."""
    target = exported / "step"
    told = {"file in the way": _told(worker, exported / "config.json" / "step")}
    with _full_disk(worker.layout.rank == 1):
        told["rank 1"] = _told(worker, target)
    with _then("_save_common", lambda: shutil.rmtree(target)):
        told["folder removed"] = _told(worker, target)
    with _then("_save_format", (target / "__1_0.distcp").unlink):
        told["file removed"] = _told(worker, target)
    worker.save(target, {}, is_async=True)
    worker.saving.finish()
    checkpoint.verify(target)
    return told


def _told(worker: StudentWorker, target: Path) -> dict[str, Any]:
    worker.save(target, {}, is_async=True)
    refused, line = torch.zeros(1, device=worker.layout.device), ""
    try:
        worker.saving.finish()
    except WriteRefusedError as error:
        refused, line = torch.ones_like(refused), str(error)
    torch.distributed.all_reduce(refused)
    return {"num_refused": int(refused), "line": line, "is_left": target.exists()}


@contextmanager
def _full_disk(is_here: bool) -> Iterator[None]:
    """Files of this process end where a full disk would end them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def _then(name: str, remove: Callable[[], None]) -> Iterator[None]:
    """Somebody removes what is there, as rank 0 has come through ``name``."""
    real = getattr(saving, name)

    def work(*args: Any) -> None:
        real(*args)
        remove()

    with patch.object(saving, name, work):
        yield
