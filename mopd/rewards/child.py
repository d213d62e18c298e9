"""The process of a custom reward: ``python -I child.py FILE FUNCTION PARENT_PID LINK_FD MAX_BYTES``.

It imports nothing of mopd. Messages are JSON lines over the socket LINK_FD::

    <── {"ready": true}
    ──> [keyword arguments, …]
    <── {"values": [number, …]}    or    {"error": "…", "item": 0}

The only part of the function's results that travels is a number in its range.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import reprlib
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
MAX_REWARD = 1e9
"""Largest absolute reward: larger ones lose digits in fp32, and their squares overflow soon after."""
MAX_SHOWN = 300
"""Characters of a value or an exception in a message."""


def main(path: str, function: str, parent_pid: int, link_fd: int, max_bytes: int) -> None:
    """Serve batches until the link closes."""
    bind(parent_pid, max_bytes)
    serve(link_fd, lambda: load_named(path, function), lambda reward, calls: _run(reward, calls, path), path)


def serve(
    link_fd: int, load: Callable[[], Any], run: Callable[[Any, list[dict[str, Any]]], dict[str, Any]], path: str = ""
) -> None:
    """Answer batches until the link closes: ``run`` gets the result of ``load``. Errors name lines of ``path``."""
    batches, answers = os.fdopen(link_fd, encoding="utf-8"), os.fdopen(os.dup(link_fd), "w", encoding="utf-8")

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        loaded = load()
    except BaseException as error:  # also SystemExit and the like: reported to the caller, then the process ends
        answer({"error": f"cannot be loaded: {describe(error, path)}"})
        return
    answer({"ready": True})
    for line in batches:
        answer(run(loaded, json.loads(line)))


def bind(parent_pid: int, max_bytes: int) -> None:
    """Die with the parent, and take no more than so much memory.

    There is no limit of CPU time (it would add up over the whole run; every batch has a deadline).
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def load_named(path: str, function: str) -> Callable[..., Any]:
    """Return a function or a class of the Python file ``path``."""
    sys.path.insert(0, str(Path(path).parent))
    name = Path(path).stem
    name = f"{name}_reward" if name in sys.modules else name  # a file called json.py must not replace json
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file: name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    reward: Callable[..., Any] = getattr(module, function)
    if not callable(reward):
        raise TypeError(f"it is no function but {shown(reward)}")
    return reward


def _run(reward: Callable[..., Any], calls: list[dict[str, Any]], path: str) -> dict[str, Any]:
    values: list[float] = []
    for call in calls:
        try:
            value = reward(**call)
            number, problem = number_of(value)
        except BaseException as error:  # whatever the function raises, the run ends with its name
            return {"error": f"failed: {describe(error, path)}", "item": len(values)}
        if problem:
            return {"error": f"returned {shown(value)}, {problem}", "item": len(values)}
        values.append(number)
    return {"values": values}


def number_of(value: Any) -> tuple[float, str]:
    """Return a number of Python, numpy or torch as a plain float, and an empty text; or 0 and why it is none."""
    if not isinstance(value, (int, float)) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (int, float)) or value != value:
        return 0.0, "not a finite number"
    if abs(value) > MAX_REWARD:
        return 0.0, "not a finite number" if value in (math.inf, -math.inf) else f"larger than {MAX_REWARD:g}"
    return float(value), ""


def describe(error: BaseException, path: str) -> str:
    """Return type, message and line in ``path`` of an error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" (line {lines[-1]})" if lines else ""
    message = " ".join(str(error)[: 10 * MAX_SHOWN].split())
    return f"{plain(type(error).__name__)}: {plain(message)}{where}"


def shown(value: Any) -> str:
    """Show a value in few characters."""
    return plain(reprlib.repr(value))


def plain(text: Any, most: int = MAX_SHOWN) -> str:
    """Return at most ``most`` characters of a text, each of which UTF-8 can carry: lone surrogates are spelled out."""
    return str.__str__(text)[:most].encode("utf-8", "backslashreplace").decode()[:most]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
