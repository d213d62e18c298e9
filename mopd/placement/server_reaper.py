"""A process between mopd and one engine server: whatever ends, nothing of the server is left.

::

    mopd ──stdin──> keeper ──parent death signal──> server ──> its own children (one process group)

Run by file (``python -I -S keeper.py FOLDER COMMAND …``). The end of its standard input means that mopd is gone,
however it ended: the server's whole group is killed. SIGTERM is passed on, so that the server can end in order. When
the server ends by itself its group is killed as well (an inference engine's workers outlive it). FOLDER, with the
server's files, is removed last. Exit code: the server's, or 128 + n when signal n ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType

PR_SET_PDEATHSIG = 1
LOST_CODE = 70


def main(folder: str, command: Sequence[str]) -> int:
    """Start the server, wait for its end, kill what is left of its group, remove its folder."""
    keeper = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def tie_to_keeper() -> None:
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != keeper:
            os._exit(LOST_CODE)

    # Started by the main thread: the kernel sends the death signal when the thread that forked ends.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=tie_to_keeper)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if server.returncode is None:
            os.kill(server.pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_kill_when_alone, args=(server.pid,), daemon=True).start()
    # Not reaped yet: its process id, which names the group, cannot belong to anybody else.
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    _kill_group(server.pid)
    code = server.wait()
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: another server's folder is there
        os.rmdir(os.path.dirname(folder))
    return code if code >= 0 else 128 - code


def _kill_when_alone(group: int) -> None:
    while os.read(0, 4096):
        pass
    _kill_group(group)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:  # the group has ended by itself
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
