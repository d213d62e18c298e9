"""Whole runs on the teachers' own answers: as a warm-up, resumed within and after it, and without any rollout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.world import ANSWERS, World, mopd, read_metrics, read_validation

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
NOT_VALIDATED = {"validation": None, "checkpoint__keep_best": False, "preflight__require_better_teacher": False}


def test_a_warm_up_resumed_within_it_and_at_its_end_equals_uninterrupted(world: World, tmp_path: Path) -> None:
    """Bit for bit, though the resumed run finds its answers on disk; the report says where the warm-up ended."""
    whole = tmp_path / "whole"
    options = {"schedule__warm_up": {"objective": "sft_on_teacher", "steps": 3}, "checkpoint__keep_last": 5}
    done = mopd("train", world.write_recipe(whole, **options))
    assert done.returncode == 0, done.stderr
    assert "warm-up: SFT on the teachers' answers up to step 3; rewards at step 3: " in done.stdout
    metrics = read_metrics(whole)
    assert [line["is_warm_up"] for line in metrics] == [1.0] * 3 + [0.0] * 3
    assert [line["lr"] for line in metrics[3:5]] == [line["lr"] for line in metrics[:2]]  # lr_warmup_steps, again
    assert [f"kl_k1/{domain}" in line for line in metrics for domain in ANSWERS] == [False] * 6 + [True] * 6

    def learned(run_dir: Path) -> list[dict[str, float]]:
        kept = ("stored_answers_share", "teachers/", "rollout/")  # what was asked of whom differs
        return [{k: v for k, v in line.items() if not k.startswith(kept)} for line in read_metrics(run_dir)]

    for step in (2, 3):
        resumed = tmp_path / f"resumed_{step}"
        shutil.copytree(whole, resumed)
        done = mopd("train", world.write_recipe(resumed, **options), "--resume", "--from", f"step_0000000{step}")
        assert done.returncode == 0, done.stderr
        assert read_validation(resumed) == read_validation(whole)
        found = [line.get("stored_answers_share") for line in read_metrics(resumed)]
        assert found[2] == (1.0 if step == 2 else metrics[2]["stored_answers_share"]) and found[3:] == [None] * 3
        assert learned(resumed) == learned(whole)


@pytest.mark.parametrize("objective", ["sft_on_teacher", pytest.param("off_policy_scores", marks=pytest.mark.long)])
def test_a_baseline_learns_without_a_rollout_and_a_second_run_draws_nothing(
    world: World, tmp_path: Path, objective: str
) -> None:
    """The experts give one answer each, which the student learns: the loss falls to a fraction."""
    options = {"objective": objective, "answers__folder": str(tmp_path / "answers"), "schedule__steps": 8}
    losses = []
    for name in ("first", "second"):
        run_dir = tmp_path / name
        local = {"rollout__placement": {"type": "local"}, "rollout__max_response_length": 4}
        done = mopd("train", world.write_recipe(run_dir, **options, **local, **NOT_VALIDATED))
        assert done.returncode == 0, done.stderr
        assert not list(run_dir.glob("logs/*/rollout*"))
        metrics = read_metrics(run_dir)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        assert all(
            "timing/answers_s" in line for line in lines
        )  # no answer is drawn between steps, where nobody counts
        losses.append([line["loss"] for line in metrics])
        shares = [line["stored_answers_share"] for line in metrics]
        assert min(shares) == 1.0 if name == "second" else shares[0] == 0.0 and shares[-1] == 1.0
        assert ("teacher_mass/left" in metrics[0]) == (objective == "off_policy_scores")
    assert losses[0] == losses[1] and losses[0][-1] < 0.5 * losses[0][0]
    report = json.loads((tmp_path / "second" / "report.json").read_text())
    assert set(report["pipeline"]["stages"]) >= {"answers", "trainer"} and "rollout" not in report["pipeline"]["stages"]


def test_responses_begin_with_a_share_of_the_teachers_answers_that_falls_to_none(world: World, tmp_path: Path) -> None:
    """Only what the student drew counts as loss tokens, and answers are asked for in steps with a share alone."""
    prefix = {"source": "teacher", "share": 1.0, "steps": 4}
    done = mopd("train", world.write_recipe(tmp_path / "run", rollout__prefix=prefix, **NOT_VALIDATED))
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(tmp_path / "run")
    for domain in ANSWERS:
        given = [line.get(f"prefix_length/{domain}", 0.0) for line in metrics]
        assert given[0] > given[2] > 0 == given[4] == given[5]
        for line, own in zip(metrics, given, strict=True):
            drawn = line[f"num_tokens/{domain}"] / line[f"num_samples/{domain}"]
            assert drawn + own == pytest.approx(line[f"response_length/{domain}"])
    assert ["stored_answers_share" in line for line in metrics] == [True] * 4 + [False] * 2
