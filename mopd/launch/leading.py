"""A trainer rank's life: rank 0 starts the orchestrator process, and every rank joins the others with its share of the
student and follows the orchestrator."""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from mopd.base.files.reading import read_text, shown_path
from mopd.base.files.writing import write_text
from mopd.base.types import LostError, UserError
from mopd.config.load import Loaded
from mopd.config.schema import Recipe
from mopd.data_plane.interface import Reader, StorageEnded
from mopd.data_plane.reading import open_reader
from mopd.launch import heartbeat
from mopd.launch.failure import leave, rank_0_host, rank_and_world_size
from mopd.launch.heartbeat import LeaderWatch
from mopd.launch.link import LinkEnded, RankLink, error_of
from mopd.launch.preparing import task_of
from mopd.launch.rank_log import rank_log
from mopd.launch.ranks import CommandChannel, follow, run_commands, student_facts
from mopd.launch.reaching import check_reach, told_to_reach
from mopd.launch.signals import ENDING, ending_in_order
from mopd.placement.ending import END_S
from mopd.placement.gpus import local_rank
from mopd.placement.process import how_it_ended
from mopd.run.folder import START_FILE, RunDir
from mopd.student import parallel
from mopd.student.worker import StudentWorker

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


RANK_0_S = 2.0
"""Seconds for rank 0 to say why the data plane is gone."""
SEEN_S = 60.0
"""Seconds for rank 0's file to be seen by the other nodes: network file systems cache what they have looked up."""
LOG = "orchestrator.log"
SMALL_BYTES = 4096
Rank = tuple[StudentWorker, CommandChannel]


def start_orchestrator(
    loaded: Loaded,
    what: str,
    options: Mapping[str, Any],
    run: RunDir | None = None,
    ask: Callable[[], None] | None = None,
) -> str | None:
    """Start the orchestrator from rank 0, and follow it with the other ranks if it needs the student. Returns the line
    to print of a run that was asked to stop.

    Args:
        what: the task, a key of ``mopd.orchestrator.__main__.TASKS``.
        options: the task's own, as JSON.
        run: the folder for logs, if any.
        ask: what the first SIGTERM does.

    Raises:
        UserError: as the orchestrator raised it; ``LostError`` with how it ended where it said nothing.
    """
    recipe, logs = loaded.recipe, None if run is None else run.logs_here
    timeout_s = recipe.schedule.wait_timeout_s
    log = None if logs is None else logs / LOG
    with (
        OrchestratorProcess(task_of(loaded, what, options, log), log=log, timeout_s=timeout_s) as orchestrator,
        ending_in_order(orchestrator.end, ask),
    ):
        first = orchestrator.link.next_command()
        if "end" in first:
            end: str | None = first["end"]
            return end
        if rank_and_world_size()[1] > 1:
            orchestrator.watch(lambda error: leave(error if run is None else run.with_cure(error)))
        joining = first["kwargs"]
        reader = open_reader(joining["data_plane"], timeout_s=timeout_s)
        with joined(recipe, (joining, reader), logs) as (worker, channel):
            orchestrator.link.answer(student_facts(recipe, worker))
            channel.stopped = run_commands(worker, channel, orchestrator.link)
        reader.close()
        return channel.stopped


def follow_rank_0(recipe: Recipe, logs: Path | None = None) -> bool:
    """Build another rank's part of the student and follow rank 0. Returns whether the run was asked to stop."""
    with joined(recipe, None, logs) as (worker, channel):
        return follow(worker, channel)


@contextmanager
def joined(recipe: Recipe, leading: tuple[dict[str, Any], Reader] | None, logs: Path | None) -> Iterator[Rank]:
    """Join the other ranks and build this rank's share of the student. The others stop when rank 0 leaves the block.

    Args:
        leading: on rank 0 the orchestrator's ``domains`` of the data and address of the ``data_plane``, and a reader of
            it; rank 0 passes the former on to the other ranks (``None``).
        logs: the folder of this node's logs, if any.
    """
    timeout_s = recipe.schedule.wait_timeout_s
    leader = LeaderWatch(timeout_s)
    if leading is None:
        leader.await_joining()
    else:
        heartbeat.announce()
    check_reach(timeout_s)
    parallel_ranks = parallel.joined(
        recipe.student.parallel, timeout_s=timeout_s, seed=recipe.seed, local_rank=local_rank()
    )
    with contextlib.ExitStack() as ranks, contextlib.ExitStack() as log:
        with told_to_reach():
            layout = ranks.enter_context(parallel_ranks)
        channel = CommandChannel(layout.control_group, leader)
        if leading is None:
            start = channel.receive()
            require_shared(logs, start["mark"])
        channel.watch = log.enter_context(rank_log(logs, layout.rank, deadline_s=timeout_s))
        if leading is not None:
            # A default teacher answers for the domains of the data that the recipe does not name.
            domains = list(recipe.assignment.domains_among(leading[0]["domains"]))
            mark = mark_start(logs) if logs is not None and rank_0_host() is not None else None
            start = {"domains": domains, "data_plane": leading[0]["data_plane"], "mark": mark}
            channel.send(start)
        with _rank_0_first() if leading is None else contextlib.nullcontext():
            reader = open_reader(start["data_plane"], timeout_s=timeout_s) if leading is None else leading[1]
            worker = StudentWorker(recipe, reader, start["domains"])
            with worker.saving:
                yield worker, channel
        if leading is None:
            reader.close()
        else:  # after an error no rank listens
            channel.send({"call": "stop", "kwargs": {"is_asked": channel.stopped is not None}})


def mark_start(logs: Path) -> list[str]:
    """Write a random word beside rank 0's log. Returns the file, below the folder of all nodes' logs, and the word."""
    file, word = logs / START_FILE, secrets.token_hex(8)
    write_text(file, word)
    return [f"{logs.name}/{START_FILE}", word]


def require_shared(logs: Path | None, mark: Sequence[str] | None) -> None:
    """Check that ``logs``, of this node, lie beside rank 0's, which has made ``mark`` there. A run folder of the same
    name, even a copy with logs of former starts, is a ``UserError``."""
    if logs is None or mark is None:
        return
    name, word = mark
    path, deadline = logs.parent / name, time.monotonic() + SEEN_S
    while not path.is_file() or read_text(path, cure="start again", max_bytes=SMALL_BYTES) != word:
        if time.monotonic() > deadline:
            raise UserError(
                f"run_dir: {shown_path(path)!r} is not there on {logs.name} as rank 0 has written it: name a folder "
                "that all nodes share, and start them in one working directory"
            )
        time.sleep(0.2)


@contextmanager
def _rank_0_first() -> Iterator[None]:
    """Delay the report of a lost data plane: the first rank that reports an error ends the run, and rank 0 may have
    closed the data plane because of an error of its own."""
    try:
        yield
    except StorageEnded:
        time.sleep(RANK_0_S)
        raise
