"""Folders of temporary files that a kill of all processes of a run has left behind: they are found by their lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from mopd.files.writing import temporary_folder, writing

LOCK = "lock"
"""File in each such folder, locked by the processes that still need it."""
NEW_S = 60.0
"""Younger ones may not be locked yet."""


def held_folder(prefix: str) -> tuple[Path, int]:
    """A new private folder where temporary files go, and the descriptor of its lock, which is held until every process
    that has the descriptor has ended. Earlier ones of this prefix and user that nobody holds are removed.

    Raises:
        UserError: none can be made.
    """
    _remove_abandoned(prefix)
    folder = temporary_folder(prefix)
    with writing(folder):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return folder, descriptor


def _remove_abandoned(prefix: str) -> None:
    with contextlib.suppress(OSError):  # what cannot be looked at is somebody else's
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if _is_abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    stat = folder.lstat()
    if stat.st_uid != os.geteuid() or time.time() - stat.st_mtime < NEW_S:
        return False
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
    return True
