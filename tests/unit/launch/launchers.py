"""Launchers of the tests as child processes (``launch_script.py``), and what they print."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
DEADLINE_S = 150.0


def start(behaviour: str, folder: Path, command: list[str], **variables: str) -> subprocess.Popen[str]:
    """Start ``python COMMAND…`` around ranks that behave as ``rank_script.py`` says, and leave files in ``folder``."""
    free = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, *command, str(HERE / "rank_script.py"), behaviour, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=free | {"PYTHONPATH": str(HERE.parents[2])} | variables,
        cwd=folder,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and errors."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, errors


def pid_from(path: Path) -> int:
    """The process id in a file, once it is there."""
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.02)
    return int(path.read_text())
