"""``mopd check --nodes``: two nodes that are well, and every fault of the second named with its key on both."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.fixtures.mounts import private_mounts
from tests.integration.world import REPOSITORY, World, environment, write_prompts

pytestmark = [pytest.mark.multirank, pytest.mark.long]
TIMEOUT_S = 400.0
SECONDS_OF_A_FAULT = 30.0
NAMED = {
    "version": ("versions", "node2: numpy is 99.", " on node1: install the same on every node"),
    "missing_model": ("node2", "node2: ", "recipe.yaml:", "teachers.right.model: folder ", " has no config.json"),
    "other_config": ("", "node2: ", "recipe.yaml:", "teachers.right.model: config.json is ", " on node1: "),
    "read_only": ("run_dir", "node2: ", "recipe.yaml:", "run_dir: ", "Read-only file system"),
    "full_disk": ("run_dir", "node2: ", "recipe.yaml:", "run_dir: ", "No space left on device"),
    "not_shared": ("run_dir", "node2: ", "recipe.yaml:", "run_dir: ", "a file that node1 wrote there is not seen"),
    "no_locks": (
        "flock",
        "node2: ",
        "run_dir: ",
        "a lock of node1 does not exclude it",
        "mount it with locks that hold across nodes",
    ),
    "gpus": ("node2", "node2: ", "recipe.yaml:", "slurm.gpus_per_node: 8 are planned, and this node has 6"),
}
"""Fault -> the check that fails and what its line holds, in this order."""


RANK_EACH = {"student__parallel": {"data_parallel_size": 2}}


@pytest.fixture(scope="module")
def outcomes(models: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Fault -> what both nodes said, of one process that has imported everything."""
    folder = tmp_path_factory.mktemp("nodes")
    prefix = private_mounts(folder)
    subprocess.run(["cp", "-r", f"{models.folder}/.", str(folder)], check=True)
    world = World(folder)
    write_prompts(world.train, num_rows=4, start=0)
    write_prompts(world.validation, num_rows=4, start=10)
    recipe = world.write_recipe(folder / "run", slurm={"gpus_per_node": 8, "nodes": 2, "student_nodes": 2}, **RANK_EACH)
    recipe.rename(folder / "recipe.yaml")
    (folder / "run").mkdir()
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "tests.integration.node_faults", str(folder)],
        cwd=REPOSITORY,
        env=environment() | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((folder / "run").iterdir()) == []
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["fault"]: line for line in lines}


def test_sound_nodes_pass_every_check(outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes["none"]
    assert outcome["codes"] == [0, 0], outcome["texts"]
    told = [json.loads(text[0]) for text in outcome["texts"]]
    assert told[0] == told[1]
    found = {check["name"]: check for check in told[0]}
    assert {check["status"] for check in told[0]} == {"ok"}
    names = "versions recipe GPUs /dev/shm run_dir room rename flock clock all-reduce"
    assert set(names.split()) <= set(found)
    assert "torch" in found["versions"]["detail"]


@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_of_one_node_is_named_on_both(outcomes: dict[str, dict[str, Any]], fault: str) -> None:
    outcome = outcomes[fault]
    name, *parts = NAMED[fault]
    assert outcome["codes"] == [2, 2], outcome["texts"]
    assert outcome["seconds"] < SECONDS_OF_A_FAULT
    for printed, errors in outcome["texts"]:
        (line,) = errors.splitlines()
        assert line.startswith("mopd: error: ")
        place = 0
        for part in parts:
            assert part in line[place:], line
            place = line.index(part, place) + len(part)
        failed = [check["name"] for check in json.loads(printed) if check["status"] == "failed"]
        assert len(failed) == 1 and name in failed[0]
