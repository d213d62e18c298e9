"""The run folder as several nodes see it: one folder, writable, with renames that arrive and locks that exclude.

Node 0 writes a file with a word that nobody can guess, the others look for it; it is replaced, they look again; node
0 locks a file, and the others must not get it until it lets go. The files are named as unfinished writes are, so that a
run removes what a check that was killed left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mopd.base.files.reading import shown_path
from mopd.base.files.writing import WriteRefusedError, write_text, writing
from mopd.base.types import UserError
from mopd.config.load import Loaded
from mopd.launch.checks.inputs import Check
from mopd.launch.checks.meeting import Meeting
from mopd.launch.preparing import num_weights
from mopd.run.folder import PROBE_BYTES

STAGE_S = 30.0
"""Deadline of what takes moments on a sound file system."""
SEEN_IN_S = 1.0
"""How long a file may take to be seen by others: a stop request and a replica's heartbeat are files."""
LOOKED_FOR_S = 3.0
NUM_CHECKPOINTS = 2
"""The last one stays until the next is complete."""
MIXED_BYTES, FP32_BYTES, MAIN_BYTES = 14, 12, 4
"""Of one weight in a checkpoint: bf16, fp32 main weight and two moments; all in fp32 without a main weight, which the
distributed optimizer writes all the same."""
LOCK_CURE = "mount it with locks that hold across nodes (Lustre: flock; NFS: without nolock and local_lock)"
_POLL_S = 0.01


