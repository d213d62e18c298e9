"""A folder built in parts, each part once: what is finished stays, whatever interrupts the next.

``manifest.json`` names each finished part with the fingerprint of what it was made from and the hash of every file. A
part is built in a hidden folder, moved into place, and only then entered; a part that is not entered is built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

LOCK_FILE = ".lock"
LOCK_WAIT_S = 1800.0
"""Several times as long as a build takes."""


def fingerprint(*ingredients: Any) -> str:
    """SHA-256 of JSON-able values."""
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


class PartsFolder:
    """The folder and its manifest. Use it inside ``locked``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._manifest = root / "manifest.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One builder at a time; a second one waits until the first ends. ``TimeoutError`` after ``LOCK_WAIT_S``."""
        self.root.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + LOCK_WAIT_S
        with (self.root / LOCK_FILE).open("w") as lock:
            while not _try_lock(lock):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has been building in {self.root} for {LOCK_WAIT_S:.0f} s")
                time.sleep(0.2)
            yield

    def facts(self, part: str, made_from: str) -> dict[str, Any] | None:
        """What ``build`` returned for ``part``, or ``None`` if it is absent, made from something else, or damaged."""
        entry = self._entries().get(part)
        if entry is None or entry["made_from"] != made_from or entry["files"] != _hashes(self.root / part):
            return None
        facts: dict[str, Any] = entry["facts"]
        return facts

    def build(self, part: str, made_from: str, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Have ``make(folder)`` fill an empty folder, unless the part is there; returns what ``make`` returned.

        ``part`` is a relative path; the facts that ``make`` returns are JSON-able.
        """
        known = self.facts(part, made_from)
        if known is not None:
            return known
        draft = self.root / f".building-{part.replace('/', '-')}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        facts = make(draft)
        target = self.root / part
        if target.exists():
            shutil.rmtree(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.rename(target)
        entry = {"made_from": made_from, "facts": facts, "files": _hashes(target)}
        self._write({**self._entries(), part: entry})
        return facts

    def _entries(self) -> dict[str, Any]:
        return json.loads(self._manifest.read_text()) if self._manifest.exists() else {}

    def _write(self, entries: dict[str, Any]) -> None:
        draft = self._manifest.with_suffix(".partial")
        with draft.open("w") as file:
            file.write(json.dumps(entries, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._manifest)


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _hashes(folder: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of every file below ``folder``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
