"""The Python API beside the commands: the same numbers, lines and ranks; and the notebook."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mopd
from mopd.cli.main import main
from tests.integration.world import REPOSITORY, World, environment, read_metrics, read_validation

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

ONE_RANK = {"student__parallel": {}}
NOTEBOOK = REPOSITORY / "docs" / "notebooks" / "first_distillation.ipynb"


class Notes(mopd.Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, Any]] = []
        self.validations: list[int] = []
        self.checkpoints: list[int] = []

    def on_step(self, run: mopd.Run, record: Mapping[str, Any]) -> None:
        assert run.status().state in ("runs", "stops", "is done", "has ended")
        self.steps.append(record)

    def on_validation(self, run: mopd.Run, record: Mapping[str, Any]) -> None:
        self.validations.append(record["step"])

    def on_checkpoint(self, run: mopd.Run, step: int) -> None:
        self.checkpoints.append(step)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``world.environment``: the number of threads decides the last bits."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


def test_train_from_python_is_the_commands_run(world: World, folder: Path) -> None:
    keys = {"schedule__steps": 4, "validation__every_steps": 2, "checkpoint": {"every_steps": 2, "keep_last": 10}}
    assert main(["train", str(world.write_recipe(folder / "command", **keys))]) == 0
    notes = Notes()
    run = mopd.train(mopd.Recipe(**world.recipe(folder / "python", **keys)), callbacks=[notes])
    assert read_metrics(run.path) == read_metrics(folder / "command")
    assert read_validation(run.path) == read_validation(folder / "command")
    assert notes.steps == run.metrics and [record["step"] for record in run.metrics] == [1, 2, 3, 4]
    assert notes.validations == [record["step"] for record in run.validations] == [0, 2, 4]
    assert notes.checkpoints == run.checkpoints == [2, 4]
    assert run.status().state == "is done"
    theirs = json.loads((folder / "command" / "report.json").read_text())
    assert json.loads(json.dumps(asdict(run.report())))["domains"] == theirs["domains"]
    weights = load_file(folder / "command" / "hf" / "model.safetensors")
    student = run.student()
    assert all(torch.equal(student.get_parameter(name), weight) for name, weight in weights.items())
    assert run.tokenizer().decode(run.tokenizer()("xy")["input_ids"]) == "xy"


class Stopping(Notes):
    def on_checkpoint(self, run: mopd.Run, step: int) -> None:
        super().on_checkpoint(run, step)
        run.stop()


class Failing(mopd.Callback):
    def on_step(self, run: mopd.Run, record: Mapping[str, Any]) -> None:
        raise LookupError(record["step"])


def test_a_callback_may_end_the_run_which_goes_on_elsewhere(world: World, folder: Path) -> None:
    """In order by ``stop``, at once by an error; neither hears of the steps that were cut."""
    keys = {"schedule__steps": 2000, "validation__every_steps": 1000, "checkpoint": {"every_steps": 3, "keep_last": 10}}
    recipe = mopd.Recipe(**world.recipe(folder / "python", **keys))
    notes = Stopping()
    run = mopd.train(recipe, from_step=2, callbacks=[notes])
    assert [record["step"] for record in notes.steps] == list(range(3, len(run.metrics) + 1))
    assert notes.checkpoints[0] == 3 and notes.checkpoints[-1] == run.checkpoints[-1] == len(run.metrics) < 2000
    assert run.status().state == "has ended" and run.status().stop == "Run.stop"
    done = len(run.metrics)
    with pytest.raises(LookupError, match=str(done + 1)):
        mopd.train(recipe, resume=True, callbacks=[Failing()])
    assert run.status().state == "has ended" and len(run.metrics) > done


def test_an_error_of_a_rank_is_the_commands_line(world: World, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A teacher with the student's weights is found by the ranks' preflight."""
    file = world.write_recipe(folder / "same", teachers__left__model=str(world.student), **ONE_RANK)
    with pytest.raises(mopd.UserError, match="allow_same_weights") as caught:
        mopd.train(mopd.Recipe.load(file))
    capfd.readouterr()
    assert main(["train", str(file)]) == 2
    assert capfd.readouterr().err.splitlines()[-1] == f"mopd: error: {caught.value}"


def test_the_example_of_the_page_runs(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    world.write_recipe(folder / "my", **ONE_RANK)
    page = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0], names)
    assert len(names["losses"]) == 10 and names["student"].config.model_type == "qwen3"


def test_checks_and_plans_are_the_commands(world: World, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(world.write_recipe(folder / "checked", **ONE_RANK))
    recipe = mopd.Recipe.load(file)
    checks = mopd.check(recipe)
    assert {check.status for check in checks} <= {"ok", "skipped"} and "data.train" in " ".join(c.name for c in checks)
    assert "scores of left" in capfd.readouterr().out
    assert main(["plan", file, "--gpu", "h100", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told.pop("measured") == []
    assert json.loads(json.dumps(mopd.plan(recipe, gpu="h100"))) == told
    with pytest.raises(mopd.UserError, match="--nodes is 0: set 1 to"):
        mopd.plan(recipe, gpu="h100", nodes=0)


@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its cells as one program, in a process of its own; what it says of the result holds."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    program = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    told = "print('\\ntold', json.dumps([said, report.mean_headroom_recovery, len(run.metrics)]))"
    (tmp_path / "notebook.py").write_text(f"{program}\n\n{told}\n")
    done = subprocess.run(
        [sys.executable, "notebook.py"],
        cwd=tmp_path,
        env=environment() | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said, recovery, steps = json.loads(done.stdout.splitlines()[-1].removeprefix("told "))
    assert said == {"french": "oui", "german": "ja"} and recovery > 0.9 and steps == 24
    assert "checkpoint of step 24" in done.stdout
