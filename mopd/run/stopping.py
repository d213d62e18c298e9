"""The request to end a run before its last step: a file in its folder, which every process that can may write.

``mopd stop``, SIGTERM to ``mopd train`` and a job's script write it, on whichever node; rank 0 reads it at the end of
each step and inside every wait. A start of the run removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import read_json_object
from mopd.base.files.writing import write_json, writing
from mopd.base.tasks import Stop
from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.report.run_files import RunFiles

POLL_S = 0.2
MAX_BYTES = 4096
MAX_SHOWN = 200


def request_stop(run_path: Path, by: str, *, is_users: bool = False) -> None:
    """Ask the run in the folder to end after the step that it is in. Makes the folder where a run only begins.
    ``is_users``: a person asks, not a machine that starts the run again.

    Raises:
        UserError: the request cannot be written.
    """
    with writing(run_path):
        run_path.mkdir(parents=True, exist_ok=True)
    write_json(RunFiles(run_path).stop, {"by": by, "at": time.time(), "is_users": is_users})


def stop_requested(run_path: Path) -> str | None:
    """Return the origin of a request to end the run; ``None`` without one. Any file of this name is a request."""
    record = _request(run_path)
    if record is None:
        return None
    by = record.get("by")
    return one_line(by)[:MAX_SHOWN] if isinstance(by, str) else "the file stop"


def is_users_stop(run_path: Path) -> bool:
    """Return whether a person asked for the run's end: by ``mopd stop``, or ``touch RUN/stop``."""
    record = _request(run_path)
    return record is not None and record.get("is_users") is not False


def _request(run_path: Path) -> dict[str, Any] | None:
    """Return the request, empty where the file holds none, as after ``touch RUN/stop``; ``None`` without a file."""
    path = RunFiles(run_path).stop
    if not os.path.lexists(path):
        return None
    try:
        return read_json_object(path, cure="", max_bytes=MAX_BYTES)
    except UserError:
        return {}


def forget_request(run_path: Path) -> None:
    """Remove the request to an earlier run in this folder, before this one begins."""
    path = RunFiles(run_path).stop
    with writing(path):
        path.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def watched(run_path: Path | None) -> AsyncIterator[Stop]:
    """Look for a request to stop as long as the block lasts. A run without a folder cannot be asked."""
    if run_path is None:
        yield Stop()
        return
    stop = Stop(lambda: stop_requested(run_path))

    async def watch() -> None:
        while (by := stop_requested(run_path)) is None:
            await asyncio.sleep(POLL_S)
        stop.ask(by)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)  # a request that is there already is known from the first line on
    try:
        yield stop
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
