"""One stage of ``tools/gpu_student.py``: what becomes of it, and the processes that it starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
TAIL = 400
"""Characters of a failed child's last words."""
TERMINATE_S = 40.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One figure and its limit."""

    name: str
    value: float | bool
    limit: float | bool
    ok: bool


@dataclass(kw_only=True)
class Stage:
    """What became of one stage."""

    name: str
    status: str
    """passed, failed or skipped."""
    reason: str = ""
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


class Skipped(Exception):
    """The stage cannot run here; the message says why."""


class Failed(Exception):
    """The stage broke; the message says how."""


def need(packages: Sequence[str]) -> None:
    """``Skipped`` unless this interpreter has them."""
    missing = [name for name in packages if not is_there(name)]
    if missing:
        raise Skipped(f"this interpreter lacks {', '.join(missing)}")


def is_there(name: str) -> bool:
    """Whether a package of that name is installed."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def start(command: Sequence[str], device: str, *, stdout: IO[str] | None = None) -> subprocess.Popen[str]:
    """A child that sees the first GPU, or none. What it says is kept for its end, ``stdout`` where it is given."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    # Packages that gpu_check.sh was brought (--wheels) stand on its own path.
    places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": places, **hidden}
    if stdout is not None:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait(child: subprocess.Popen[str], what: str, deadline: float, *, good: Sequence[int] = (0,)) -> None:
    """Until the child has ended with an exit code of ``good``; else ``Failed``, ``Skipped`` if time is up."""
    try:
        said, told = child.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.terminate()  # mopd's launcher ends its ranks, which takes a while
        try:
            child.wait(timeout=TERMINATE_S)
        except subprocess.TimeoutExpired:
            child.kill()
        raise Skipped(f"{what} did not end within the time limit: raise --time-limit") from None
    if child.returncode not in good:
        output = " ".join((said or told or "").split())
        raise Failed(f"{what} ended with exit code {child.returncode}: ...{output[-TAIL:]}")
