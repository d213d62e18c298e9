"""Work beside the steps of one rank: the writing of a checkpoint, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from mopd import cpu_shim
from mopd.types import UserError


class Background:
    """One piece of work at a time. A thread, no process: a rank has threads, which no fork survives, and Megatron's
    ``AsyncCallsQueue`` forks, or hands tensors to a process that outlives a killed rank.

    The end of the block finishes what was started. After an error it waits for it as long, and the work's own error
    never takes the place of that one: where the other ranks still answer, a checkpoint that was begun becomes whole.
    """

    def __init__(self, device: torch.device, *, timeout_s: float) -> None:
        """``timeout_s`` is the deadline of ``finish``."""
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_use_device, initargs=(device,))
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin; ``finish`` what was started before."""
        if self._work is not None:
            raise RuntimeError("a checkpoint is begun before the last one is finished")
        self._work = self._thread.submit(cpu_shim.activate()(work))

    @property
    def is_busy(self) -> bool:
        """``finish`` would wait."""
        return self._work is not None and not self._work.done()

    def finish(self) -> None:
        """Returns when the work is done, at once where there is none, and raises what it raised.

        Raises:
            UserError: not in time.
        """
        work, self._work = self._work, None
        if work is None:
            return
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
    """CUDA's current device belongs to a thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
