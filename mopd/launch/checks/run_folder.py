"""The run folder as several nodes see it: one folder, writable, with renames that arrive and locks that exclude.

========  ===============================================  =====================================
step      node 0                                           the other nodes
========  ===============================================  =====================================
folder    writes a file with a random word                 look for it, write a file of their own
renamed   puts another word in its place                   look for it
lock      locks a file                                     must not get the lock
unlocked  lets go                                          must get it
========  ===============================================  =====================================

The files are named as unfinished writes are, so that a run removes those of a check that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mopd.base.files.reading import shown_path
from mopd.base.files.writing import WriteRefusedError, write_text, writing
from mopd.base.types import UserError
from mopd.config.load import Loaded
from mopd.launch.checks.inputs import Check
from mopd.launch.checks.meeting import Meeting
from mopd.launch.preparing import num_weights
from mopd.run.folder import try_to_write

STAGE_S = 30.0
"""Deadline of what takes moments on a sound file system."""
VISIBLE_IN_S = 1.0
"""How long a file may take to be seen by others: a stop request and a replica's heartbeat are files."""
LOOK_S = 3.0
NUM_CHECKPOINTS = 2
"""The last one stays until the next is complete."""
MIXED_BYTES, FP32_BYTES, MAIN_BYTES = 14, 12, 4
"""Bytes of one weight in a checkpoint: bf16, fp32 main weight and two moments; all in fp32 without a main weight, which
the distributed optimizer writes all the same."""
LOCK_CURE = "mount it with locks that hold across nodes (Lustre: flock; NFS: without nolock and local_lock)"
_POLL_S = 0.01


