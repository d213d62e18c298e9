"""The folder of one run: its layout, the lock that keeps a second run out, and the rules of resuming."""

from __future__ import annotations

import fcntl
import fnmatch
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.files.writing import PARTIALS, WriteRefusedError, refusal, write_text, writing
from mopd.base.hardware import node_name
from mopd.base.text import shortened
from mopd.base.types import CutOffError, LostError, UserError
from mopd.config.load import Loaded, differences, dump, load_recipe
from mopd.config.reading.tree import split_dotted
from mopd.report.run_files import RunFiles
from mopd.run.locating import unpinned

CHANGEABLE_ON_RESUME = (
    "run_dir",  # the folder may have moved; it is the one that holds the stored recipe
    "student.parallel.*", "student.recompute", "student.packing", "student.max_tokens_per_micro_batch",
    "student.micro_batch_size",
    "teachers.*.engine.*", "teachers.*.placement.*", "teachers.*.replicas", "teachers.*.routing.*",
    "teacher_defaults.*",
    "rollout.engine.*", "rollout.placement.*", "rollout.replicas", "rollout.routing.*",
    "data.scores_cache", "data.scores_cache_max_gib", "answers.folder", "on_failure",
    "schedule.steps", "schedule.wait_timeout_s", "validation.every_steps",
    "checkpoint.*", "preflight.*", "metrics.*", "callbacks", "slurm", "slurm.*",
)  # fmt: skip
"""Keys that a resumed run may change: where and how fast it runs, how long, and what is watched and saved. All others
decide what is learned; a run that changes them is another run."""
LOCK_WAIT_S = 2.0
"""How long to wait for a writer that is just ending."""
START_FILE = ".start"
"""File beside rank 0's log in a run of several nodes: a random word of the last start, which all of them must see."""
BESIDE_RUN = frozenset({".lock", "logs", "replicas", "job", "stop", "attempts.json"})
"""Entries of a folder without a run: a lock, logs of a start that failed, servers that wait for the run, the job that
will run it, a request to stop it, its starts so far."""
PROBE_BYTES = 2**16
"""Size of a trial file: enough for a run's first files."""
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095
"""Linux's limits of one name and of a whole path."""
LONGEST_INSIDE = 160
"""Bytes of the longest path inside the folder: a file of a checkpoint, of an export on its way."""


