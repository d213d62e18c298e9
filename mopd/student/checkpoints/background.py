"""The thread in which a rank writes a checkpoint while the training steps go on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from mopd.base.types import UserError
from mopd.student import cpu_shim


class Background:
    """Runner of one piece of work at a time in a thread. Not in a process: a rank has threads, and a fork of a process
    with threads is unsafe; Megatron's ``AsyncCallsQueue`` forks, or hands tensors to a process that outlives a killed
    rank.

    Leaving the ``with`` block waits for the started work. If the block raised, it waits up to the same deadline and
    drops the work's own error in favour of the block's: as long as the other ranks answer, a checkpoint that was begun
    is completed.
    """

    def __init__(self, device: torch.device, *, timeout_s: float) -> None:
        """``timeout_s``: deadline of ``finish``."""
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_use_device, initargs=(device,))
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start ``work``. The previous work must have been taken with ``finish``."""
        if self._work is not None:
            raise RuntimeError("a checkpoint is begun before the last one is finished")
        self._work = self._thread.submit(cpu_shim.activate()(work))

    @property
    def is_busy(self) -> bool:
        """Whether ``finish`` would have to wait."""
        return self._work is not None and not self._work.done()

    def finish(self) -> None:
        """Wait until the work is done and raise what it raised; return at once if none was started.

        Raises:
            UserError: the work is not done in time.
        """
        work, self._work = self._work, None
        if work is None:
            return
        # Not ``work.result(timeout)``: a TimeoutError raised by the work itself could not be told from the deadline's.
        if work not in wait([work], self._timeout_s).done:
            raise UserError(
                f"schedule.wait_timeout_s: a checkpoint was not written within {self._timeout_s:g} s: look at the disk "
                "behind run_dir, or raise it"
            )
        work.result()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.finish()
        elif self._work is not None:
            wait([self._work], self._timeout_s)
        self._thread.shutdown(wait=False)


def _use_device(device: torch.device) -> None:
    """Select the rank's GPU in the new thread: CUDA's current device is per thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
