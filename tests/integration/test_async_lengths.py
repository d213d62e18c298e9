"""Real asynchronous runs whose responses have lengths of a heavy tail train on what the student says, not on its short
answers.

The learning rate is next to nothing, so that every version of the weights draws the same response to the same prompt
and seed: what a synchronous run trains on is what every other run should train on. (A response that new weights
overtake goes on with another seed: then the distribution is the same.) ``make kills`` runs all schedules, and prints
their ages and times; ``make test`` one. Not exercised here: several machines, CUDA.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd.base.metrics import read_jsonl
from tests.integration.under_fire import LOCAL, Run, trained
from tests.integration.world import World
from tests.unit.orchestrator.async_world import ks_distance, ks_noise

IS_LONG = "MOPD_KILLS" in os.environ
pytestmark = [
    pytest.mark.slow,
    pytest.mark.multirank,
    pytest.mark.skipif(not IS_LONG, reason="takes long: make kills"),
]
STEPS = 40
WAYS = (("hold", "finish"), ("hold", "continue"), ("redraw", "finish"))
SCHEDULES = [(n, *way) for n in (1, 2, 4) for way in WAYS]
PER_STEP = 8


def recipe_of(world: World, run_dir: Path, **schedule: Any) -> Path:
    """``schedule`` holds keys of ``schedule``, and ``on_new_weights``."""
    on_new_weights = schedule.pop("on_new_weights", "auto")
    return world.write_recipe(
        run_dir,
        student__parallel={"tensor_model_parallel_size": 1},
        student__optimizer={"lr": 1e-12},
        student__max_tokens_per_micro_batch=2048,
        teacher_defaults={"placement": LOCAL},
        rollout={"max_response_length": 192, "placement": LOCAL, "on_new_weights": on_new_weights},
        schedule={"steps": STEPS, "prompts_per_step": PER_STEP, "wait_timeout_s": 120, **schedule},
        validation=None,
        checkpoint={"every_steps": STEPS, "export_hf": False},
    )


class Lengths:
    """Lengths that one run has trained on, and how it went."""

    def __init__(self, recipe: Path) -> None:
        """Run it."""
        run = Run(recipe)
        try:
            run.start()
            assert run.end() == 0, run.stderr
            samples = [sample for step in trained(run) for sample in step]
        finally:
            if run.is_alive:
                run.process.kill()
                run.process.wait()
            shutil.rmtree(run.temporary)
        self.by_id = {sample["sample_id"]: sample["response_length"] for sample in samples}
        rows = read_jsonl(run.path / "metrics.jsonl")
        self.num_refused = sum(v for row in rows for name, v in row.items() if name.startswith("refused_samples/"))
        self.step_s = sum(row["timing/step_s"] for row in rows) / len(rows)
        shares = [(int(name.split("/")[1]), v) for row in rows for name, v in row.items() if "staleness_share/" in name]
        self.mean_age = sum(age * share for age, share in shares) / len(rows)

    @property
    def all(self) -> np.ndarray:
        return np.array(list(self.by_id.values()), dtype=float)


@pytest.fixture(scope="module")
def said(world: World, tmp_path_factory: pytest.TempPathFactory) -> Lengths:
    """What the student says to the prompts of the stream."""
    found = Lengths(recipe_of(world, tmp_path_factory.mktemp("synchronous") / "run", max_staleness=0))
    assert found.all.std() > 0.8 * found.all.mean() and found.all.max() > 3 * found.all.mean()
    return found


@pytest.mark.parametrize(("max_staleness", "on_expiry", "on_new_weights"), SCHEDULES)
def test_what_is_trained_on_is_what_the_student_says(
    world: World, tmp_path: Path, said: Lengths, max_staleness: int, on_expiry: str, on_new_weights: str
) -> None:
    schedule = {"max_staleness": max_staleness, "on_expiry": on_expiry, "on_new_weights": on_new_weights}
    found = Lengths(recipe_of(world, tmp_path / "run", **schedule))
    distance, noise = ks_distance(found.all, said.all), ks_noise(len(found.all), len(said.all))
    told = {"mean length": found.all.mean(), "said": said.all.mean(), "distance": distance, "noise": noise}
    told |= {"refused": found.num_refused, "age": found.mean_age, "step_s": found.step_s}
    print(json.dumps(schedule | {name: round(float(value), 3) for name, value in told.items()}), flush=True)
    if on_expiry == "redraw":  # what it costs is printed; whether anything is refused hangs on time
        return
    assert found.num_refused == 0
    assert distance < noise
    if on_new_weights == "finish":
        assert found.by_id == said.by_id
