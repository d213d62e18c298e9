"""Supervisor of a reward's process: ``supervisor.py PARENT_PID LINK_FD MAX_BYTES PROGRAM ARGUMENT…``.

It imports nothing of mopd::

    run ── supervisor (subreaper) ── child.py or judge.py ── whatever that starts

Everything is killed when standard input closes, the run is gone, or the process has ended: its process group first,
then what has left the group, which becomes a child of the supervisor. One line on standard output then says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
LOOK_EVERY_S = 0.5
"""Seconds between two looks whether the run is still there: a fork of it may hold its end of standard input."""
MAX_OUTPUT_BYTES = 4096
"""Bytes kept of what the process writes; the rest is read and dropped, so that it never blocks."""
MAX_SHOWN = 300
"""Characters of its last line in the reason."""
MAX_READ = 65536


def main(parent_pid: int, link_fd: int, max_bytes: int, program: str, arguments: list[str]) -> None:
    """Start the process, watch it to its end, and kill everything."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the run decides when its reward ends
    output, output_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-I", program, *arguments, str(os.getpid()), str(link_fd), str(max_bytes)],
        stdin=subprocess.DEVNULL,
        stdout=output_end,
        stderr=output_end,
        pass_fds=(link_fd,),
        start_new_session=True,
    )
    os.close(output_end)
    os.close(link_fd)
    has_ended, written = _watch(process.pid, output, parent_pid)
    os.killpg(process.pid, signal.SIGKILL)  # before `wait`: until then no other process can have this number
    code = process.wait()
    while children := Path("/proc/thread-self/children").read_text().split():
        for pid in children:
            os.kill(int(pid), signal.SIGKILL)
        os.waitpid(-1, 0)
    with contextlib.suppress(OSError):  # the run no longer reads
        os.write(1, (_described(code, written) if has_ended else "was ended with the run").encode())


def _watch(pid: int, output: int, parent_pid: int) -> tuple[bool, bytes]:
    """Wait until the process or the run has ended; return whether it is the process, and its last output."""
    end = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (0, end, output):  # `output` after `end`: what was written before the end is then ready too
        poll.register(descriptor, select.POLLIN)
    written = b""
    while os.getppid() == parent_pid:
        ready = {descriptor for descriptor, _ in poll.poll(LOOK_EVERY_S * 1000)}
        if 0 in ready:
            break
        if output in ready:
            read = os.read(output, MAX_READ)
            written = (written + read)[-MAX_OUTPUT_BYTES:]
            if not read:
                poll.unregister(output)
        if end in ready:
            return True, written
    return False, written


def _described(code: int, written: bytes) -> str:
    lines = [line.strip() for line in written.decode("utf-8", "replace").splitlines() if line.strip()]
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"ended its process ({how}): {lines[-1][-MAX_SHOWN:] if lines else 'it wrote nothing to stderr'}"


if __name__ == "__main__":
    run_pid, link, limit = map(int, sys.argv[1:4])
    main(run_pid, link, limit, sys.argv[4], sys.argv[5:])
