"""What a process learns from Slurm's environment."""

from __future__ import annotations

import os

import pytest

from mopd.launch.node import gpus_of_step, node_of_step

STEP = {"SLURM_STEP_NUM_NODES": "3", "SLURM_NNODES": "4", "SLURM_NODEID": "2", "SLURM_PROCID": "0"}


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("absent", "place"),
    [
        ((), (3, 2)),
        (("SLURM_STEP_NUM_NODES",), (4, 2)),
        (("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), None),
        (("SLURM_NODEID",), None),
        (("SLURM_PROCID",), None),  # the job's script itself is in no step
    ],
)
def test_the_place_in_a_step(
    absent: tuple[str, ...], place: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in STEP.keys() - set(absent):
        monkeypatch.setenv(name, STEP[name])
    assert node_of_step() == place


@pytest.mark.parametrize(("told", "gpus"), [(None, None), ("", None), ("8", 8), ("gpu:8", None)])
def test_gpus_of_a_node(told: str | None, gpus: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if told is not None:
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", told)
    assert gpus_of_step() == gpus
