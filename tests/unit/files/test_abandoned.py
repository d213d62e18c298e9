"""What a run that was killed with everything of its own has left behind goes with the next start, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mopd.files.abandoned import LOCK, NEW_S, held_folder

OWNER = """
import sys
from mopd.files.abandoned import held_folder
print(*held_folder("run-"), flush=True)
sys.stdin.read()
"""


def age(folder: Path) -> None:
    before = time.time() - 2 * NEW_S
    os.utime(folder, (before, before))


def test_only_what_nobody_holds_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=environment, text=True, **pipes)  # type: ignore[call-overload]
    assert owner.stdout is not None
    held = Path(owner.stdout.readline().split()[0])
    others = [tmp_path / "run-without-a-lock", tmp_path / "another-prefix"]
    for other in others:
        other.mkdir()
    (others[1] / LOCK).touch()
    (tmp_path / "run-link").symlink_to(others[1])
    for folder in (held, *others):
        age(folder)

    young, descriptor = held_folder("run-")
    os.close(descriptor)
    assert {*tmp_path.iterdir()} == {held, young, *others, tmp_path / "run-link"}
    owner.kill()
    owner.communicate()
    age(held)
    mine, descriptor = held_folder("run-")
    assert {*tmp_path.iterdir()} == {mine, young, *others, tmp_path / "run-link"}  # ``young`` may be about to be held
    os.close(descriptor)
