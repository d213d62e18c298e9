"""The process that clears up after a launcher ends all groups of ranks at once."""

from __future__ import annotations

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
