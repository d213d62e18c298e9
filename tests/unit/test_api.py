"""The Python API where no rank starts: light to import, recipes as files have them, and what callbacks are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import mopd
from mopd.api import Events
from mopd.base.metrics import JsonlTail, truncate_jsonl
from mopd.cli.main import main
from mopd.config.load import differences, load_recipe
from mopd.config.student import StudentConfig
from tests.fixtures.recipe import RECIPE

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "megatron", "ray", "vllm", "transformers", "numpy", "pyarrow", "rich")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    Path("recipe.yaml").write_text(RECIPE)
    return "recipe.yaml"


def loaded_by(code: str) -> list[str]:
    """Names of modules that a new process has after ``code``."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=60)
    return done.stdout.split()


def test_the_import_alone_loads_nothing_of_the_package() -> None:
    assert [name for name in loaded_by("import mopd") if name.startswith("mopd")] == ["mopd"]


def test_the_names_of_the_api_load_nothing_heavy() -> None:
    found = loaded_by("import mopd\nfor name in mopd.__all__: getattr(mopd, name)")
    assert "mopd.api" in found and not {*HEAVY} & {*found}


def test_the_names_are_those_that_are_promised() -> None:
    assert mopd.__all__ == ["Callback", "Recipe", "Run", "UserError", "check", "plan", "train"]
    assert {*mopd.__all__} <= {*dir(mopd)}
    with pytest.raises(AttributeError, match="'mopd' has no attribute 'trian'"):
        getattr(mopd, "trian")  # noqa: B009


def test_a_recipe_is_its_file_with_overrides(file: str) -> None:
    recipe = mopd.Recipe.load(file, schedule={"steps": 9}, **{"student.optimizer.lr": 2e-6, "run_dir": Path("runs/x")})
    texts = ["schedule.steps=9", "student.optimizer.lr=2e-6", "run_dir=runs/x"]
    assert recipe.loaded == load_recipe(file, texts)
    assert recipe.values.schedule.prompts_per_step == 4


def test_keywords_make_the_recipe_of_the_file(file: str) -> None:
    tree = yaml.safe_load(RECIPE)
    recipe = mopd.Recipe(**tree)
    assert differences(recipe.values, load_recipe(file).recipe) == {}
    objects = mopd.Recipe(**tree | {"student": StudentConfig(model="models/student")})
    assert objects.values.student == StudentConfig(model="models/student")
    Path("again.yaml").write_text(recipe.to_yaml())
    assert mopd.Recipe.load("again.yaml").values == recipe.values


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"seed": 1}, "keywords: missing keys run_dir, student, teachers, data, schedule"),
        ({"loss": {"typ": "k2"}}, "keywords (override): unknown key 'loss.typ'; did you mean 'type'?"),
        ({"loss": object()}, "loss: no value of a recipe"),
        ({"seed": {1, 2}}, "seed: no value of a recipe"),
    ],
)
def test_a_wrong_keyword_is_one_line(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(mopd.UserError) as caught:
        mopd.Recipe(**keys)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["train", "check", "plan"])
def test_errors_are_the_commands_lines(file: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe's models do not exist. ``train`` names the first that is missing, ``check`` each of them."""
    assert main([name, file]) == 2
    with pytest.raises(mopd.UserError) as caught:
        getattr(mopd, name)(mopd.Recipe.load(file))
    lines = [f"mopd: error: {line}\n" for line in str(caught.value).splitlines()]
    assert capsys.readouterr().err == "".join(lines)
    assert len(lines) == 1 or name == "check"


def test_ranks_start_in_no_rank_and_no_thread(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException] = []

    def call() -> None:
        try:
            mopd.train(mopd.Recipe.load(file))
        except mopd.UserError as error:
            told.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    call()
    assert "main thread" in str(told[0]) and "without torchrun" in str(told[1])


def test_a_folder_without_an_export_has_no_student(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(mopd.UserError, match="has no export"):
        mopd.Run(tmp_path).tokenizer()


class Notes(mopd.Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, int]] = []

    def on_step(self, run: mopd.Run, record: Mapping[str, Any]) -> None:
        self.notes.append(("step", record["step"]))

    def on_validation(self, run: mopd.Run, record: Mapping[str, Any]) -> None:
        self.notes.append(("validation", record["step"]))

    def on_checkpoint(self, run: mopd.Run, step: int) -> None:
        self.notes.append(("checkpoint", step))


class Folder:
    """A run's folder, in which this test writes as a run does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def step(self, step: int, seconds: float = 1.0) -> None:
        self.add("metrics", {"step": step, "timing/step_s": seconds})

    def validation(self, step: int) -> None:
        self.add("validation", {"step": step, "rewards": {"math": 1.0}})

    def add(self, name: str, record: dict[str, Any]) -> None:
        with (self.path / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def checkpoint(self, step: int, time_s: float) -> None:
        folder = self.path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").touch()
        os.utime(folder / "manifest.json", (time_s, time_s))


def test_callbacks_are_told_of_each_event_once_in_the_order_of_steps(tmp_path: Path) -> None:
    folder, notes = Folder(tmp_path), Notes()
    events = Events(mopd.Run(tmp_path), [notes], after_step=-1)
    events.deliver()
    folder.validation(0)
    for step in (1, 2):
        folder.step(step)
    folder.validation(2)
    folder.checkpoint(2, 1.0)
    (tmp_path / "checkpoints" / "step_00000003").mkdir()  # not complete
    events.deliver()
    events.deliver()
    assert notes.notes == [("validation", 0), ("step", 1), ("step", 2), ("validation", 2), ("checkpoint", 2)]


def test_callbacks_of_a_run_that_went_back_hear_nothing_of_what_it_cuts(tmp_path: Path) -> None:
    folder, notes = Folder(tmp_path), Notes()
    for step in (1, 2, 3, 4):
        folder.step(step)
        folder.checkpoint(step, 1.0)
    events = Events(mopd.Run(tmp_path), [notes], after_step=2)
    events.deliver()  # the run has not begun
    assert notes.notes == []
    truncate_jsonl(tmp_path / "metrics.jsonl", after_step=2)
    for step in (3, 4, 5):  # longer than before when it is looked at again
        folder.step(step, seconds=2.0)
    folder.checkpoint(4, 2.0)
    events.deliver()
    assert notes.notes == [("step", 3), ("step", 4), ("checkpoint", 4), ("step", 5)]


def test_a_line_that_is_being_written_is_told_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonlTail(path, after_step=-1)
    assert tail.new() == []
    path.write_bytes(b'{"step": 1}\n{"step"')
    assert tail.new() == [{"step": 1}]
    with path.open("ab") as file:
        file.write(b": 2}\n")
    assert tail.new() == [{"step": 2}]
    assert tail.new() == []
