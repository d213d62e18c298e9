"""The process that clears up after a launcher ends all groups of ranks at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mopd.files.temporary import TemporaryFolder
from mopd.placement import reaper

STUBBORN = ["-c", "import time; time.sleep(600)", "multiprocessing.resource_tracker"]
"""Python's resource trackers are left time to end by themselves."""


def seconds_to_end(folder: Path, count: int) -> float:
    folder.mkdir()
    left = [subprocess.Popen([sys.executable, *STUBBORN], start_new_session=True) for _ in range(count)]
    for process in left:
        (folder / f"{process.pid}.pid").touch()
    began = time.monotonic()
    command = [sys.executable, "-I", "-S", reaper.__file__, str(folder)]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=120)
    took_s = time.monotonic() - began
    assert [process.wait(10) for process in left] == [-9] * count
    assert not folder.exists()
    return took_s


def test_many_groups_end_as_soon_as_one(tmp_path: Path) -> None:
    """The launcher waits half a minute for it: one after another, ten would take longer."""
    assert seconds_to_end(tmp_path / "many", 10) < 4 * seconds_to_end(tmp_path / "one", 1)


def keep_server(folder: Path) -> None:
    """Be a server's whole life."""
    folder.mkdir()
    command = [sys.executable, "-I", "-S", reaper.__file__, str(folder), "true"]
    subprocess.run(command, stdin=subprocess.PIPE, check=True, timeout=120)
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
