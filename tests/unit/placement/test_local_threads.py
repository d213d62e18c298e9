"""Threads of the servers of one machine: they share the cores that the run may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mopd.config.load import load_recipe
from mopd.placement.groups import Groups
from mopd.placement.server_group import LocalLauncher
from tests.fixtures.tiny_models import make_hf_model

RECIPE = """\
run_dir: run
student: {model: model}
teachers: {math: {model: model, domains: [math], engine: {type: torch, dtype: float32}, placement: {type: in_process}}}
data: {train: [train.jsonl]}
schedule: {steps: 1, prompts_per_step: 1}
rollout: {engine: {type: torch, dtype: float32}, placement: {type: local}, replicas: 3}
"""


def threads(*overrides: str) -> list[int]:
    """Of each replica of the rollout."""
    groups = Groups(load_recipe("recipe.yaml", overrides).recipe, log_dir=Path("logs"), device=torch.device("cpu"))
    launcher = LocalLauncher(groups.plans["rollout"], log_dir=Path("logs"), gpus=[()] * 3)
    return [int(launcher._environment(i)["OMP_NUM_THREADS"]) for i in range(3)]


def test_servers_share_the_cores_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that is bound to some, as in a job's step, not those of the machine; the recipe's number holds."""
    monkeypatch.chdir(tmp_path)
    make_hf_model(tmp_path / "model")
    Path("recipe.yaml").write_text(RECIPE)
    cores = {0: set(range(7)), os.getpid(): set(range(7))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores.get(pid, set(range(64))))
    assert threads() == [2, 2, 2]
    assert threads("rollout.placement.num_threads=5") == [5, 5, 5]
    cores[0] = cores[os.getpid()] = {3}
    assert threads() == [1, 1, 1]
