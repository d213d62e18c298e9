"""Whole runs in which teachers are asked for other ids than their own top k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.world import World, mopd, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
LOSS: dict[str, Any] = {"type": "topk_reverse_kl", "top_k": 4, "tail": "sampled", "always_ids": ["<eos>", 5]}


@pytest.mark.parametrize("placement", ["in_process", pytest.param("local", marks=pytest.mark.long)])
def test_both_top_ks_and_decision_tokens_train_on_two_ranks(world: World, tmp_path: Path, placement: str) -> None:
    """One teacher gives log-probs at the student's ids alone, the other at both sides'; rows have one width."""
    run_dir = tmp_path / "run"
    tree: dict[str, Any] = {
        "loss": LOSS,
        "schedule__steps": 4,
        "preflight__require_better_teacher": False,
        "metrics__diagnostics_every_steps": 1,
        "teacher_defaults": {"payload": "union", "placement": {"type": placement}},
        "rollout__placement": {"type": placement},
    }
    recipe = world.write_recipe(run_dir, **tree)
    done = mopd("train", recipe, "teachers.right.payload=student_topk")
    assert done.returncode == 0, done.stderr
    assert "support of left: its top 4 and the student's top 4 and 2 of loss.always_ids holds" in done.stderr
    lines = read_metrics(run_dir)
    assert len(lines) == 4
    for line in lines:
        for domain in ("left", "right"):
            assert 0 <= line[f"kl_floor/{domain}"] < 1e-6
            assert 0 < line[f"support_mass_p01/{domain}"] <= line[f"teacher_mass/{domain}"] <= 1 + 1e-5
            assert 0 <= line[f"decision_outside/{domain}"] <= 1 and 0 < line[f"student_mass/{domain}"] <= 1 + 1e-5
            assert 0 <= line[f"outside/{domain}"] < 1
    assert sum(lines[-1][f"kl_k1/{domain}"] for domain in ("left", "right")) < sum(
        lines[0][f"kl_k1/{domain}"] for domain in ("left", "right")
    )


def test_the_sampled_token_alone_travels(world: World, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tree: dict[str, Any] = {"loss": {"type": "k2"}, "teacher_defaults": {"payload": "sampled"}, "schedule__steps": 3}
    done = mopd("train", world.write_recipe(run_dir, **tree, preflight__require_better_teacher=False))
    assert done.returncode == 0, done.stderr
    lines = read_metrics(run_dir)
    assert len(lines) == 3 and all(line["loss/left"] > 0 for line in lines)
    assert not [name for name in lines[0] if name.startswith(("teacher_mass", "topk_overlap", "kl_floor", "support"))]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("loss.always_ids=[<nothing>]", "loss.always_ids names '<nothing>', which is no token"),
        ("loss.always_ids=[3, 3]", "loss.always_ids names token 3 twice (3): remove one"),
        ("loss.top_k=100000", "it gives at most"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(world: World, tmp_path: Path, override: str, line: str) -> None:
    recipe = world.write_recipe(tmp_path / "run", loss=LOSS, teacher_defaults={"payload": "union"})
    done = mopd("train", recipe, override)
    assert done.returncode == 2 and line in done.stderr.splitlines()[-1]
