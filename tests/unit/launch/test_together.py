"""The end of one node's processes: all of them go, also where one ends by itself meanwhile."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from mopd.launch.together import kill_children


def test_a_child_that_has_just_ended_keeps_no_other_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "input()"]
    ended, running = (subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2))
    listed = [psutil.Process(ended.pid), psutil.Process(running.pid)]
    ended.communicate(b"\n")
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: listed)
    try:
        kill_children()
        assert running.wait(10) == -9
    finally:
        running.kill()
        running.communicate()
