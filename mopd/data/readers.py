"""Rows of a data file by a function of its user, which runs in a process of its own (``reader_child.py``)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from mopd.base.files.reading import shown_path
from mopd.base.plugins import resolved_plugin
from mopd.base.text import last_line, shortened
from mopd.base.types import UserError
from mopd.config.data import ReaderConfig

ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}
"""The whole environment that the process sees."""
GIB = 2**30
MAX_OUTPUT_BYTES = 4096
"""Bytes read of the end of what the process printed."""


def read_lines(path: Path, cfg: ReaderConfig, max_bytes: int) -> Iterator[bytes]:
    """Yield the rows that a reader makes of a file, a JSON text each, of at most ``max_bytes`` and one more.

    Raises:
        UserError: file and reader, and what the reader raised, or that it took too long.
    """
    called = f"{shown_path(path)}: reader {cfg.module!r}"
    source, name = resolved_plugin("reader.module", cfg.module, "reader")
    source = os.path.abspath(source) if source.endswith(".py") else source
    words = [source, name, os.path.abspath(path), json.dumps(dict(cfg.options))]
    words += [str(os.getpid()), str(int(cfg.max_memory_gib * GIB))]
    child = Path(__file__).with_name("reader_child.py")
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-I", str(child), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=printed,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        timer = threading.Timer(cfg.timeout_s, _kill_group, [process.pid])
        timer.start()
        rows = process.stdout
        assert rows is not None
        try:
            while line := rows.readline(max_bytes + 1):
                yield line
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # keeps its number: the group is killed below
        finally:
            is_late = not timer.is_alive()
            timer.cancel()
            _kill_group(process.pid)
            rows.close()
            code = process.wait()
        if is_late:
            raise UserError(f"{called} took longer than timeout_s {cfg.timeout_s:g}: make it faster or raise it")
        if code:
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - MAX_OUTPUT_BYTES))
            words_of_it = printed.read().decode("utf-8", "replace").strip()
            how = shortened(last_line(words_of_it), 400) if words_of_it else f"exit code {code}"
            raise UserError(f"{called} failed: {how}")


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
