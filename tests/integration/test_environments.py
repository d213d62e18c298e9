"""Runs whose student answers in several turns: from the recipe to the exported model.

Invariant: what a run with an environment computes is a function of its recipe, on one rank and on two, and at
``max_staleness`` 0 and above each trajectory is trained on once. Not exercised here: vLLM, CUDA.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mopd.run.checkpointing import complete_steps
from tests.fixtures.environments import COUNTING
from tests.integration.under_fire import LOCAL
from tests.integration.world import World, mopd, read_metrics, read_validation

pytestmark = [pytest.mark.slow, pytest.mark.multirank]


def recipe_of(world: World, run_dir: Path, **more: Any) -> Path:
    path = run_dir.parent / "counting.py"
    path.write_text(COUNTING)
    environment = {"type": "custom", "module": str(path), "class_name": "Counting", "max_turns": 4}
    more = {"rollout__environment": environment, "rollout__max_response_length": 64,
            "rewards__default": {"type": "environment"}, "student__max_tokens_per_micro_batch": 512,
            "preflight__require_better_teacher": False, **more}  # fmt: skip
    return world.write_recipe(run_dir, **more)


def test_a_run_in_an_environment_learns_goes_on_and_does_not_depend_on_its_ranks(world: World, tmp_path: Path) -> None:
    parts = {}
    for name, size in (("one", 1), ("two", 2)):
        run_dir = tmp_path / name
        done = mopd("train", recipe_of(world, run_dir, student__parallel__tensor_model_parallel_size=size))
        assert done.returncode == 0, done.stderr
        parts[name] = read_metrics(run_dir)
    for one, two in zip(parts["one"], parts["two"], strict=True):
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)
    first, last = parts["two"][0], parts["two"][-1]
    for domain in ("left", "right"):
        assert 1 < first[f"turns/{domain}"] <= 4 and 0 < first[f"given_share/{domain}"] < 1
        assert first[f"num_tokens/{domain}"] < first[f"response_length/{domain}"] * 4
        assert last[f"loss/{domain}"] < first[f"loss/{domain}"]
    validation = read_validation(tmp_path / "two")[-1]
    assert validation["rewards"]["left"] > 0 and "tool:" in json.dumps(validation["examples"])
    for example in validation["examples"]["left"]:
        given = [one["is_given"] for one in example["segments"]]
        assert given == [False, True] * (len(given) // 2) + [False]
        assert all("tool:" in one["text"] for one in example["segments"] if one["is_given"])
    for name in ("left", "right"):
        told = [value for key, value in first.items() if re.fullmatch(rf"turn_\d_kl/{name}", key)]
        assert len(told) > 1 and min(told) <= first[f"kl_k1/{name}"] <= max(told)
        (trace,) = json.loads((tmp_path / "two" / "traces.json").read_text())["domains"][name]
        assert all((one["kl"] is None) == one["is_given"] for one in trace["segments"])
    page = (tmp_path / "two" / "report.html").read_text()
    assert 'class="given">' in page and "Where the teachers disagree" in page and 'class="heat heat' in page
    done = mopd("generate", tmp_path / "two", "left", "--environment", "--samples", "8", "--json")
    answers = json.loads(done.stdout)
    assert len(answers) == 8 and any(one["is_given"] for answer in answers for one in answer["segments"])
    assert all(0 <= answer["environment_reward"] <= 4 for answer in answers)


@pytest.mark.long
def test_an_asynchronous_run_goes_on_where_it_was(world: World, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = {"rollout__placement": LOCAL, "teacher_defaults__placement": LOCAL, "schedule__max_staleness": 1}
    done = mopd("train", recipe_of(world, run_dir, **options, schedule__steps=4, checkpoint__every_steps=2))
    assert done.returncode == 0, done.stderr
    recipe = recipe_of(world, run_dir, **options, schedule__steps=6, checkpoint__every_steps=2)
    done = mopd("train", recipe, "--resume")
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(run_dir)
    assert [line["step"] for line in metrics] == list(range(1, 7))
    assert complete_steps(run_dir / "checkpoints")[-1] == 6
    # absent of a step before which no response ended
    turns = [line["turns/left"] for line in metrics if "turns/left" in line]
    assert turns and min(turns) >= 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rollout__environment__max_turns": 0}, "rollout.environment.max_turns is 0: set 1 or more"),
        (
            {"rollout__environment__module": "nowhere.py"},
            "rollout.environment.module: file 'nowhere.py' does not exist",
        ),
        ({"rollout__environment__class_name": "Absent"}, "has no attribute 'Absent'"),
        ({"rollout__environment": {"type": "bash"}}, "python_tool"),
        ({"objective": "sft_on_teacher"}, "rollout.environment is 'custom', but objective"),
        ({"rollout__environment": None}, "rewards.default.type is 'environment', but rollout.environment is absent"),
        ({"rollout__environment__max_tokens_per_turn": 100}, "above max_response_length 64"),
    ],
)
def test_what_cannot_work_is_one_line(changes: dict[str, Any], problem: str, world: World, tmp_path: Path) -> None:
    done = mopd("train", recipe_of(world, tmp_path / "run", **changes))
    assert done.returncode == 2, done.stderr
    assert problem in done.stderr.splitlines()[-1]
