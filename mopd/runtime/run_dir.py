"""The folder of one run: who may write in it, where things lie, and writes that are either whole or absent."""

from __future__ import annotations

import fcntl
import fnmatch
import json
import os
import time
from pathlib import Path
from typing import Any

from mopd.config.load import Loaded, differences, dump, load_recipe
from mopd.files.writing import write_text
from mopd.types import UserError

CHANGEABLE_ON_RESUME = (
    "run_dir",  # the folder may have moved; it is the one that holds the stored recipe
    "student.parallel.*",
    "student.recompute",
    "student.max_tokens_per_micro_batch",
    "student.micro_batch_size",
    "teachers.*.engine.*",
    "teachers.*.placement.*",
    "teachers.*.replicas",
    "teachers.*.routing.*",
    "teacher_defaults.*",
    "on_failure",
    "rollout.engine.*",
    "rollout.placement.*",
    "rollout.replicas",
    "rollout.routing.*",
    "schedule.steps",
    "schedule.wait_timeout_s",
    "validation.every_steps",
    "checkpoint.*",
    "preflight.*",
    "metrics.*",
)
"""Keys that a resumed run may change: where and how fast it runs, how long, and what is watched and saved. All others
decide what is learned; a run that changes them is another run."""
LOCK_WAIT_S = 2.0
"""How long to wait for a writer that is just ending."""


class RunDir:
    """One run's folder. ``check`` looks, ``open`` takes it, ``close`` gives it back; only rank 0 opens it.

    A fresh run needs a folder that is absent or empty (a ``.lock``, and ``logs`` of a start that failed, count as
    empty); a resumed run needs one with a ``recipe.yaml``. A run that ends before it wrote anything leaves nothing
    behind.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.manifest = self.path / "manifest.json"
        self.metrics = self.path / "metrics.jsonl"
        self.validation = self.path / "validation.jsonl"
        self.parity = self.path / "parity.json"
        self.headroom = self.path / "headroom.json"
        self.checkpoints = self.path / "checkpoints"
        self.hf = self.path / "hf"
        self.tensorboard = self.path / "tensorboard"
        self.logs = self.path / "logs"
        self.report_html = self.path / "report.html"
        self.report_json = self.path / "report.json"
        self.lock_path = self.path / ".lock"
        self._lock: int | None = None
        self._made_folder = False

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after ``step`` optimizer steps."""
        return self.checkpoints / f"step_{step:08d}"

    def check(self, loaded: Loaded, *, resume: bool) -> None:
        """Refuse what ``open`` would refuse, without touching the disk.

        Raises:
            UserError: the folder is in use, not empty (fresh), holds no run (resume), or holds another run (resume).
        """
        self._refuse_state(loaded, resume)
        if self.lock_path.is_file():
            lock = os.open(self.lock_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._take(lock)
            finally:
                os.close(lock)
        if resume:
            check_same_run(load_recipe(self.recipe), loaded)

    def open(self, loaded: Loaded, *, resume: bool) -> None:
        """Take the folder for this process until ``close`` or its end. Raises as ``check`` does."""
        self._refuse_state(loaded, resume)
        self._made_folder = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        while self._lock is None:
            lock = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._take(lock, close_on_refusal=True)
            # An ending writer may have removed the file that we opened; its lock would protect nothing.
            if self.lock_path.exists() and os.fstat(lock).st_ino == self.lock_path.stat().st_ino:
                self._lock = lock
            else:
                os.close(lock)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        try:
            self._refuse_state(loaded, resume)  # another run may have begun and ended while we waited for the lock
            if resume:
                check_same_run(load_recipe(self.recipe), loaded)
        except UserError:
            self.close()
            raise

    def write_recipe(self, loaded: Loaded) -> None:
        """Keep the resolved recipe; from now on the folder holds a run."""
        write_text(self.recipe, dump(loaded))

    def close(self) -> None:
        """Give the folder back, and remove it if nothing was written."""
        if self._lock is None:
            return
        self.lock_path.unlink()
        if self._made_folder and not any(self.path.iterdir()):
            self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    def discard_if_unused(self) -> None:
        """Remove a folder that holds nothing but the lock of a writer that is gone (killed before it could close)."""
        if not self.path.is_dir() or {entry.name for entry in self.path.iterdir()} - {".lock"}:
            return
        self.lock_path.unlink(missing_ok=True)
        self.path.rmdir()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_state(self, loaded: Loaded, resume: bool) -> None:
        where = loaded.where("run_dir")
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{where}: {str(self.path)!r} is a file: name a folder")
        if resume and not self.recipe.is_file():
            raise UserError(f"{where}: {str(self.path)!r} holds no run to resume: leave --resume out, or set run_dir")
        names = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        if not resume and names - {".lock", "logs"}:
            raise UserError(f"{where}: {str(self.path)!r} is not empty: add --resume, or set another run_dir")

    def _take(self, lock: int, *, close_on_refusal: bool = False) -> None:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
                    if close_on_refusal:
                        os.close(lock)
                    raise UserError(
                        f"run_dir {str(self.path)!r} is in use by process {owner}: wait for it, or set another run_dir"
                    ) from None
                time.sleep(0.05)


def check_same_run(stored: Loaded, given: Loaded) -> None:
    """A resumed run keeps every key that decides what is learned (all but ``CHANGEABLE_ON_RESUME``).

    Raises ``UserError`` that lists the keys with both values.
    """
    changed = {
        key: values
        for key, values in differences(stored.recipe, given.recipe).items()
        if not any(fnmatch.fnmatchcase(key, pattern) for pattern in CHANGEABLE_ON_RESUME)
    }
    if changed:
        listed = ", ".join(f"{key} ({_shown(old)} -> {_shown(new)})" for key, (old, new) in changed.items())
        raise UserError(
            f"{given.path}: differs from the run to resume, {stored.path}, in {listed}: "
            "put these back, or set another run_dir for a new run"
        )


def _shown(value: Any) -> str:
    return "absent" if value is None else json.dumps(value, ensure_ascii=False)
