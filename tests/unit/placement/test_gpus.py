"""The GPUs that a process sees, and what it makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mopd.base.types import UserError
from mopd.config.load import load_recipe
from mopd.config.machine.places import engine_groups
from mopd.placement import gpus
from mopd.placement.gpus import visible_gpus


@pytest.mark.parametrize(
    ("shown", "expected"), [(None, ["1", "2"]), ("4,5,6", ["5", "6"]), ("GPU-a, GPU-b, GPU-c", ["GPU-b", "GPU-c"])]
)
def test_a_child_sees_what_this_process_counts(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, expected: list[str]
) -> None:
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert visible_gpus((1, 2)) == expected


RECIPE = """\
run_dir: run
student: {model: m, parallel: {tensor_model_parallel_size: 2}}
teachers: {a: {model: m, domains: [x], placement: {type: local}}}
data: {train: [t.jsonl], validation: [v.jsonl], max_prompt_length: 8}
schedule: {steps: 1, prompts_per_step: 1}
validation: {}
rollout: {max_response_length: 8, placement: {type: registered}}
rewards: {default: {type: exact_match}}
"""


def test_this_machine_counts_its_own_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    groups = engine_groups(load_recipe(file).recipe)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name, value in (("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", "3"), ("RANK", "11"), ("WORLD_SIZE", "12")):
        monkeypatch.setenv(name, value)
    assert gpus.places_here(groups).of("teachers.a")[0].gpus == (4,) and gpus.local_rank() == 3
    assert gpus.places_here(groups, num_ranks=2).of("teachers.a")[0].gpus == (2,)
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    assert gpus.places_here(groups).of("teachers.a")[0].gpus == (0,) and gpus.local_rank() is None


def test_a_recipe_is_refused_before_its_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``mopd eval`` asks for the rollout's GPUs alone, of its own: nothing trains beside it."""
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    loaded = load_recipe(file)
    gpus.check_gpus(loaded)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"recipe.yaml:3: teachers.a.placement: .* trainer ranks: GPU 0, 1"):
        gpus.check_gpus(loaded)
    gpus.check_gpus(loaded, ("rollout",))
    shared = load_recipe(file, ["rollout.placement={type: local, share_gpus_with: student}", "teachers.a.replicas=2"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    gpus.check_gpus(shared)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"rollout.placement: 1 replicas of 1 GPUs need 1 and 0 are free"):
        gpus.check_gpus(shared, ("rollout",))
