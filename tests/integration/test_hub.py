"""A recipe that names its models and data on the Hub: from an empty cache to a trained student, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.hub import LoopbackHub, hub_environment, loopback_hub
from tests.integration.world import REPOSITORY, TIMEOUT_S, World, environment, read_metrics

pytestmark = pytest.mark.slow
NAMES: dict[str, Any] = {
    "student__model": "tiny/student",
    "student__parallel": {"tensor_model_parallel_size": 1},
    "teachers__left__model": "tiny/left@main",
    "teachers__right__model": "tiny/right",
    "data__train": ["tiny/prompts:train"],
    "data__validation": [{"path": "tiny/prompts:data/validation*.parquet"}],
    "student__optimizer": {"lr": 2.0e-3},
    "schedule__steps": 2,
    "checkpoint__every_steps": 1,
    "validation__every_steps": 2,
}


@dataclass
class Shelf:
    """A Hub with the world's models and data, and a cache that is empty at first."""

    hub: LoopbackHub
    home: Path
    commits: dict[str, str]

    def run(
        self, *arguments: str | Path, offline: bool = False, program: tuple[str, ...] = ("-m", "mopd")
    ) -> subprocess.CompletedProcess[str]:
        theirs = hub_environment(self.hub, self.home, offline=offline)
        return subprocess.run(
            [sys.executable, *program, *map(str, arguments)],
            cwd=REPOSITORY,
            env=environment() | {key: value for key, value in theirs.items() if key.startswith("HF_")},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )


@pytest.fixture(scope="module")
def shelf(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with loopback_hub() as hub:
        commits = {"student": hub.add("models/tiny/student", world.student)}
        for domain, folder in world.teachers.items():
            commits[domain] = hub.add(f"models/tiny/{domain}", folder)
        files = {"train": world.train, "validation": world.validation}
        content = {f"data/{split}-00000-of-00001.parquet": path.read_bytes() for split, path in files.items()}
        commits["prompts"] = hub.add("datasets/tiny/prompts", content)
        yield Shelf(hub, tmp_path_factory.mktemp("hub") / "home", commits)


@pytest.fixture(scope="module")
def trained(shelf: Shelf, world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run from an empty cache."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    done = shelf.run("train", world.write_recipe(run_dir, **NAMES))
    assert done.returncode == 0, done.stderr
    assert "Fetching" in done.stderr, "no progress bar was shown"
    return run_dir


def test_a_run_from_an_empty_cache(shelf: Shelf, trained: Path) -> None:
    assert len(read_metrics(trained)) == 2 and (trained / "hf" / "tokenizer.json").is_file()
    assert json.loads((trained / "manifest.json").read_text())["commits"] == {
        "student.model": f"tiny/student@{shelf.commits['student']}",
        "teachers.left.model": f"tiny/left@{shelf.commits['left']}",
        "teachers.right.model": f"tiny/right@{shelf.commits['right']}",
        "data.train[0]": f"tiny/prompts@{shelf.commits['prompts']}:train",
        "data.validation[0]": f"tiny/prompts@{shelf.commits['prompts']}:data/validation*.parquet",
    }
    recipe = (trained / "recipe.yaml").read_text()
    assert "model: tiny/student" in recipe and "tiny/prompts:train" in recipe and str(shelf.home) not in recipe


def test_a_moved_branch_is_not_resumed_but_the_commit_is(shelf: Shelf, trained: Path) -> None:
    """The second time without network."""
    before = shelf.commits["left"]
    files = dict(shelf.hub.repositories["models/tiny/left"].commits[before])
    moved = shelf.hub.add("models/tiny/left", files | {"README.md": b"moved"})
    recipe = trained.with_suffix(".yaml")
    try:
        done = shelf.run("train", recipe, "--resume", "--set", "schedule.steps=3")
        line = f"teachers.left.model: is 'tiny/left@{moved}' on the Hub now, the run began with 'tiny/left@{before}'"
        assert done.returncode == 2 and line in done.stderr.splitlines()[-1], done.stderr
        pinned = f"teachers.left.model=tiny/left@{before}"
        shelf.hub.requests.clear()
        done = shelf.run("train", recipe, "--resume", "--set", "schedule.steps=3", "--set", pinned, offline=True)
        assert done.returncode == 0, done.stderr
        assert len(read_metrics(trained)) == 3 and shelf.hub.requests == []
    finally:
        shelf.hub.repositories["models/tiny/left"].branches["main"] = before


def test_what_cannot_be_had_is_one_line(shelf: Shelf, world: World, tmp_path: Path) -> None:
    for overrides, told in (
        ({"student__model": "tiny/nobody"}, "student.model: 'tiny/nobody' is no folder here, and on the Hub"),
        ({"teachers__left__model": "tiny/left@v9"}, "it has no revision 'v9'"),
        ({"data__train": ["tiny/prompts:test"]}, "data.train[0]: 'tiny/prompts:test' is no file here, and on the Hub"),
    ):
        run_dir = tmp_path / "run"
        done = shelf.run("train", world.write_recipe(run_dir, **NAMES | overrides))
        lines = done.stderr.splitlines()
        assert done.returncode == 2 and told in lines[-1] and f"{run_dir}.yaml:" in lines[-1], done.stderr
        assert "Traceback" not in done.stderr and not run_dir.exists()


def test_eval_takes_a_name(shelf: Shelf, trained: Path) -> None:
    done = shelf.run("eval", trained.with_suffix(".yaml"), "--model", "tiny/right", "--json", offline=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rewards"]["right"] == 1.0


@pytest.mark.long
@pytest.mark.multirank
def test_under_torchrun_one_rank_fetches(shelf: Shelf, world: World, tmp_path: Path) -> None:
    names = NAMES | {"student__parallel": {"tensor_model_parallel_size": 2}}
    recipe = world.write_recipe(tmp_path / "run", **names)
    shelf.home = tmp_path / "home"
    shelf.hub.requests.clear()
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "mopd")
    done = shelf.run("check", recipe, program=torchrun)
    assert done.returncode == 0, done.stderr
    weights = [request for request in shelf.hub.requests if "model.safetensors" in request and "GET" in request]
    assert len(weights) == len(set(weights)) == 3
