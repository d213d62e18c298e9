"""What carries bytes of a group: gloo from and into host memory, NCCL from and into that of CUDA devices."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo

HOST = "127.0.0.1"
"""Sender and receivers are processes of one machine."""
LOOK_EVERY_S = 0.0002
"""Whether a broadcast of NCCL is over, which takes a bucket of 64 MiB as long over a slow link."""
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NEVER = timedelta(days=365)


def open_gloo(store: PrefixStore, rank: int, size: int, timeout_s: float) -> Any:
    """Blocks until all are connected; ``RuntimeError`` if they are not in time."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=HOST)]
    return gloo(store, rank, size, options)


def open_nccl(store: PrefixStore, rank: int, size: int, device: torch.device) -> Any:
    """As ``open_gloo``, of processes that are known to be there, each with a GPU of its own. torch's watchdog, which
    ends processes whose peers fail or are late, is told to leave this group to ``see_through``."""
    from torch.distributed import ProcessGroupNCCL  # which torch has in its builds for CUDA alone

    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    handling = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = "0"  # read when the group is made
    try:
        group: Any = ProcessGroupNCCL(store, rank, size, options)
    finally:
        if handling is None:
            del os.environ[_HANDLING]
        else:
            os.environ[_HANDLING] = handling
    group.broadcast([torch.zeros(1, device=device)]).wait()  # NCCL connects at the first call
    torch.cuda.synchronize(device)
    return group


def see_through(work: Any, *, deadline: float, is_over: Any) -> None:
    """Until the device has done it: NCCL's ``wait`` alone does not wait. ``RuntimeError`` after the ``deadline``
    (``time.monotonic``), for an error of NCCL, or when ``is_over()`` its group."""
    while not work.is_completed():
        if is_over():
            raise RuntimeError("the group is closed")
        if time.monotonic() > deadline:
            raise RuntimeError("nothing came in time")
        time.sleep(LOOK_EVERY_S)
    if is_over():
        raise RuntimeError("the group is closed")
    work.wait()  # raises what went wrong
