"""Rank 0 with its share of the student, where it is alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from mopd.config.data import DataConfig
from mopd.config.groups import TeacherConfig
from mopd.config.rollout import RolloutConfig
from mopd.config.schedule import ScheduleConfig
from mopd.config.schema import Recipe
from mopd.config.student import StudentConfig
from mopd.data_plane.local import LocalDataPlane
from mopd.launch.leading import joined
from tests.fixtures.tiny_models import make_hf_model


def test_rank_0_learns_for_every_domain_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the recipe names, and those that only the default teacher answers for. Afterwards nothing is left."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    recipe = Recipe(
        run_dir="unused",
        student=StudentConfig(model=str(make_hf_model(tmp_path / "student")), dtype="float32"),
        teachers={
            "math": TeacherConfig(model="unused", domains=("math",)),
            "rest": TeacherConfig(model="unused", default=True),
        },
        data=DataConfig(train=("unused",), max_prompt_length=16),
        rollout=RolloutConfig(max_response_length=16),
        schedule=ScheduleConfig(steps=1, prompts_per_step=1),
    )
    leading = ({"domains": ["law", "code"], "data_plane": {}}, LocalDataPlane().reader())
    with joined(recipe, leading, None) as (worker, channel):
        assert worker.domains == ("code", "law", "math") and worker.dp_size == 1
        assert channel.stopped is None
    assert not dist.is_initialized()
