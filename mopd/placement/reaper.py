"""A process beside mopd that outlives it: whatever ends, and however, nothing of what mopd started is left.

::

    launcher ──stdin──> reaper                                      ranks: each leads a process group
    mopd ──stdin──> reaper ──parent death signal──> server ──> its own children (one process group)

Run by file (``python -I -S reaper.py [--apart] FOLDER [COMMAND …]``). The end of its standard input means that mopd is
gone. With ``--apart`` it leaves its parent: Ray kills the children of a process that it ends.

Without a command it kills the groups that ``*.pid`` files of FOLDER name: the kernel kills ranks when their launcher
dies, but not a rank's own children (a checkpoint writer, a reward process), and a server when its reaper dies, but not
an inference engine's workers.

With a command it starts this server, and kills its group when mopd is gone or the server has ended by itself (an
inference engine's workers outlive it). SIGTERM is passed on, so that the server can end in order. Exit code: the
server's, or 128 + n when signal n ended it.

Python's resource trackers are left to end by themselves, which they do as soon as the rest has: they remove shared
memory and semaphores that the dead could not (an inference engine's, in /dev/shm). FOLDER is removed last.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
LOST_CODE = 70
TRACKER = b"multiprocessing.resource_tracker"
"""Part of the command line of a resource tracker."""
TRACKER_S = 3.0
"""Seconds for trackers to end."""
LOOK_S = 0.02


def kill_ranks(folder: str) -> None:
    """Wait for the launcher's end, then clear up."""
    # A terminal's Ctrl-C and a job's SIGTERM go to the launcher, which ends the ranks in order; this follows it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    _kill_groups({int(path.stem) for path in Path(folder).glob("*.pid")})
    shutil.rmtree(folder, ignore_errors=True)


def keep_server(folder: str, command: Sequence[str]) -> int:
    """Start the server, wait for its end, kill what is left of its group, remove its folder."""
    reaper = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    # A SIGTERM that comes while the server starts waits until it can be passed on: it would end this process alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def tie_to_reaper() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != reaper:
            os._exit(LOST_CODE)

    # Started by the main thread: the kernel sends the death signal when the thread that forked ends.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=tie_to_reaper)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if server.returncode is None:
            os.kill(server.pid, number)

    note = Path(folder).with_name(f"{server.pid}.pid")
    with contextlib.suppress(OSError):  # a full disk: no other process could kill its group then
        note.touch()
    signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_kill_when_alone, args=(server.pid,), daemon=True).start()
    # Not reaped yet: its process id, which names the group, cannot belong to another process.
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    _kill_groups({server.pid})
    code = server.wait()
    note.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    _remove_parent(os.path.dirname(folder))
    return code if code >= 0 else 128 - code


def _remove_parent(folder: str) -> None:
    """Remove the folder of all servers, unless another one's is in it or its owner lives. The owner's lock is one of
    this very folder: in a new one of its name the next server would be taken for abandoned
    (``base/files/temporary.py``)."""
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rmdir(folder)
        finally:
            os.close(lock)


def _kill_when_alone(group: int) -> None:
    while os.read(0, 4096):
        pass
    _kill_groups({group})


def _kill_groups(groups: set[int]) -> None:
    """Kill all groups at once, so that a caller waits no longer for many groups than for one."""
    deadline = time.monotonic() + TRACKER_S
    while time.monotonic() < deadline:
        members = list(_members(groups))
        if not members:  # the usual case: the groups have ended by themselves
            return
        for pid, command in members:
            if TRACKER not in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)
    for pid, _ in _members(groups):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _members(groups: set[int]) -> Iterator[tuple[int, bytes]]:
    """Process id and command line of what lives in these process groups."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked
            state, _, group = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:3]
            if int(group) in groups and state not in "ZX":
                yield int(folder.name), (folder / "cmdline").read_bytes()


if __name__ == "__main__":
    if sys.argv[1] == "--apart":
        del sys.argv[1]
        if os.fork():
            os._exit(0)
    if len(sys.argv) > 2:
        sys.exit(keep_server(sys.argv[1], sys.argv[2:]))
    kill_ranks(sys.argv[1])
