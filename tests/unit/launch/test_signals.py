"""Signals that end a run, wherever they find its process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

FINALIZER = """
class Ends:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
one = Ends()
"""
WEAK_SET = """
class Ends(set):
    def discard(self, item):
        os.kill(os.getpid(), signal.SIGTERM)
        super().discard(item)
class Task:
    pass
one, kept = Task(), weakref.WeakSet()
kept.data = Ends()
kept.add(one)
"""
PROGRAM = """
import os, signal, time, weakref
from mopd.launch.signals import ending_in_order
{making}
with ending_in_order():
    try:
        del one
        time.sleep(30)
    finally:
        print("in order", flush=True)
"""


@pytest.mark.parametrize("making", [FINALIZER, WEAK_SET], ids=["finalizer", "weak set"])
def test_a_signal_where_errors_are_swallowed_ends_all_the_same(making: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(making=making)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "in order\n", "")
