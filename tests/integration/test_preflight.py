"""The checks before the first step, on real models: what they pass and what each refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.fixtures.tiny_models import CHARACTERS, make_hf_model, make_tokenizer
from tests.integration.world import World, mopd, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
ONE_RANK = {"tensor_model_parallel_size": 1}


def refused(world: World, run_dir: Path, **overrides: object) -> str:
    """Start a fresh run that must be refused with one line, and leave nothing behind."""
    done = mopd("train", world.write_recipe(run_dir, student__parallel=ONE_RANK, **overrides))
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("mopd: error:")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not run_dir.exists()
    return errors[0]


def test_check_passes_and_reports_numbers(world: World, tmp_path: Path) -> None:
    done = mopd("check", world.write_recipe(tmp_path / "run"), "--json")
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout)
    assert {c["status"] for c in checks} == {"ok"}
    assert [c["name"] for c in checks if c["name"].startswith("scores of")] == ["scores of left", "scores of right"]
    assert not (tmp_path / "run").exists()


def test_swapped_teachers(world: World, tmp_path: Path) -> None:
    left, right = (str(world.teachers[domain]) for domain in ("left", "right"))
    error = refused(world, tmp_path / "run", teachers__left__model=right, teachers__right__model=left)
    assert "rewards.default (exact_match) never matched on domain 'left': teachers.left and the student both" in error
    assert "from which was extracted '" in error and "teachers.left.model and domains" in error


def test_teacher_is_the_student(world: World, tmp_path: Path) -> None:
    error = refused(world, tmp_path / "run", teachers__left__model=str(world.student))
    assert "preflight.allow_same_weights" in error


def test_other_tokenizer(world: World, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(world.teachers["left"], teacher)
    make_tokenizer(teacher, characters=CHARACTERS[::-1])
    error = refused(world, tmp_path / "run", teachers__left__model=str(teacher))
    assert "do not share a tokenizer" in error


def test_larger_teacher_vocabulary_is_fine(world: World, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    make_hf_model(teacher, "llama", seed=5, vocab_size=70)
    make_tokenizer(teacher)
    recipe = world.write_recipe(
        tmp_path / "run",
        student__parallel=ONE_RANK,
        teachers__left__model=str(teacher),
        preflight__require_better_teacher=False,
    )
    done = mopd("check", recipe, "--json")
    assert done.returncode == 0, done.stderr


def test_self_distillation_has_no_gradient(world: World, tmp_path: Path) -> None:
    """Student = teacher, allowed by the key: KL < 1e-6 and gradient norm < 1e-5 with the default tail."""
    run_dir = tmp_path / "run"
    recipe = world.write_recipe(
        run_dir,
        teachers={"self": {"model": str(world.student), "domains": ["left", "right"]}},
        preflight__allow_same_weights=True,
        schedule__steps=1,
        student__optimizer__lr_warmup_steps=0,
    )
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    (line,) = read_metrics(run_dir)
    for domain in ("left", "right"):
        assert abs(line[f"loss/{domain}"]) < 1e-6
        assert line[f"kl_k3/{domain}"] < 1e-6
    assert line["grad_norm"] < 1e-5


def test_changed_teacher_refuses_to_resume(world: World, tmp_path: Path) -> None:
    teacher, run_dir = tmp_path / "teacher", tmp_path / "run"
    shutil.copytree(world.teachers["left"], teacher)
    recipe = world.write_recipe(
        run_dir, student__parallel=ONE_RANK, teachers__left__model=str(teacher), schedule__steps=3
    )
    assert mopd("train", recipe).returncode == 0
    shutil.copy(world.teachers["right"] / "model.safetensors", teacher / "model.safetensors")
    done = mopd("train", recipe, "--resume")
    assert done.returncode == 2
    assert "teachers.left.model" in done.stderr
    assert "weights" in done.stderr