class RunDir(RunFiles):
    """One run's folder. ``open`` locks it and ``close`` gives it back, on rank 0 alone; ``check`` says whether ``open``
    would succeed.

    A fresh run needs a folder that is absent or empty (``BESIDE_RUN``, and unfinished files of a start that failed,
    count as empty); a resumed run needs one with a ``recipe.yaml``. A run that ends before it wrote anything leaves
    nothing behind.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises ``UserError`` if there can be no such folder, or it cannot be looked into."""
        super().__init__(Path(path))
        _require_possible(self.path)
        self.manifest = self.path / "manifest.json"
        self.checkpoints = self.path / "checkpoints"
        self.hf = self.path / "hf"
        self.pushed = self.path / "pushed.json"
        """Commit on the Hub of each uploaded folder, by its name."""
        self.tensorboard = self.path / "tensorboard"
        self.logs = self.path / "logs"
        self.logs_here = self.logs / node_name()
        """Folder of the logs of this machine's processes."""
        self.lock_path = self.path / ".lock"
        self._lock: int | None = None
        self._made: list[Path] = []
        """Folders that ``open`` has made, the deepest first."""

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` optimizer steps."""
        return self.checkpoints / folder_name(step)

    def hf_at(self, step: int) -> Path:
        """Return the Hugging Face folder of the student after ``step`` optimizer steps."""
        return self.path / "hf_steps" / folder_name(step)

    def commits_on_hub(self) -> dict[str, Any]:
        """Return the commit on the Hub of each folder that was uploaded, by its name; ``UserError`` if damaged."""
        cure = "remove it, and what is exported is uploaded anew"
        return read_json_object(self.pushed, cure=cure) if self.pushed.exists() else {}

    def samples(self, step: int) -> Path:
        """Return the folder of finished samples that a checkpoint's step had not used yet."""
        return self.checkpoints / f"{folder_name(step)}.samples"

    def check(self, loaded: Loaded, *, resume: bool) -> None:
        """Refuse what ``open`` would refuse, and a folder that cannot be written; leaves nothing behind.

        Raises:
            UserError: the folder is in use, not empty (fresh), holds no run (resume), or holds another run (resume).
        """
        self._refuse_state(loaded, resume)
        self._refuse_unwritable(loaded)
        trial = RunDir(self.path)
        try:
            trial.open(loaded, resume=resume)
        finally:
            trial.close(forget_request=False)  # a request meanwhile is to the run that begins

    def open(self, loaded: Loaded, *, resume: bool) -> None:
        """Take the folder for this process until ``close`` or its end. Raises as ``check`` does."""
        self._refuse_state(loaded, resume)
        whole = self.path.absolute()
        self._made = [folder for folder in (whole, *whole.parents) if not os.path.lexists(folder)]
        try:
            with writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
            with writing(self.lock_path):
                self._lock_folder()
            self._refuse_state(loaded, resume)  # another run may have begun and ended while we waited for the lock
            if resume:
                check_same_run(load_recipe(self.recipe), loaded)
            for unfinished in self.path.glob(PARTIALS):  # of a process that was killed while it wrote
                if unfinished.is_dir() and not unfinished.is_symlink():
                    shutil.rmtree(unfinished)
                else:
                    unfinished.unlink()
        except UserError:
            self.close()
            raise

    def _lock_folder(self) -> None:
        while self._lock is None:
            lock = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._take(lock)
            # An ending writer may have removed the file that we opened; its lock would protect nothing.
            if self.lock_path.exists() and os.fstat(lock).st_ino == self.lock_path.stat().st_ino:
                self._lock = lock
            else:
                os.close(lock)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    @contextmanager
    def telling(self) -> Iterator[RunDir]:
        """Add to the line of an error that cuts the run off in this block how the run goes on.

        Raises:
            CutOffError: also for errors that a full disk is behind.
        """
        try:
            yield self
        except BaseException as error:
            cut_off = error if isinstance(error, UserError) else refusal(error)
            if not isinstance(cut_off, CutOffError):
                raise
            raise self.with_cure(cut_off) from error

    def with_cure(self, error: CutOffError) -> CutOffError:
        """Return the error of a run that was cut off, with ``cure``."""
        kind = LostError if isinstance(error, LostError) else CutOffError
        return kind(f"{error}; {self.cure()}")

    def cure(self) -> str:
        """Return what to do after a run in this folder was cut off."""
        return "go on with --resume" if self.recipe.is_file() else "start again"

    def write_recipe(self, loaded: Loaded) -> None:
        """Write the resolved recipe; from then on the folder holds a run."""
        write_text(self.recipe, dump(loaded))

    def log_launch(self, line: str) -> None:
        """Write the last line of this node's launcher to its log, if there is a run."""
        if not self.recipe.is_file():
            return
        path = self.logs_here / "launcher.log"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def close(self, *, forget_request: bool = True) -> None:
        """Unlock the folder, and remove it if nothing was written; with ``forget_request`` a request to stop, too."""
        if self._lock is not None:
            self.lock_path.unlink()
        if self._made:
            self.discard_if_unused(forget_request=forget_request)
        for folder in self._made:
            with suppress(OSError):  # it holds something, or is gone
                folder.rmdir()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard_if_unused(self, *, forget_request: bool = True) -> None:
        """Remove a folder without a run: one that holds at most empty logs, a request to stop (``forget_request``), and
        the lock of a process that was killed before it could close the folder."""
        if not self.path.is_dir() or self.recipe.is_file():
            return
        empty = [path for path in self.logs.glob("*/*.log") if path.stat().st_size == 0]
        for path in (*self.logs.glob(f"*/{START_FILE}"), *empty):
            path.unlink()
        for folder in (*self.logs.glob("*"), self.logs):
            with suppress(OSError):  # it holds something, or is not there
                folder.rmdir()
        unused = (self.lock_path, self.stop) if forget_request else (self.lock_path,)
        if not {entry.name for entry in self.path.iterdir()} - {path.name for path in unused}:
            for path in unused:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # something has come meanwhile
                self.path.rmdir()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_state(self, loaded: Loaded, resume: bool) -> None:
        where, shown = loaded.where("run_dir"), repr(shown_path(self.path))
        place = _nearest(self.path)
        if not place.is_dir():
            kind = "a symbolic link that leads to no folder" if place.is_symlink() else "a file"
            its = shown if place == self.path.absolute() else f"{shown_path(place)!r}, above {shown},"
            raise UserError(f"{where}: {its} is {kind}: name a folder")
        if resume and not self.recipe.is_file():
            raise UserError(f"{where}: {shown} holds no run to resume: leave --resume out, or set run_dir")
        names = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        used = {name for name in names - BESIDE_RUN if not fnmatch.fnmatchcase(name, PARTIALS)}
        if not resume and used:
            raise UserError(f"{where}: {shown} is not empty: add --resume, or set another run_dir")

    def _refuse_unwritable(self, loaded: Loaded) -> None:
        """Try to write where the run will: the folder or the nearest one above it, and what an earlier start made."""
        folders = [_nearest(self.path), *filter(Path.is_dir, (self.checkpoints, self.logs, self.tensorboard))]
        try:
            for folder in folders:
                try_to_write(folder)
            for path in filter(Path.is_file, (self.metrics, self.validation)):
                with writing(path):
                    os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
        except WriteRefusedError as error:
            raise WriteRefusedError(f"{loaded.where('run_dir')}: {shown_path(self.path)!r}: {error}") from error

    def is_held(self) -> bool:
        """Return whether a process holds the lock; its file alone may be that of a process that was killed."""
        try:
            lock = os.open(self.lock_path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(lock)

    def _take(self, lock: int) -> None:
        """Lock the open file. If another process holds the lock, close the file and raise ``UserError``."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
                    os.close(lock)
                    raise UserError(
                        f"run_dir {shown_path(self.path)!r} is in use by process {owner}: wait for it, or set another "
                        "run_dir"
                    ) from None
                time.sleep(0.05)


def try_to_write(folder: Path) -> None:
    """Write a file's worth of bytes into ``folder``, and take them back. ``WriteRefusedError`` where it cannot be."""
    with writing(folder), tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def folder_name(step: int) -> str:
    """Return the name of the folder of the checkpoint after ``step``."""
    return f"step_{step:08d}"


def is_step_name(name: str) -> bool:
    """Return whether ``folder_name`` gives this name for some step."""
    return re.fullmatch(r"step_([0-9]{8}|[1-9][0-9]{8,17})", name) is not None


def _require_possible(path: Path) -> None:
    """Raise ``UserError`` where there can be no folder of this name with a run in it, or this process may not look."""
    shown = f"run_dir {shown_path(path)!r}"
    try:
        name = str(path.absolute()).encode()
        if b"\0" in name:
            raise UserError(f"{shown}: not a possible name of a folder: set another run_dir")
        if max(map(len, name.split(b"/"))) > MAX_NAME_BYTES or len(name) + LONGEST_INSIDE > MAX_PATH_BYTES:
            raise UserError(
                f"{shown}: too long: a name may have {MAX_NAME_BYTES} bytes, and the whole path "
                f"{MAX_PATH_BYTES - LONGEST_INSIDE}: set a shorter run_dir"
            )
        (path / "recipe.yaml").exists()
    except UnicodeEncodeError:
        raise UserError(f"{shown}: not a possible name of a folder: set another run_dir") from None
    except OSError as error:
        raise UserError(f"{shown}: cannot be looked into ({error.strerror}): set another run_dir") from error


def _nearest(path: Path) -> Path:
    """Return ``path``, or the nearest existing path above it."""
    place = path.absolute()
    while not os.path.lexists(place):
        place = place.parent
    return place


def check_same_run(stored: Loaded, given: Loaded) -> None:
    """Check that a resumed run keeps every key that decides what is learned (all but ``CHANGEABLE_ON_RESUME``).

    Raises ``UserError`` that lists the keys with both values.
    """
    changed = {
        key: values
        for key, values in differences(unpinned(stored.named), unpinned(given.named)).items()
        if not any(_matches(split_dotted(key), pattern.split(".")) for pattern in CHANGEABLE_ON_RESUME)
    }
    if changed:
        listed = ", ".join(f"{key} ({_shown(old)} -> {_shown(new)})" for key, (old, new) in [*changed.items()][:10])
        listed += f" and {len(changed) - 10} keys more" if len(changed) > 10 else ""
        raise UserError(
            f"{given.path}: differs from the run to resume, {stored.path}, in {listed}: "
            "put these back, or set another run_dir for a new run"
        )


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Match part by part, as a name may hold dots; ``*`` stands for one part, at the end for the rest."""
    if len(path) < len(pattern) or (pattern[-1] != "*" and len(path) > len(pattern)):
        return False
    return all(expected in ("*", part) for expected, part in zip(pattern, path, strict=False))


def _shown(value: Any) -> str:
    return shortened("absent" if value is None else json.dumps(value, ensure_ascii=False))
