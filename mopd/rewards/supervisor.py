"""Supervisor between a run and the process of a reward.

``supervisor.py PARENT_PID CALLS ANSWERS MAX_BYTES SCRATCH CHILD FILE FUNCTION MARK``: whatever the function starts,
however it detaches itself (``fork``, ``setsid``, a parent that dies), becomes a child of this process
(PR_SET_CHILD_SUBREAPER) and is killed with it. It imports nothing of mopd::

    run ── supervisor (subreaper) ── go-between ── child.py ── whatever the function starts

A function that kills its parent hits the go-between. Everything is killed when standard input closes, the run is gone,
the function's process has ended, or all together take too much. One JSON line on standard output then gives the reason:
``{"why": "ended", "code": 7, "words": "…"}``. The folder SCRATCH, if one is named, is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_EVERY_S = 0.1
MAX_PROCESSES = 512
"""Most processes at a time: more than a pool on a large machine, few enough to be counted and killed."""
KILL_S = 5.0
"""Seconds for which everything is killed again and again."""
MAX_WORDS = 4096
"""Bytes kept of what the function writes; the rest is read and dropped, so that it never blocks."""
MAX_READ = 65536


def main(parent_pid: int, calls_fd: int, answers_fd: int, max_bytes: int, scratch: str, child: list[str]) -> None:
    """Start the child, watch it to its end, and kill everything."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the ends are those of `_watch` alone
    output, output_end = os.pipe()
    go_between = os.fork()
    if go_between == 0:
        os.close(output)
        _run_child(child, calls_fd, answers_fd, max_bytes, output_end)
    for descriptor in (calls_fd, answers_fd, output_end):
        os.close(descriptor)
    reason, words = _watch(parent_pid, go_between, output, max_bytes)
    _kill_all()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(OSError):  # the run no longer reads
        os.write(1, json.dumps({**reason, "words": words.decode("utf-8", "replace")}).encode() + b"\n")


def _run_child(child: list[str], calls_fd: int, answers_fd: int, max_bytes: int, output_end: int) -> None:
    """Be the go-between: start the child, and end as it ends."""
    supervisor = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may end by a signal below
    os.nice(5)  # the supervisor must be faster than processes that multiply
    program, path, function, mark = child
    numbers = [str(number) for number in (os.getpid(), calls_fd, answers_fd, max_bytes)]
    process = subprocess.Popen(
        [sys.executable, "-I", program, path, function, *numbers, mark],
        stdin=subprocess.DEVNULL,
        stdout=output_end,
        stderr=output_end,
        pass_fds=(calls_fd, answers_fd),
        start_new_session=True,
    )
    # the pipes must end with the child's own descriptors
    for descriptor in (0, 1, calls_fd, answers_fd, output_end):
        os.close(descriptor)
    code = process.wait()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _watch(parent_pid: int, go_between: int, output: int, max_bytes: int) -> tuple[dict[str, object], bytes]:
    """Return why everything ends now, and the last bytes that the function wrote."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(output, select.POLLIN)
    words = b""
    look_at = 0.0
    while True:
        for descriptor, _ in poll.poll(LOOK_EVERY_S * 1000):
            if descriptor == 0:
                return {"why": "closed"}, words
            read = os.read(output, MAX_READ)
            words = (words + read)[-MAX_WORDS:]
            if not read:
                poll.unregister(output)
        status = _reap(go_between)
        if status is not None:
            os.set_blocking(output, False)
            with contextlib.suppress(BlockingIOError):
                words = (words + os.read(output, MAX_READ))[-MAX_WORDS:]
            return {"why": "ended", "code": os.waitstatus_to_exitcode(status)}, words
        now = time.monotonic()
        if now >= look_at:
            look_at = now + LOOK_EVERY_S
            if os.getppid() != parent_pid:
                return {"why": "closed"}, words
            too_much = _too_much(max_bytes)
            if too_much:
                return {"why": too_much}, words


def _reap(go_between: int) -> int | None:
    """Reap ended processes; return the go-between's status if it is one of them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == go_between:
            return status


def _too_much(max_bytes: int) -> str | None:
    """Return ``processes`` or ``memory`` if our descendants are too many or take too much."""
    pids = list(itertools.islice(descendants(os.getpid()), MAX_PROCESSES + 1))
    if len(pids) > MAX_PROCESSES:
        return "processes"
    page = os.sysconf("SC_PAGE_SIZE")
    if sum(_number_in(f"/proc/{pid}/statm", 1) * page for pid in pids) <= max_bytes:
        return None
    # Pages that forked processes share were counted several times: ask again, at a higher price.
    return "memory" if sum(_share_of_memory(pid) for pid in pids) > max_bytes else None


def descendants(root: int) -> Iterator[int]:
    """Yield all processes below ``root``. The tree may change meanwhile."""
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:  # gone
            continue
        for thread in threads:
            for child in map(int, _read(f"/proc/{pid}/task/{thread}/children").split()):
                waiting.append(child)
                yield child


def _kill_all() -> None:
    """Kill our descendants again and again until none is left: orphans among them become our children."""
    with contextlib.suppress(OSError):  # ahead of any number of processes, if permitted (as root)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    give_up_at = time.monotonic() + KILL_S
    while time.monotonic() < give_up_at:
        for pid in descendants(os.getpid()):  # killed as they are found: none forks while we look for the others
            for kill in (os.killpg, os.kill):  # a group at once: none of it forks away meanwhile
                with contextlib.suppress(OSError):  # no leader of a group, or gone
                    kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _share_of_memory(pid: int) -> int:
    """Return bytes: resident pages, each divided by the number of processes that share it."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _number_in(path: str, place: int) -> int:
    words = _read(path).split()
    return int(words[place]) if len(words) > place else 0


def _read(path: str) -> str:
    """Return a file of /proc; empty if its process is gone."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    parent_pid, calls, answers, max_bytes = map(int, sys.argv[1:5])
    main(parent_pid, calls, answers, max_bytes, sys.argv[5], sys.argv[6:])
