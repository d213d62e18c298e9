"""Temporary folders that no kill leaves for good: the next process of mopd on this machine removes a dead owner's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from mopd.base.files.writing import temporary_folder

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Names the running kernel, which alone knows who holds a lock: TMPDIR may be shared by several machines."""
HIDDEN = ".mopd-"
"""How the names of folders begin that nobody has locked yet."""
_looked: set[Path] = set()
"""Places where this process has looked for folders of dead owners."""


class TemporaryFolder:
    """A new private folder where temporary files go (``TMPDIR``), or in a ``place``. Its owner holds a lock on it until
    ``close`` or until the process ends in any way. A folder of this user whose lock is free is removed when another
    process of this machine makes its first one there.

    Example::

        with TemporaryFolder("mopd-bench-") as folder:
            (folder / "data.jsonl").write_text(rows)
    """

    def __init__(self, prefix: str, *, place: Path | None = None) -> None:
        """``prefix`` begins with ``mopd-``.

        Raises:
            UserError: no folder can be made.
        """
        self._lock = -1
        while self._lock < 0:
            self._take(prefix, temporary_folder(f"{HIDDEN}{_boot()}-", place))
        _remove_abandoned(self.path.parent)

    def _take(self, prefix: str, new: Path) -> None:
        """Lock the folder, then give it its name; nothing where a process that looked for abandoned ones was faster."""
        try:
            self._lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a file system without locks: nobody removes others' folders there
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.path = new.rename(new.with_name(prefix + new.name.removeprefix(HIDDEN)))
        except FileNotFoundError:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def fileno(self) -> int:
        """Return the lock's file descriptor: a process that inherits it keeps the folder too."""
        return self._lock

    def close(self) -> None:
        """Remove the folder, if it is still there. Harmless when repeated."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)  # another process may have removed it
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.close()


def _boot() -> str:
    """Return the beginning of the running kernel's id."""
    return BOOT_ID.read_text(encoding="ascii")[:8]


def _remove_abandoned(place: Path) -> None:
    """Remove folders of dead owners, once in each process."""
    if place not in _looked:
        _looked.add(place)
        for folder in (*place.glob(f"mopd-*-{_boot()}-*"), *place.glob(f"{HIDDEN}{_boot()}-*")):
            with contextlib.suppress(OSError):  # held, somebody else's, or just gone
                if folder.lstat().st_uid != os.geteuid():
                    continue
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    # Raises while the owner lives, which holds it.
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
