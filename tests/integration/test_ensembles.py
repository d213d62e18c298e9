"""Whole runs with an ensemble and a default teacher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.world import World, mopd, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multirank]


def test_an_ensemble_and_a_default_teacher_train_on_two_ranks(world: World, tmp_path: Path) -> None:
    """Domain ``left`` has two teachers that disagree; ``right`` is named by nobody and goes to the default teacher."""
    run_dir = tmp_path / "run"
    left, right = str(world.teachers["left"]), str(world.teachers["right"])
    recipe = world.write_recipe(
        run_dir,
        teachers={
            "left": {"model": left, "domains": ["left"], "weight": 3},
            "doubter": {"model": right, "domains": ["left"], "weight": 1},
            "right": {"model": right, "default": True},
        },
        preflight__require_better_teacher=False,
        schedule__steps=4,
    )
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(run_dir)
    assert len(lines) == 4
    for line in lines:
        assert line["num_samples/left"] + line["num_samples/right"] == 8
        for domain in ("left", "right"):
            assert 0 <= line[f"kl_floor/{domain}"] < 1e-6
            assert line[f"kl_net/{domain}"] == pytest.approx(line[f"kl_k1/{domain}"] - line[f"kl_floor/{domain}"])
            assert 0 < line[f"teacher_mass/{domain}"] <= 1 + 1e-5
    assert lines[-1]["loss/right"] < lines[0]["loss/right"]
    parity = json.loads((run_dir / "parity.json").read_text(encoding="utf-8"))
    assert set(parity) == {"left", "doubter", "right"}
    assert all(measured["max_difference"] < 1e-4 and measured["num_positions"] > 8 for measured in parity.values())
    headroom = json.loads((run_dir / "headroom.json").read_text(encoding="utf-8"))
    assert {domain: entry["teacher"] for domain, entry in headroom.items()} == {"left": 1.0, "right": 1.0}  # the better
    assert all(row["reward"] == 1.0 for entry in headroom.values() for row in entry["examples"])  # of left's two


@pytest.mark.parametrize("rule", ["best_reward", "mean_probability"])
def test_one_distribution_of_two_teachers_trains_on_two_ranks(world: World, tmp_path: Path, rule: str) -> None:
    """The best teacher is the one that knows the domain; it is the same one after a restart, and the student comes
    near it. The mean of both is learnt too."""
    run_dir = tmp_path / "run"
    recipe = world.write_recipe(
        run_dir,
        teachers={
            "doubter": {"model": str(world.teachers["right"]), "domains": ["left"], "weight": 1},
            "left": {"model": str(world.teachers["left"]), "domains": ["left"], "weight": 1},
            "right": {"model": str(world.teachers["right"]), "domains": ["right"]},
        },
        preflight__require_better_teacher=False,
        combine=rule,
        student__optimizer={"lr": 2.0e-3, "lr_warmup_steps": 1},
        schedule__steps=2,
    )
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    more = mopd("train", recipe, "--resume", "schedule.steps=4")
    assert more.returncode == 0, more.stderr
    lines = read_metrics(run_dir)
    assert len(lines) == 4 and lines[-1]["loss/left"] < lines[0]["loss/left"]
    if rule == "best_reward":
        for output in (done.stderr, more.stderr):
            assert "domain 'left': combine best_reward chooses teachers.left" in output
        assert json.loads((run_dir / "headroom.json").read_text(encoding="utf-8"))["left"]["name"] == "left"
        assert all("kl_floor/left" in line for line in lines)
    else:
        assert all(line["teacher_disagreement/left"] > 0 for line in lines)
        assert all("kl_floor/left" not in line and "kl_floor/right" in line for line in lines)
