"""Backends of a transfer group: gloo between host memories, NCCL between the memories of CUDA devices."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo

LOOK_EVERY_S = 0.0002
"""Seconds between two checks whether an NCCL broadcast has ended; a bucket of 64 MiB takes as long over a slow link."""
GLOO_CONNECTS = 5
"""Times its timeout that gloo waits for a connection."""
LEAST_GLOO_S = 1.0
"""Least of these timeouts, in which a member of a busy machine must find the addresses of the others."""
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NEVER = timedelta(days=365)


def open_gloo(store: PrefixStore, rank: int, size: int, timeout_s: float, host: str) -> Any:
    """Open a gloo group whose member listens on the address ``host``. Blocks until all members are connected;
    ``RuntimeError`` if they are not in time."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=max(LEAST_GLOO_S, timeout_s / GLOO_CONNECTS))
    options._devices = [gloo.create_device(hostname=host)]
    group = gloo(store, rank, size, options)
    group._set_default_timeout(timedelta(seconds=timeout_s))
    return group


def open_nccl(store: PrefixStore, rank: int, size: int, device: torch.device) -> Any:
    """Open an NCCL group of processes that are known to be there, each with a GPU of its own. Blocks as ``open_gloo``.

    torch's watchdog would end processes whose peers fail or are late: it is told to leave this group to
    ``see_through``.
    """
    from torch.distributed import ProcessGroupNCCL  # only torch's CUDA builds have it

    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    # a deadline that never comes, and no error handling: the watchdog would end the process, not only the group
    handling = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = "0"  # read while the group is made
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
    """Wait until the device has done ``work``; NCCL's own ``wait`` returns before.

    ``RuntimeError`` after the ``deadline`` (``time.monotonic``), for an error of NCCL, or once ``is_over()`` says that
    the group has ended.
    """
    while not work.is_completed():
        if is_over():
            raise RuntimeError("the group is closed")
        if time.monotonic() > deadline:
            raise RuntimeError("nothing came in time")
        time.sleep(LOOK_EVERY_S)
    if is_over():
        raise RuntimeError("the group is closed")
    work.wait()  # raises NCCL's error, if any
