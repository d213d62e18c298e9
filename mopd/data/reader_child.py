"""Program of the process in which a reader of a data file runs:

``python -I reader_child.py SOURCE NAME FILE OPTIONS PARENT_PID MAX_BYTES``, which imports nothing of mopd.

Standard output carries the rows, a JSON object a line. What the reader prints goes to standard error; so does the line
of its error, the last, with exit code 1.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
MAX_SHOWN = 300


def main(source: str, name: str, file: str, options: str, parent_pid: int, max_bytes: int) -> int:
    """Write the rows; return the exit code."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        return 1
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    rows = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the reader prints is no row
    try:
        for row in _load(source, name)(file, **json.loads(options)):
            if not isinstance(row, dict):
                raise TypeError(f"it yields {type(row).__name__}, no dictionary of columns")
            rows.write(json.dumps(row, allow_nan=False) + "\n")
        rows.flush()
    except BrokenPipeError:  # nobody wants more rows
        os._exit(0)
    except BaseException as error:  # also SystemExit and the like
        print(_described(error, source), file=sys.stderr)
        return 1
    return 0


def _load(source: str, name: str) -> Callable[..., Any]:
    if not source.endswith(".py"):
        reader: Callable[..., Any] = getattr(importlib.import_module(source), name)
        return reader
    sys.path.append(os.path.dirname(source))
    spec = importlib.util.spec_from_file_location("mopd_reader", source)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules["mopd_reader"] = module
    spec.loader.exec_module(module)
    reader = getattr(module, name)
    return reader


def _described(error: BaseException, source: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(f'{error}'.split())[:MAX_SHOWN]}{where}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], *map(int, sys.argv[5:7])))
