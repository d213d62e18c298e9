"""The reaper, which clears up after a launcher, whatever ends that."""

from __future__ import annotations

import os

import psutil

from mopd.launch.launch import _reaped_folder


def test_the_reaper_is_out_of_reach_of_the_terminal() -> None:
    """Ctrl-C reaches the whole group of the launcher, and its folder is gone all the same."""
    with _reaped_folder() as folder:
        running = psutil.process_iter(["cmdline"])  # no line of what ends meanwhile
        (clearing,) = [process for process in running if str(folder) in (process.info["cmdline"] or [])]
        assert os.getsid(clearing.pid) == clearing.pid != os.getsid(0)
    assert not folder.exists()
