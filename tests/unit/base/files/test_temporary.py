"""Temporary folders whose owners were killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mopd.base.files import temporary
from mopd.base.files.temporary import TemporaryFolder

ROOT = Path(__file__).parents[4]
OWNER = """
import os, signal, sys, time
from mopd.base.files.temporary import TemporaryFolder
folders = [TemporaryFolder(f"mopd-{name}-") for name in ("one", "two")]
(folders[0].path / "file").write_text("x")
print(*(folder.path for folder in folders), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, to a process that has not looked there yet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(temporary, "_looked", set())
    return tmp_path


def start_owner() -> tuple[subprocess.Popen[str], list[Path]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    return owner, [Path(path) for path in owner.stdout.readline().split()]


def test_a_dead_owners_folders_go_and_a_living_ones_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from another boot of this machine, or another machine with the same TMPDIR: who holds those is not known."""
    dead, left = start_owner()
    living, held = start_owner()
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    elsewhere = place / "mopd-one-00000000-abcdefgh"
    strange = place / f"mopd-one-{temporary._boot()}-link"
    elsewhere.mkdir()
    strange.symlink_to(elsewhere)
    assert all(folder.is_dir() for folder in left)

    with TemporaryFolder("mopd-three-") as own:
        assert own.stat().st_mode & 0o777 == 0o700
        assert sorted(place.iterdir()) == sorted([*held, elsewhere, strange, own])
    assert not own.exists()

    living.communicate()


KILLED = """
import os, signal
from mopd.base.files import temporary
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
temporary.{deed} = die
temporary.TemporaryFolder("mopd-one-")
"""


@pytest.mark.parametrize("deed", ["fcntl.flock", "Path.rename"])
def test_an_owner_that_is_killed_as_it_makes_one_leaves_none(deed: str, place: Path) -> None:
    """Before it has the lock, and before the folder has its name."""
    done = subprocess.run([sys.executable, "-c", KILLED.format(deed=deed)], cwd=ROOT, timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert len(list(place.iterdir())) == 1
    with TemporaryFolder("mopd-two-") as own:
        assert list(place.iterdir()) == [own]


@pytest.mark.parametrize("is_open", [False, True])
def test_one_that_is_taken_for_abandoned_before_its_lock_is_made_anew(
    is_open: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks removes what has no lock, as a folder has for a moment."""
    module, name = (temporary.fcntl, "flock") if is_open else (temporary.os, "open")  # type: ignore[attr-defined]
    real, removed = getattr(module, name), []

    def late(*arguments: Any) -> Any:
        if not removed and (found := list(place.glob(".mopd-*"))):
            removed.extend(found)
            removed[0].rmdir()
        return real(*arguments)

    monkeypatch.setattr(module, name, late)
    descriptors = len(os.listdir("/proc/self/fd"))
    with TemporaryFolder("mopd-one-") as own:
        assert list(place.iterdir()) == [own] and own.name != removed[0].name
        assert len(os.listdir("/proc/self/fd")) == descriptors + 1


def test_close_is_harmless_when_repeated_or_late(place: Path) -> None:
    folder = TemporaryFolder("mopd-one-")
    folder.path.rmdir()
    folder.close()
    folder.close()
    assert list(place.iterdir()) == []


def test_a_child_that_inherits_the_lock_keeps_the_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = TemporaryFolder("mopd-one-")
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[folder.fileno()])
    os.close(folder.fileno())  # as the kernel does when the owner dies
    monkeypatch.setattr(temporary, "_looked", set())
    TemporaryFolder("mopd-two-").close()
    assert folder.path.is_dir()
    child.communicate()
    monkeypatch.setattr(temporary, "_looked", set())
    TemporaryFolder("mopd-two-").close()
    assert not folder.path.exists()


def test_every_temporary_folder_is_one_of_these() -> None:
    """But a sandbox's, and an export's, which stands in a run's folder and goes at its next start."""
    plain = re.compile(r"mkdtemp|mkstemp|TemporaryDirectory|NamedTemporaryFile|temporary_folder")
    found = {
        str(path.relative_to(ROOT / "mopd"))
        for path in (ROOT / "mopd").rglob("*.py")
        if plain.search(path.read_text(encoding="utf-8"))
    }
    assert found == {
        "base/files/writing.py",
        "base/files/temporary.py",
        "conversion/adapter_writer.py",
        "conversion/hf/writer.py",
        "environments/python_tool.py",
        "rewards/graders/programs.py",
    }
