"""Student and rollout that take turns on one memory, in whole runs.

Invariant: a run that shares equals one that does not, bit for bit, also where a replica is killed in the middle; the
engine has no weights while the student trains, and gets them from it when it wakes; a checkpoint that is written beside
the turns has the same bytes. Not exercised: CUDA, vLLM's sleep (``tools/gpu_student.py``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.under_fire import LOCAL, Run
from tests.integration.world import World, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

STEPS = 8
ONE_BY_ONE = {"type": "torch", "max_tokens_per_batch": 1}
"""No sample depends on what came with it."""


@pytest.fixture
def runs(world: World, tmp_path: Path) -> Iterator[dict[str, Run]]:
    """The same run with a rollout of its own, and with one that shares."""
    made = {}
    shares = {"share_gpus_with": "student"}
    for name, share, way in (("apart", {}, "http"), ("shared", shares, "ipc")):
        placement: dict[str, Any] = {**LOCAL, **share}
        recipe = world.write_recipe(
            tmp_path / name,
            teachers={"left": {"model": str(world.teachers["left"]), "domains": ["left", "right"]}},
            teacher_defaults={"placement": LOCAL, "engine": ONE_BY_ONE},
            rollout={"max_response_length": 4, "placement": placement, "engine": ONE_BY_ONE},
            schedule={"steps": STEPS, "prompts_per_step": 4, "wait_timeout_s": 120},
            validation=None,
            rewards={},
            checkpoint={"every_steps": 2, "export_hf": False, "async_save": True},
            weight_sync={"type": way},
        )
        made[name] = Run(recipe)
    yield made
    for run in made.values():
        if run.is_alive:
            run.process.kill()
            run.process.wait()


@pytest.mark.long
def test_a_run_that_shares_equals_one_that_does_not(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        run.start()
        if name == "shared":
            victim = run.find("rollout.0")
            run.wait_until(lambda: runs["shared"].num_steps >= 1, "the first step")
            victim.kill()
        assert run.end() == 0, run.stderr
    assert "rollout.0 works again" in runs["shared"].stderr
    expected, seen = (_of_training(read_metrics(run.path)) for run in runs.values())
    assert seen == expected
    written, also = (_files(run.path / "checkpoints") for run in runs.values())
    assert len(written) >= STEPS // 2 and also == written
    lines = [json.loads(line) for line in (runs["shared"].path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["memory/student_lent_gib"] > 0
        times = {"lend", "restore", "to_rollout", "to_student", "weights_update"}
        assert {f"timing/{name}_s" for name in times} <= set(line)


def _files(checkpoints: Path) -> dict[str, str]:
    """What the steps beside which they were written have not touched."""
    return {
        str(file.relative_to(checkpoints)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(checkpoints.rglob("*.distcp"))
    }


def _of_training(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without what replicas count, restarts and pushes among it."""
    return [{name: value for name, value in line.items() if not re.match("rollout/|teachers/", name)} for line in lines]
