"""The process that clears up after a launcher ends all groups of ranks at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from mopd.base.files.temporary import TemporaryFolder
from mopd.placement import reaper

TRACKER = "multiprocessing.resource_tracker"
"""In the command line of one of Python's resource trackers, which are left time to end by themselves."""


def note(folder: Path, *pids: int) -> None:
    folder.mkdir()
    for pid in pids:
        (folder / f"{pid}.pid").touch()


def test_a_tracker_that_does_not_end_is_killed(tmp_path: Path) -> None:
    left = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(6000)", name], start_new_session=True)
        for name in (TRACKER, "x")
    ]
    note(tmp_path / "ranks", *(process.pid for process in left))
    command = [sys.executable, "-I", "-S", reaper.__file__, str(tmp_path / "ranks")]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=600)
    assert [process.wait(600) for process in left] == [-signal.SIGKILL] * 2
    assert not (tmp_path / "ranks").exists()


WAITS_LONG = """
import sys
from mopd.placement import reaper
reaper.TRACKER_S = 6000.0
reaper.kill_ranks(sys.argv[1])
"""


def test_many_groups_end_as_soon_as_one(tmp_path: Path) -> None:
    """The launcher waits half a minute for it. Here each group's tracker ends when all others of all groups are gone,
    and would be waited for longer than a test may take: one group after another, the first would never end."""
    theirs, ours = os.pipe()
    ranks, trackers = [], []
    for _ in range(5):
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(6000)"], pass_fds=[ours], preexec_fn=os.setpgrp
            )
        )
        join = partial(os.setpgid, 0, ranks[-1].pid)
        command = [sys.executable, "-c", "import sys; sys.stdin.read()", TRACKER]
        trackers.append(subprocess.Popen(command, stdin=theirs, preexec_fn=join))
    os.close(theirs)
    os.close(ours)
    note(tmp_path / "ranks", *(process.pid for process in ranks))
    command = [sys.executable, "-c", WAITS_LONG, str(tmp_path / "ranks")]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=300)
    finally:
        for process in (*ranks, *trackers):
            process.send_signal(signal.SIGTERM)  # those that it has left
    assert [process.wait(600) for process in ranks] == [-signal.SIGKILL] * 5
    assert [process.wait(600) for process in trackers] == [0] * 5


def keep_server(folder: Path) -> None:
    """Be a server's whole life. The pipe stays open to its end: a closed one is an owner that has died."""
    folder.mkdir()
    command = [sys.executable, "-I", "-S", reaper.__file__, str(folder), "true"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
        assert server.wait(120) == 0
    assert not folder.exists()


SIGNALLED_AS_IT_STARTS = """
import os, signal, sys
from pathlib import Path
from mopd.placement import reaper
touch = Path.touch
def told(note):
    touch(note)
    os.kill(os.getpid(), signal.SIGTERM)
Path.touch = told
sys.exit(reaper.keep_server(sys.argv[1], sys.argv[2:]))
"""


def test_a_sigterm_while_the_server_starts_reaches_it(tmp_path: Path) -> None:
    """Unheeded it ended the reaper alone: the server died with it, and the folder stayed."""
    folder = tmp_path / "servers" / "1"
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", SIGNALLED_AS_IT_STARTS, str(folder), "sleep", "600"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(120) == 128 + signal.SIGTERM
    assert not folder.parent.exists()


def test_the_folder_of_all_servers_stays_as_long_as_its_owner_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one of its name would not be locked: the next server would lose its files to any other process of mopd."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    owned = TemporaryFolder("mopd-servers-")
    before = owned.path.stat().st_ino
    keep_server(owned.path / "1")
    assert owned.path.stat().st_ino == before
    owned.close()
    orphaned = tmp_path / "orphaned"
    orphaned.mkdir()
    keep_server(orphaned / "1")
    assert not orphaned.exists()