class RunFolderTrials:
    """What several nodes do together in the run folder; node 0 reports."""

    def __init__(self, meeting: Meeting, loaded: Loaded, names: Sequence[str]) -> None:
        """``names`` of all nodes, needed on node 0."""
        self._meeting, self._loaded, self._names = meeting, loaded, names
        self._path = Path(loaded.recipe.run_dir).absolute()
        self._where = f"{loaded.where('run_dir')}: {shown_path(loaded.recipe.run_dir)!r}"

    def run(self) -> list[Check]:
        """The outcomes on node 0; nothing elsewhere. Leaves nothing behind."""
        made = [folder for folder in (self._path, *self._path.parents) if not folder.exists()]
        word, files = secrets.token_hex(8), None
        try:
            begun = self._meeting.decide("folder", lambda: self._begin(word), STAGE_S)
            files = TrialFiles(self._path, begun["tag"])
            checks = self._seen(files, begun)
            if self._meeting.decide("folder is shared", lambda: all(c.status == "ok" for c in checks), STAGE_S):
                checks += [*self._replaced(files), *self._locked(files)]
            return checks
        finally:
            if self._meeting.leads:
                if files is not None:
                    files.remove()
                for folder in made:
                    with contextlib.suppress(OSError):  # it was not made, or somebody else has begun to use it
                        folder.rmdir()

    def _begin(self, word: str) -> dict[str, Any]:
        tag = secrets.token_hex(4)
        try:
            with writing(self._path):
                self._path.mkdir(parents=True, exist_ok=True)
            write_text(TrialFiles(self._path, tag).word, word)
        except UserError:  # told by its own attempt, as every node's
            return {"tag": tag, "word": None}
        return {"tag": tag, "word": word}

    def _seen(self, files: TrialFiles, begun: dict[str, Any]) -> list[Check]:
        place = next(folder for folder in (self._path, *self._path.parents) if folder.is_dir())
        own: dict[str, Any] = {"refused": _refused(place), "free": shutil.disk_usage(place).free}
        own["seen_s"] = None if begun["word"] is None or own["refused"] else files.seconds_until(begun["word"])
        answers = self._meeting.gather("folder", own, STAGE_S)
        problems: list[str] = []
        for node, answer in self._answers(answers, problems):
            if answer["refused"]:
                problems.append(f"{self._names[node]}: {self._loaded.where('run_dir')}: {answer['refused']}")
            elif begun["word"] is not None and answer["seen_s"] is None:
                problems.append(
                    f"{self._names[node]}: {self._where}: a file that {self._names[0]} wrote there is not seen: name a "
                    "folder on a file system that all nodes share"
                )
        shared = self._outcomes("run_dir", problems, "all write in it, and see what one writes")
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
        return self._outcomes("room", problems if least < needed else [], detail)

    def _replaced(self, files: TrialFiles) -> list[Check]:
        """A rename over a file that all have read, as every write of a run ends."""
        word: str = self._meeting.decide("renamed", lambda: files.replace(secrets.token_hex(8)), STAGE_S)
        answers = self._meeting.gather("renamed", {"seen_s": files.seconds_until(word)}, STAGE_S)
        problems: list[str] = []
        slowest = 0.0
        for node, answer in self._answers(answers, problems):
            seconds = LOOKED_FOR_S if answer["seen_s"] is None else float(answer["seen_s"])
            slowest = max(slowest, seconds)
            if seconds > SEEN_IN_S:
                problems.append(
                    f"{self._names[node]}: {self._where}: a rename is seen after {seconds:.1f} s or more, at most "
                    f"{SEEN_IN_S:g} are allowed: mount it with a shorter attribute cache (NFS: actimeo=1)"
                )
        return self._outcomes("rename", problems, f"seen by all in {slowest:.2f} s")

    def _locked(self, files: TrialFiles) -> list[Check]:
        with contextlib.ExitStack() as held:
            own: str = self._meeting.decide("lock", lambda: held.enter_context(files.locked()), STAGE_S)
            others = "held" if self._meeting.leads else files.try_lock(0.0)
            answers = self._meeting.gather("lock", {"got": others}, STAGE_S)
        self._meeting.decide("let go", lambda: True, STAGE_S)
        later = self._meeting.gather("let go", {"got": files.try_lock(LOOKED_FOR_S)}, STAGE_S)
        problems = [] if own == "got" else [f"{self._names[0]}: {self._where}: flock: {own}: {LOCK_CURE}"]
        for node, answer in self._answers(answers, problems):
            if answer["got"] == "got":
                problems.append(
                    f"{self._names[node]}: {self._where}: a lock of {self._names[0]} does not exclude it, "
                    f"and two runs could write at once: {LOCK_CURE}"
                )
            elif answer["got"] != "held":
                problems.append(f"{self._names[node]}: {self._where}: flock: {answer['got']}: {LOCK_CURE}")
        for node, answer in self._answers(later, problems):
            if answer["got"] == "held":
                problems.append(
                    f"{self._names[node]}: {self._where}: a lock is not free {LOOKED_FOR_S:g} s after it "
                    f"was let go: {LOCK_CURE}"
                )
        return self._outcomes("flock", problems, "excludes across nodes")

    def _answers(self, answers: Sequence[Any], problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Of the nodes that answered; the others become problems."""
        for node, answer in enumerate(answers):
            if answer is None:
                problems.append(
                    f"{self._names[node]}: {self._where}: no answer in {STAGE_S:g} s: the file system hangs there, or "
                    "the node is gone"
                )
            else:
                yield node, answer

    def _outcomes(self, name: str, problems: Sequence[str], detail: str) -> list[Check]:
        if not self._meeting.leads:
            return []
        return [Check(name, "failed", line) for line in problems] or [Check(name, "ok", detail)]


class TrialFiles:
    """The two files of one check."""

    def __init__(self, folder: Path, tag: str) -> None:
        self.word = folder / f".nodes-{tag}.word.partial"
        self._lock = folder / f".nodes-{tag}.lock.partial"

    def replace(self, word: str) -> str:
        """Put another word into the place of the first; returns it."""
        write_text(self.word, word)
        return word

    def seconds_until(self, word: str) -> float | None:
        """How long it took until the file held ``word``; ``None``: longer than is looked for."""
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < LOOKED_FOR_S:
            with contextlib.suppress(OSError), self.word.open("rb") as file:
                if file.read(2 * len(word)) == word.encode():
                    return waited
            time.sleep(_POLL_S)
        return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[str]:
        """Holds the lock within: ``got``, or what the system says."""
        with self._lock.open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                yield str(error.strerror)
                return
            yield "got"

    def try_lock(self, patience_s: float) -> str:
        """``got`` (and let go), ``held`` by another for so long, or what the system says."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                with self._lock.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return "got"
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return "held"
                time.sleep(_POLL_S)
            except OSError as error:
                return str(error.strerror)

    def remove(self) -> None:
        """Both, where they are."""
        for path in (self.word, self._lock):
            with contextlib.suppress(OSError):  # a folder that cannot be written is told already
                path.unlink(missing_ok=True)


def _refused(folder: Path) -> str:
    """Why nothing can be written there; empty where it can."""
    try:
        with writing(folder), tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except WriteRefusedError as error:
        return str(error)
    return ""
