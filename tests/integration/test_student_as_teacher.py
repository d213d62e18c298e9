"""The student as its own teacher: a view alone makes a loss, and refreshed weights are those of the step, wherever the
teacher runs, also after a kill.

Invariant: of two equal runs, one whose teacher is refreshed after step 2 differs from a frozen one from step 3 on and
in nothing before; and it resumes bit for bit. Not exercised here: vLLM, CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.world import World, mopd, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
STEPS = 4
ALIKE = 2e-4
"""Largest relative difference of two runs whose engines compute in other batches."""


def recipe_of(world: World, run_dir: Path, refresh: Any, **overrides: Any) -> Path:
    """Return the recipe of a run in which the student, shown the answers, teaches itself, in each domain with engines
    of its own."""
    view = {"system": "say {ground_truth}", "prompt": "{prompt} of ten", "max_prompt_length": 64}
    return world.write_recipe(
        run_dir,
        teachers={
            f"self_{domain}": {"model": "student", "refresh": refresh, "domains": [domain], "view": view}
            for domain in world.teachers
        },
        student__parallel={"tensor_model_parallel_size": 1},
        preflight={"require_better_teacher": False, "compare_with_transformers": True},
        schedule__steps=STEPS,
        checkpoint={"every_steps": 2, "keep_last": 3, "keep_best": False},
        **overrides,
    )


def trained(world: World, run_dir: Path, refresh: Any, **overrides: Any) -> list[dict[str, float]]:
    """Return the metrics of such a run."""
    done = mopd("train", recipe_of(world, run_dir, refresh, **overrides))
    assert done.returncode == 0, done.stderr
    return read_metrics(run_dir)


@pytest.fixture(scope="module")
def refreshed(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    run_dir = tmp_path_factory.mktemp("refreshed") / "run"
    return run_dir, trained(world, run_dir, {"every_steps": 2})


def test_new_weights_change_what_follows_and_nothing_before(
    world: World, refreshed: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    _, own = refreshed
    frozen = trained(world, tmp_path / "run", "frozen")
    assert [line["step"] for line in own] == [1, 2, 3, 4]
    assert own[:2] == frozen[:2] and own[2]["loss"] != frozen[2]["loss"]
    assert all(line["grad_norm"] > 1e-3 for line in own)  # the view alone makes the teacher another one


def test_a_resumed_run_is_the_same_run(refreshed: tuple[Path, list[dict[str, float]]]) -> None:
    run_dir, own = refreshed
    done = mopd("train", run_dir.with_suffix(".yaml"), "--resume", "--from", "step_2")
    assert done.returncode == 0, done.stderr
    assert read_metrics(run_dir) == own


def test_a_student_in_bfloat16_teaches_itself_in_float32(world: World, tmp_path: Path) -> None:
    """Its weights come from the trainer, rounded: preflight holds them against the folder within what that changes."""
    groups = {"engine": {"type": "torch", "dtype": "float32"}}
    own = {"student__dtype": "bfloat16", "teacher_defaults": groups, "rollout__engine": groups["engine"]}
    recipe = recipe_of(world, tmp_path / "run", {"every_steps": 2}, **own)
    done = mopd("check", recipe, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("(limit 0.005), |log-prob difference| mean") == 2


@pytest.mark.long
def test_servers_are_given_the_weights_too(
    world: World, refreshed: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    """Teacher and rollout in processes of their own; a server that had kept its weights would show at step 3."""
    _, own = refreshed
    groups = {"engine": {"type": "torch", "dtype": "float32"}, "placement": {"type": "local"}}
    rollout = {"max_response_length": 4, **groups}
    served = trained(world, tmp_path / "run", {"every_steps": 2}, teacher_defaults=groups, rollout=rollout)
    for here, there in zip(own, served, strict=True):
        assert there["loss"] == pytest.approx(here["loss"], rel=ALIKE)


def test_an_average_is_the_teacher_and_in_checkpoints(
    world: World, refreshed: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    """After step 1, where it still is the student that was loaded, every step has another teacher."""
    own = trained(world, tmp_path / "run", {"ema": 0.5})
    _, every = refreshed
    assert own[0] == every[0] and own[1]["loss"] != every[1]["loss"]
    done = mopd("train", tmp_path / "run.yaml", "--resume", "--from", "step_2")
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path / "run") == own


@pytest.mark.long
def test_an_average_of_adapters_teaches_and_goes_on(world: World, tmp_path: Path) -> None:
    """What is averaged are the factors, which the engines get alone."""
    adapters = {"student__lora": {"rank": 4}, "student__optimizer": {"lr": 0.05}}
    own = trained(world, tmp_path / "run", {"ema": 0.5}, **adapters)
    every = trained(world, tmp_path / "every", {"every_steps": 2}, **adapters)
    assert own[0] == every[0] and own[2]["loss"] != every[2]["loss"]
    done = mopd("train", tmp_path / "run.yaml", "--resume", "--from", "step_2")
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path / "run") == own
