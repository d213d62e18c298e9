"""Rank 0's side of the orchestrator process: it starts the process and reports how it ends."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from mopd.base.types import LostError, UserError
from mopd.data_plane.interface import StorageEnded
from mopd.launch.link import LinkEnded, RankLink, error_of
from mopd.launch.signals import ENDING
from mopd.placement.ending import END_S
from mopd.placement.process import how_it_ended

logger = logging.getLogger(__name__)

NAME = "the orchestrator process"
MODULE = "mopd.orchestrator"
DYING_S = 2.0
"""Seconds for its end to be seen once the samples that it held are gone."""


class OrchestratorProcess:
    """The orchestrator as a child of rank 0. A context manager: it ends with the block, in order if it can.

    An error of the block that only follows from the process's end is replaced by its cause: the error that the process
    sent last, or how it ended.
    """

    def __init__(self, task: str, *, log: Path | None, timeout_s: float) -> None:
        """``task``: what it is to do, as JSON; ``log``: where it leaves the stacks of its threads; ``timeout_s``: how
        long it may give no sign of life."""
        self._task, self._log, self._timeout_s = task, log, timeout_s

    def __enter__(self) -> OrchestratorProcess:
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile("w+") as task:  # without a name, so that a kill leaves nothing
            task.write(self._task)
            task.seek(0)
            command = [sys.executable, "-m", MODULE, str(theirs.fileno())]
            # It unblocks them once it has handlers: a signal that comes while Python starts would be a traceback.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            try:
                # In this rank's process group: the reaper of the rank's group ends it too.
                self.process = subprocess.Popen(command, stdin=task, pass_fds=(theirs.fileno(),))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.link = RankLink(ours, NAME, silent_s=self._timeout_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.link.is_busy = False
        cause = self._cause() if isinstance(error, (LinkEnded, StorageEnded)) else None
        ends_by_itself = self.end()
        if cause is not None:
            raise cause from error
        if kind is None and ends_by_itself and self.process.returncode:
            raise LostError(self.how_it_ended())

    def end(self) -> bool:
        """Close the link, which asks the process to end, and wait for its end; from any thread. Returns whether it
        ended by itself."""
        self.link.close()
        if self._ends_within(END_S):
            return True
        logger.warning("%s did not end within %g s and was killed%s", NAME, END_S, self._where)
        self.process.kill()
        self.process.wait()
        return False

    def how_it_ended(self) -> str:
        """Describe in one line how the process ended."""
        if not self._ends_within(END_S):
            return f"{NAME} closed its link and still runs{self._where}"
        code = self.process.returncode
        return f"{NAME} {how_it_ended(128 - code if code < 0 else code)}{self._where}"

    def watch(self, lost: Callable[[LostError], None]) -> None:
        """Watch the process from a thread. If it dies while the main thread executes a command with the other ranks,
        call ``lost`` with how it died: they may report lost samples, which only follow from that."""

        def wait() -> None:
            self.process.wait()
            time.sleep(DYING_S / 2)  # where the main thread waits for the process, it sees its end by itself
            if self.process.returncode and self.link.is_busy:
                lost(LostError(self.how_it_ended()))

        threading.Thread(target=wait, name="orchestrator", daemon=True).start()

    @property
    def _where(self) -> str:
        return "" if self._log is None else f" (log: {self._log})"

    def _ends_within(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _cause(self) -> Exception | None:
        """Return the error that the process sent before it ended, or else how it ended; ``None`` where it lives and
        sends nothing."""
        deadline = time.monotonic() + DYING_S
        self.link.set_silence(DYING_S)
        try:
            while time.monotonic() < deadline:
                head, _ = self.link.receive()
                if "error" in head:
                    return error_of(head, NAME)
        except LinkEnded:
            return LostError(self.how_it_ended())
        except UserError:  # not even a beat
            pass
        return None
