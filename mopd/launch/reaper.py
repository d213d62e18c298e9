"""A process beside the launcher that outlives it: when the launcher is gone, however it ended, nothing of it is left.

Run by file (``python guard.py LAUNCH_DIR``) with the launcher holding the other end of its standard input. The kernel
kills the ranks themselves when the launcher dies; a rank's own children (a checkpoint writer, a reward process) live in
the rank's process group, which is killed here. The launch folder is removed last.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path


def main(launch_dir: Path) -> None:
    """Wait for the launcher's end, then clear up."""
    sys.stdin.read()
    for path in launch_dir.glob("*.pid"):
        try:
            os.killpg(int(path.stem), signal.SIGKILL)
        except ProcessLookupError:  # the usual case: the whole group has ended by itself
            continue
    shutil.rmtree(launch_dir, ignore_errors=True)


if __name__ == "__main__":
    # A terminal's Ctrl-C and a job's SIGTERM go to the launcher, which ends the ranks in order; this follows it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main(Path(sys.argv[1]))
