"""A rank's log ``RUN/logs/NODE/rank_R.log``: its output, and the stacks of its threads when it stalls."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mopd.base.files.writing import writing
from mopd.launch.failure import is_our_launchers

MARGIN_S, MARGIN_SHARE = 10.0, 0.2
"""Seconds by which the stacks are written before the deadline that ends the rank, or this share of a short deadline."""


class StallWatch:
    """Writes every thread's stack into the log when ``alive`` is not called for long, from a thread of its own that
    needs neither the interpreter nor a signal."""

    def __init__(self, path: Path, deadline_s: float) -> None:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("ab", buffering=0)
        self._limit_s = max(deadline_s - MARGIN_S, deadline_s * (1 - MARGIN_SHARE))
        faulthandler.enable(self.file)  # a crash in a library too
        self.alive()

    def alive(self) -> None:
        """Begin the time anew."""
        faulthandler.dump_traceback_later(self._limit_s, file=self.file)

    def close(self) -> None:
        """End the watch, once the rank's work is done."""
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        self.file.close()


@contextmanager
def rank_log(logs: Path | None, rank: int, *, deadline_s: float) -> Iterator[StallWatch | None]:
    """Keep the log of a rank's work while the block lasts, if there is a folder. Rank 0 keeps its terminal; the output
    of our launcher's other ranks goes to the log."""
    if logs is None:
        yield None
        return
    watch = StallWatch(logs / f"rank_{rank}.log", deadline_s)
    if rank and is_our_launchers():  # under raw torchrun a rank prints its error itself
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(watch.file.fileno(), stream.fileno())
    yield watch  # after an error the process ends, and what it writes until then belongs there too
    watch.close()
