"""The process of a custom reward: ``python -I child.py FILE FUNCTION PARENT_PID``. It imports nothing of mopd.

Line by line on its standard streams: first ``{"ready": true}``, then for each batch (a JSON list of keyword arguments)
``{"values": [...]}`` or ``{"error": "..."}``. What the function prints goes to stderr.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(path: str, function: str, parent_pid: int) -> None:
    """Serve batches until stdin closes."""
    threading.Thread(target=_end_with_parent, args=(parent_pid,), daemon=True).start()
    calls, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message, default=repr) + "\n")
        answers.flush()

    try:
        reward = _load(path, function)
    except Exception as error:
        answer({"error": f"cannot be loaded: {_describe(error, path)}"})
        return
    answer({"ready": True})
    for line in calls:
        try:
            answer({"values": [_plain(reward(**call)) for call in json.loads(line)]})
        except Exception as error:
            answer({"error": f"failed: {_describe(error, path)}"})


def _load(path: str, function: str) -> Callable[..., Any]:
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, function)


def _plain(value: Any) -> Any:
    """numpy and torch scalars as Python numbers; the parent judges everything else."""
    return value.item() if hasattr(value, "item") else value


def _describe(error: Exception, path: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _end_with_parent(parent_pid: int) -> None:
    """A function that never returns must not outlive the run, nor may processes that it started."""
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
