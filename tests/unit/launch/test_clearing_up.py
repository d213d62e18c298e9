"""The reaper, which clears up after a launcher, whatever ends that."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from mopd.launch.launch import _print_signal, _reaped_folder
from mopd.launch.node import Place
from mopd.launch.nodes import Nodes


def test_the_reaper_is_out_of_reach_of_the_terminal() -> None:
    """Ctrl-C reaches the whole group of the launcher, and its folder is gone all the same."""
    with _reaped_folder() as folder:
        running = psutil.process_iter(["cmdline"])  # no line of what ends meanwhile
        (clearing,) = [process for process in running if str(folder) in (process.info["cmdline"] or [])]
        assert os.getsid(clearing.pid) == clearing.pid != os.getsid(0)
    assert not folder.exists()


def test_a_signal_to_a_node_that_is_alone_is_told_to_nobody_else(capsys: pytest.CaptureFixture[str]) -> None:
    with Nodes(Place(num_nodes=1, node_rank=0)) as nodes:
        assert _print_signal(signal.SIGTERM, nodes, "").code == 128 + signal.SIGTERM
        assert nodes._own_end is None
    assert capsys.readouterr().err == "mopd: ended by SIGTERM\n"
