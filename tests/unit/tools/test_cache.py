"""A folder of parts: each is made once, and an interruption at any time costs at most the part in work."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools.quickstart.cache import PartsFolder, fingerprint

ROOT = Path(__file__).resolve().parents[3]


class Maker:
    def __init__(self, text: str = "x") -> None:
        self.calls = 0
        self.text = text

    def __call__(self, folder: Path) -> dict[str, Any]:
        self.calls += 1
        assert list(folder.iterdir()) == []
        (folder / "weights").write_text(self.text)
        return {"score": self.calls}


def test_a_part_is_made_once(tmp_path: Path) -> None:
    make = Maker()
    for _ in range(2):
        assert PartsFolder(tmp_path).build("models/a", "print", make) == {"score": 1}
    assert make.calls == 1
    assert (tmp_path / "models/a/weights").read_text() == "x"


@pytest.mark.parametrize("damage", ["change", "remove", "add", "forget"])
def test_a_damaged_part_is_made_again(tmp_path: Path, damage: str) -> None:
    make = Maker()
    PartsFolder(tmp_path).build("a", "print", make)
    if damage == "change":
        (tmp_path / "a/weights").write_text("y")
    elif damage == "remove":
        (tmp_path / "a/weights").unlink()
    elif damage == "add":
        (tmp_path / "a/more").touch()
    else:
        (tmp_path / "manifest.json").unlink()
    assert PartsFolder(tmp_path).facts("a", "print") is None
    PartsFolder(tmp_path).build("a", "print", make)
    assert make.calls == 2
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["weights"]


def test_other_ingredients_make_another_part_and_leave_its_neighbours(tmp_path: Path) -> None:
    make = Maker()
    folder = PartsFolder(tmp_path)
    folder.build("a", "print", make)
    folder.build("b", "print", make)
    folder.build("a", "other print", make)
    assert make.calls == 3
    assert folder.facts("b", "print") == {"score": 2}
    assert folder.facts("a", "print") is None


def test_a_failure_leaves_the_old_part_and_no_claim(tmp_path: Path) -> None:
    folder = PartsFolder(tmp_path)
    folder.build("a", "old", Maker("old"))

    def fail(draft: Path) -> dict[str, Any]:
        (draft / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.build("a", "new", fail)
    assert folder.facts("a", "old") is not None and folder.facts("a", "new") is None
    folder.build("a", "new", Maker("new"))
    assert (tmp_path / "a/weights").read_text() == "new"
    assert not list(tmp_path.glob(".building*"))


def test_a_second_builder_waits_for_the_first(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from tools.quickstart.cache import PartsFolder
with PartsFolder(Path({str(tmp_path)!r})).locked():
    Path({str(tmp_path / "held")!r}).touch()
    time.sleep(6000)
"""
    first = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 600
    while not (tmp_path / "held").exists():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.02)
    second = subprocess.Popen([sys.executable, "-c", code.replace("sleep(6000)", "sleep(0)")], cwd=ROOT)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(timeout=0.5)
    first.send_signal(signal.SIGKILL)  # a dead builder holds nothing
    first.wait(timeout=600)
    assert second.wait(timeout=600) == 0


def test_fingerprints_tell_ingredients_apart() -> None:
    prints = {fingerprint({"lr": 1.0, "steps": (1, 2)}), fingerprint({"steps": [1, 2], "lr": 1.0}), fingerprint("x")}
    assert len(prints) == 2
