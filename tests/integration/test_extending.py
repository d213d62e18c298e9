"""The examples of docs/extending.md, in runs of a recipe that names them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.world import REPOSITORY, World, environment, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

PAGE = REPOSITORY / "docs" / "extending.md"
ONE_RANK = {"student__parallel": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each example under the name in its first line."""
    folder = tmp_path_factory.mktemp("extending")
    for text in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        named = re.match(r"# (\w+\.py)\n", text)
        assert len(text.splitlines()) <= 30
        (folder / (named[1] if named else "use.py")).write_text(text)
    return folder


def mopd(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mopd", *words]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=600)


def test_the_example_of_a_loss_passes_its_check(folder: Path) -> None:
    done = subprocess.run([sys.executable, "use.py"], cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_with_a_loss_a_callback_and_a_reader(world: World, folder: Path) -> None:
    """It learns by the loss and tells its metrics, also to the callback. It ends when it is resumed with another file,
    or begins with one that looks at other rows."""
    loss = {"type": "custom", "module": "my_losses.py:skewed_kl", "options": {"skew": 0.2}, "top_k": 8}
    run = folder / "run"
    keys = {"loss": loss, "schedule__steps": 3, "checkpoint": {"every_steps": 3}, **ONE_RANK}
    watch = {"module": "my_callbacks.py:Watch", "options": {"file": "losses.csv", "enough": 2.0}}
    reader = {"module": "my_readers.py:table", "options": {"delimiter": ";"}}
    table = {"path": "tasks.csv", "reader": reader, "columns": "question_answer", "domain": "left"}
    (folder / "tasks.csv").write_text("task;result\n" + "".join(f"left {i};ab\n" for i in range(400)))
    recipe = world.write_recipe(run, callbacks=[watch], data__train=[str(world.train), table], **keys)
    done = mopd(folder, "train", str(recipe))
    assert done.returncode == 0, done.stderr
    records = read_metrics(run)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["loss"] > 0 and 0 <= record["custom_far/left"] <= 1 for record in records)
    losses = (folder / "losses.csv").read_text().splitlines()
    assert losses == [f"{record['step']},{record['loss']}" for record in records]
    assert sum(record["num_samples/left"] for record in records) > 16  # of 24; 20 of the other 40 rows are left's
    hashed = json.loads((run / "manifest.json").read_text())["plugins"]
    assert sorted(hashed) == ["data.train[1].reader.module", "loss.module"]
    file = folder / "my_losses.py"
    text = file.read_text()
    file.write_text(f"{text}\n# another\n")
    done = mopd(folder, "train", str(recipe), "--resume", "schedule.steps=4")
    assert done.returncode == 2
    assert re.search(r"loss\.module: its file has sha256 \w+ now, the run began with sha256 \w+: ", done.stderr)
    file.write_text(text.replace("return loss,", "return loss - loss.mean(),"))
    fresh = world.write_recipe(folder / "fresh", loss=loss, **ONE_RANK)
    done = mopd(folder, "train", str(fresh))
    assert done.returncode == 2 and not os.path.exists(folder / "fresh" / "metrics.jsonl")
    line = done.stderr.splitlines()[-1]
    assert line.startswith("mopd: error: loss.module: 'my_losses.py:skewed_kl' computes a row's loss from other rows")
    file.write_text(text)
