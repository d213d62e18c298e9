"""What a user gets wrong ends in one line that names file, key and cure, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.integration.world import REPOSITORY, World, environment, mopd, write_prompts

pytestmark = pytest.mark.slow
ONE_RANK = {"tensor_model_parallel_size": 1}


def refused(world: World, tmp_path: Path, *flags: str, **overrides: Any) -> str:
    """The one error line of ``mopd train``."""
    run_dir = tmp_path / "run"
    overrides.setdefault("student__parallel", ONE_RANK)
    done = mopd("train", world.write_recipe(run_dir, **overrides), *flags)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert [line for line in lines if line.startswith("mopd: error:")] == lines[-1:], done.stderr
    assert "Traceback" not in done.stderr
    assert not run_dir.exists()
    return lines[-1]


def assert_names(line: str, *parts: str) -> None:
    for part in parts:
        assert part in line, f"{part!r} is not in: {line}"


def test_unknown_key(world: World, tmp_path: Path) -> None:
    line = refused(world, tmp_path, student__parallel={"tensor_model_paralel_size": 2})
    assert_names(line, "run.yaml", "student.parallel.tensor_model_paralel_size", "'tensor_model_parallel_size'")


def test_domain_without_teacher(world: World, tmp_path: Path) -> None:
    train = tmp_path / "train.parquet"
    write_prompts(train, num_rows=9, start=0, domains=("left", "right", "law"))
    line = refused(world, tmp_path, data__train=[str(train)])
    assert_names(line, "'law'", "3 rows", "teachers.<name>.domains")


def test_unreadable_checkpoint(world: World, tmp_path: Path) -> None:
    line = refused(world, tmp_path, student__model=str(tmp_path / "nowhere"))
    assert_names(line, "run.yaml", "student.model", "nowhere", "does not exist")


@pytest.mark.parametrize("key", ["student__model", "teachers__left__model"])
def test_corrupt_safetensors(world: World, tmp_path: Path, key: str) -> None:
    model = tmp_path / "model"
    make_hf_model(model, seed=9)
    make_tokenizer(model)
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    assert_names(refused(world, tmp_path, **{key: str(model)}), str(weights))


def test_prompt_longer_than_the_model(world: World, tmp_path: Path) -> None:
    line = refused(world, tmp_path, data__max_prompt_length=300)
    assert_names(line, "data.max_prompt_length 300", "rollout.max_response_length 4", "256", str(world.student))


def test_no_run_to_resume(world: World, tmp_path: Path) -> None:
    assert_names(refused(world, tmp_path, "--resume"), "run_dir", "--resume")


def test_world_size_not_divisible_under_raw_torchrun(world: World, tmp_path: Path) -> None:
    """The line comes before torchrun's own report, once."""
    recipe = world.write_recipe(tmp_path / "run", student__parallel={"tensor_model_parallel_size": 2})
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "mopd", "train", str(recipe)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("mopd: error:")]
    assert len(errors) == 1, done.stderr
    assert_names(errors[0], "student.parallel", "3", "2")
    assert done.stderr.index("mopd: error:") < done.stderr.index("ChildFailedError")
    assert not (tmp_path / "run").exists()