class RunFolderTrials:
    """What several nodes try together in the run folder; node 0 returns the outcomes, the others nothing."""

    def __init__(self, meeting: Meeting, loaded: Loaded, names: Sequence[str]) -> None:
        """``names`` of all nodes; only node 0 needs them."""
        self._meeting, self._loaded, self._names = meeting, loaded, names
        self._path = Path(loaded.recipe.run_dir).absolute()
        self._where = f"{loaded.where('run_dir')}: {shown_path(loaded.recipe.run_dir)!r}"

    def run(self) -> list[Check]:
        """Run the steps in order, as far as they make sense. Leaves nothing behind."""
        made = [folder for folder in (self._path, *self._path.parents) if not folder.exists()]
        files: TrialFiles | None = None
        try:
            begun = self._meeting.decide("folder", self._begin, STAGE_S)
            files = TrialFiles(self._path, begun["tag"])
            checks = self._visible(files, begun["word"])
            if self._meeting.decide("folder is shared", lambda: all(c.status == "ok" for c in checks), STAGE_S):
                checks += [*self._replaced(files), *self._locked(files)]
            return checks
        finally:
            if self._meeting.place.is_first:
                for path in () if files is None else (files.word, files.lock):
                    with contextlib.suppress(OSError):  # a folder that cannot be written has its line already
                        path.unlink(missing_ok=True)
                for folder in made:
                    with contextlib.suppress(OSError):  # it was not made, or another process has begun to use it
                        folder.rmdir()

    def _begin(self) -> dict[str, Any]:
        tag, word = secrets.token_hex(4), secrets.token_hex(8)
        try:
            with writing(self._path):
                self._path.mkdir(parents=True, exist_ok=True)
            write_text(TrialFiles(self._path, tag).word, word)
        except UserError:  # reported by its own attempt to write, as every node's
            return {"tag": tag, "word": None}
        return {"tag": tag, "word": word}

    def _visible(self, files: TrialFiles, word: str | None) -> list[Check]:
        folder = next(folder for folder in (self._path, *self._path.parents) if folder.is_dir())
        own: dict[str, Any] = {"refused": "", "free": shutil.disk_usage(folder).free, "seen_s": None}
        try:
            try_to_write(folder)
            own["seen_s"] = None if word is None else files.seconds_until(word)
        except WriteRefusedError as error:
            own["refused"] = str(error)
        answers = self._meeting.gather("folder", own, STAGE_S)

        def problem(answer: dict[str, Any]) -> str | None:
            if answer["refused"]:
                return f"{self._loaded.where('run_dir')}: {answer['refused']}"
            if word is not None and answer["seen_s"] is None:
                return (
                    f"{self._where}: a file that {self._names[0]} wrote there is not seen: name a folder on a file "
                    "system that all nodes share"
                )
            return None

        problems = self._problems(answers, problem)
        shared = self._meeting.outcomes("run_dir", problems, "all write in it, and see what one writes")
        return shared if problems else [*shared, *self._room([answer["free"] for answer in answers if answer])]

    def _room(self, free: Sequence[int]) -> list[Check]:
        student = self._loaded.recipe.student
        weights = num_weights(Path(student.model))
        if not free or weights is None:
            return []
        fp32_bytes = FP32_BYTES + (MAIN_BYTES if student.optimizer.use_distributed_optimizer else 0)
        each = weights * (fp32_bytes if student.dtype == "float32" else MIXED_BYTES)
        kept = len([*self._path.glob("checkpoints/step_*/manifest.json")])
        needed = max(1, NUM_CHECKPOINTS - kept) * each
        least = min(free)
        detail = f"{least / 2**30:.1f} GiB free, {NUM_CHECKPOINTS} checkpoints take {needed / 2**30:.1f}"
        name = self._names[free.index(least)]
        problems = [f"{name}: {self._where}: {detail}: free space there, or set another run_dir"]
        return self._meeting.outcomes("room", problems if least < needed else [], detail)

    def _replaced(self, files: TrialFiles) -> list[Check]:
        """Rename over a file that all have read, as every write of a run ends."""
        word = secrets.token_hex(8)
        if self._meeting.place.is_first:
            write_text(files.word, word)
        word = self._meeting.decide("renamed", lambda: word, STAGE_S)
        seconds = files.seconds_until(word)
        answers = self._meeting.gather("renamed", LOOK_S if seconds is None else seconds, STAGE_S)

        def problem(seconds: float) -> str | None:
            if seconds <= VISIBLE_IN_S:
                return None
            return (
                f"{self._where}: a rename is seen after {seconds:.1f} s or more, at most {VISIBLE_IN_S:g} are allowed: "
                "mount it with a shorter attribute cache (NFS: actimeo=1)"
            )

        problems = self._problems(answers, problem)
        slowest = max((seconds for seconds in answers if seconds is not None), default=0.0)
        return self._meeting.outcomes("rename", problems, f"seen by all in {slowest:.2f} s")

    def _locked(self, files: TrialFiles) -> list[Check]:
        is_first = self._meeting.place.is_first
        with files.lock.open("wb") if is_first else contextlib.nullcontext() as file:
            own: str = self._meeting.decide("lock", lambda: _flock(file), STAGE_S)
            answers = self._meeting.gather("lock", "held" if is_first else files.try_lock(0.0), STAGE_S)
        self._meeting.decide("unlocked", lambda: True, STAGE_S)
        later = self._meeting.gather("unlocked", files.try_lock(LOOK_S), STAGE_S)

        def not_excluded(got: str) -> str | None:
            if got == "got":
                return (
                    f"{self._where}: a lock of {self._names[0]} does not exclude it, and two runs could write at "
                    f"once: {LOCK_CURE}"
                )
            return None if got == "held" else f"{self._where}: flock: {got}: {LOCK_CURE}"

        def not_free(got: str) -> str | None:
            if got != "held":
                return None
            return f"{self._where}: a lock is not free {LOOK_S:g} s after it was let go: {LOCK_CURE}"

        problems = [] if own == "got" else [f"{self._names[0]}: {self._where}: flock: {own}: {LOCK_CURE}"]
        problems += [*self._problems(answers, not_excluded), *self._problems(later, not_free)]
        return self._meeting.outcomes("flock", problems, "excludes across nodes")

    def _problems(self, answers: Sequence[Any], problem: Callable[[Any], str | None]) -> list[str]:
        """Return the lines of the nodes whose answer is a problem, or that gave none."""
        silent = f"{self._where}: no answer in {STAGE_S:g} s: the file system hangs there, or the node is gone"
        found = [silent if answer is None else problem(answer) for answer in answers]
        return [f"{name}: {line}" for name, line in zip(self._names, found, strict=False) if line is not None]


class TrialFiles:
    """The two files of one check."""

    def __init__(self, folder: Path, tag: str) -> None:
        self.word = folder / f".nodes-{tag}.word.partial"
        self.lock = folder / f".nodes-{tag}.lock.partial"

    def seconds_until(self, word: str) -> float | None:
        """Return how long it took until the file held ``word``; ``None`` after ``LOOK_S``."""
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < LOOK_S:
            with contextlib.suppress(OSError), self.word.open("rb") as file:
                if file.read(2 * len(word)) == word.encode():
                    return waited
            time.sleep(_POLL_S)
        return None

    def try_lock(self, patience_s: float) -> str:
        """Return ``got`` (and let go), ``held`` by another for so long, or what the system says."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                with self.lock.open("r+b") as file:
                    outcome = _flock(file)
            except OSError as error:
                return str(error.strerror)
            if outcome != "held" or time.monotonic() >= deadline:
                return outcome
            time.sleep(_POLL_S)


def _flock(file: BinaryIO | None) -> str:
    """Try to lock the open file: ``got``, ``held`` by another, or what the system says."""
    assert file is not None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError as error:
        return str(error.strerror)
    return "got"
