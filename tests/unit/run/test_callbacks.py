"""Callbacks of a recipe in processes of their own: what they are told, and what becomes of a run whose own fails."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.output import CallbackConfig
from mopd.run.callbacks import callbacks_beside
from mopd.run.stopping import stop_requested

CODE = """\
import os
import time

import mopd


class Notes(mopd.Callback):
    def __init__(self, file, ends_at=None, lingers=False):
        assert "MOPD_RUN_SECRET" not in os.environ
        self.file, self.ends_at, self.lingers = file, ends_at, lingers

    def note(self, *words):
        print("said")
        with open(self.file, "a") as file:
            print(*words, file=file)

    def on_step(self, run, record):
        self.note("step", record["step"], record["loss"])
        while record["step"] == self.ends_at and self.lingers:
            time.sleep(0.01)
        if record["step"] == self.ends_at:
            raise LookupError("no such thing")

    def on_validation(self, run, record):
        self.note("validation", record["step"], run.path)

    def on_checkpoint(self, run, step):
        self.note("checkpoint", step)


class NoCallback:
    pass
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in its first steps, behind the validation of the untrained student, with a secret that is its own."""
    monkeypatch.setenv("MOPD_RUN_SECRET", "its own")
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "run").mkdir()
    add(tmp_path / "run", "validation", step=0)
    add(tmp_path / "run", "metrics", step=1, loss=0.5)
    return tmp_path / "run"


def add(run: Path, file: str, **record: Any) -> None:
    with (run / f"{file}.jsonl").open("a") as lines:
        lines.write(json.dumps(record) + "\n")


def config(run: Path, name: str = "Notes", **keys: Any) -> CallbackConfig:
    options = {"file": str(run.parent / "notes")} if name == "Notes" else {}
    return CallbackConfig(module=f"{run.parent / 'mine.py'}:{name}", options=options | keys.pop("options", {}), **keys)


async def steps(run: Path, cfg: CallbackConfig, *, after_step: int = -1) -> None:
    async with callbacks_beside([cfg], run) as (one,):
        one.follow(after_step)
        add(run, "metrics", step=2, loss=0.25)
        folder = run / "checkpoints" / "step_00000002"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
        add(run, "metrics", step=3, loss=0.125)


def notes(run: Path) -> list[str]:
    return (run.parent / "notes").read_text().splitlines()


@pytest.mark.parametrize("after_step", [-1, 1])
def test_it_is_told_of_everything_before_the_run_ends(run: Path, after_step: int) -> None:
    asyncio.run(steps(run, config(run), after_step=after_step))
    first = [f"validation 0 {run}", "step 1 0.5"]
    assert notes(run) == [*(first if after_step < 0 else []), "step 2 0.25", "checkpoint 2", "step 3 0.125"]
    assert stop_requested(run) is None


@pytest.mark.parametrize(("on_error", "stops"), [("stop", True), ("ignore", False)])
def test_an_exception_is_told_and_decides_what_on_error_says(
    run: Path, capfd: pytest.CaptureFixture[str], on_error: str, stops: bool
) -> None:
    asyncio.run(steps(run, config(run, on_error=on_error, options={"ends_at": 2})))
    assert notes(run)[-1] == "step 2 0.25"
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("mopd: ")]
    then = "the run stops after its step" if stops else "the run goes on without it"
    assert f"failed in on_step of step 2: LookupError: no such thing (line 22): {then} (on_error: {on_error})" in line
    asked = stop_requested(run)
    assert (asked is not None and asked.startswith("callbacks[0]")) if stops else asked is None


def test_a_late_callback_is_ended(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    asyncio.run(steps(run, config(run, timeout_s=0.5, options={"ends_at": 2, "lingers": True})))
    assert time.monotonic() - began < 60
    assert "took longer than timeout_s 0.5 in on_step of step 2: the run stops after its step" in capfd.readouterr().err
    assert stop_requested(run) is not None


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("NoCallback", {}, r"^callbacks\[0\]: '.*' makes a NoCallback, no mopd.Callback"),
        ("Absent", {}, r"^callbacks\[0\]: '.*mine.py' holds no 'Absent'"),
        (
            "Notes",
            {"color": 1},
            r"^callbacks\[0\]: '.*' cannot be made: TypeError: .*unexpected keyword argument",
        ),
    ],
)
def test_what_is_no_callback_is_refused_before_the_run(run: Path, name: str, options: Any, words: str) -> None:
    async def begin() -> None:
        async with callbacks_beside([config(run, name, options=options)], run):
            raise AssertionError("the run has begun")

    with pytest.raises(UserError, match=words):
        asyncio.run(begin())
