"""Whole runs with a gate: batches stay full, counts add up, and only what the gate lets through is learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.world import World, mopd, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
PER_STEP, STEPS = 8, 3


def write_half(path: Path) -> str:
    """Prompts of ``left``, whose teacher always says "ab": it is right on every second one; and of ``right``."""
    rows = [
        {
            "data_source": domain,
            "prompt": [{"role": "user", "content": f"{domain} {index}"}],
            "reward_model": {"style": "rule", "ground_truth": truth},
        }
        for index in range(30)
        for domain, truth in (("left", ("ab", "ba")[index % 2]), ("right", "xy"))
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def trained(world: World, run_dir: Path, gate: dict[str, Any], **more: Any) -> list[dict[str, float]]:
    recipe = world.write_recipe(
        run_dir,
        data__train=[write_half(run_dir.with_suffix(".parquet"))],
        domains={"left": {"gate": gate}},
        rollout={"max_response_length": 4, "samples_per_prompt": 2},
        student__optimizer={"lr": 2.0e-3, "lr_warmup_steps": 1},
        preflight__require_better_teacher=False,
        schedule__steps=STEPS,
        checkpoint={"every_steps": 1, "keep_last": 3, "keep_best": False},
        **more,
    )
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    return read_metrics(run_dir)


def totals(lines: list[dict[str, float]]) -> dict[str, float]:
    names = ("gate_distil/left", "gate_reinforce/left", "gate_skip/left", "num_samples/left", "num_samples/right")
    return {name: sum(line[name] for line in lines) for name in names}


def test_what_the_teacher_gets_wrong_is_left_out(world: World, tmp_path: Path) -> None:
    """Prompts are taken in until the last step's are: with nothing drawn ahead what was let through was trained on."""
    lines = trained(world, tmp_path / "run", {"by": "teacher_answers", "others": "skip"})
    found = totals(lines)
    assert found["num_samples/left"] + found["num_samples/right"] == 2 * PER_STEP * STEPS
    assert found["gate_distil/left"] * 2 == found["num_samples/left"] > 0 == found["gate_reinforce/left"]
    assert 0 < found["gate_skip/left"] < 3 * found["gate_distil/left"]
    assert all("gate_distil/right" not in line or line["gate_distil/right"] == 0 for line in lines)
    done = mopd("train", tmp_path / "run.yaml", "--resume", "--from", "step_1")
    assert done.returncode == 0, done.stderr
    for again, line in zip(read_metrics(tmp_path / "run"), lines, strict=True):  # answers are found: fewer are drawn
        own = {name: value for name, value in line.items() if not name.startswith("teachers/")}
        assert {name: again[name] for name in own} == own


@pytest.mark.long
def test_the_others_learn_from_rewards(world: World, tmp_path: Path) -> None:
    """A student that has never been right is distilled; with a threshold of 0 its rewards alone decide, and where all
    of its responses are wrong no prompt is left."""
    loss = {"type": "topk_forward_kl", "top_k": 8, "task_reward_weight": 1.0}
    found = totals(trained(world, tmp_path / "run", {"by": "student_rewards"}, loss=loss))
    assert found["gate_distil/left"] * 2 == found["num_samples/left"] and found["gate_skip/left"] == 0
    recipe = tmp_path / "run.yaml"
    done = mopd("train", recipe, f"run_dir={tmp_path / 'none'}", "domains.left.gate.threshold=0")
    assert done.returncode == 2, done.stderr
    assert f"domains.left.gate: more than {20 * PER_STEP} prompts were skipped for one step of 8" in done.stderr
