"""A job whose second node has a fault ends before anything of it starts: node and key named, nothing left queued.

The node's slurmd runs in a mount namespace of its own. ``make slurm`` tries every fault, ``make test`` one.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures import slurm
from tests.fixtures.mounts import private_mounts
from tests.integration.world import REPOSITORY, World, environment, write_prompts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multirank,
    pytest.mark.skipif(bool(slurm.why_not()), reason=slurm.why_not() or "Slurm is there"),
]
CHECK_S, JOB_S = 90.0, 300.0
NVIDIA_SMI = """#!/bin/sh
for number in 0 1 2 3 4 5; do echo "$number, GPU-$number, 81559"; done
"""
FAULTS = {
    "read-only": ("mount --bind {run} {run} && mount -o remount,bind,ro {run}", "run_dir", "Read-only file system"),
    "version": ("mount --bind {spare}/METADATA {metadata}", "numpy is 99.", "on node1"),
    "missing model": ("mount -t tmpfs tmpfs {teacher}", "teachers.right.model", "has no config.json"),
    "other config": (
        "mount --bind {spare}/config.json {teacher}/config.json",
        "teachers.right.model",
        "config.json is ",
    ),
    "full disk": (
        "mount -t tmpfs -o size=64k tmpfs {disk} && mkdir {disk}/up {disk}/work && "
        "{ cat /dev/zero >{disk}/full || true; } && "
        "mount -t overlay -o lowerdir={run},upperdir={disk}/up,workdir={disk}/work overlay {run}",
        "run_dir",
        "No space left on device",
    ),
    "GPU count": (
        "mount -t tmpfs tmpfs /usr/local/sbin && cp {spare}/nvidia-smi /usr/local/sbin",
        "slurm.gpus_per_node",
        "8 are planned, and this node has 6",
    ),
}
"""Fault -> what node2 does before its slurmd starts, the key that is named, what is said of it."""
TRIED = [
    name if not number or "MOPD_SLURM" in os.environ else pytest.param(name, marks=pytest.mark.skip("make slurm"))
    for number, name in enumerate(FAULTS)
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    private_mounts(tmp_path_factory.mktemp("tried"))
    with slurm.running(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def world(models: World, tmp_path: Path) -> World:
    """Models that only this test changes."""
    subprocess.run(["cp", "-r", f"{models.folder}/.", str(tmp_path)], check=True)
    own = World(tmp_path)
    write_prompts(own.train, num_rows=4, start=0)
    write_prompts(own.validation, num_rows=4, start=10)
    return own


def prepared(world: World, fault: str) -> list[str]:
    """Words before node2's slurmd: they make the fault, for that process and its children alone."""
    spare, disk, run = (world.folder / name for name in ("spare", "disk", "run"))
    for folder in (spare, disk, run):
        folder.mkdir()
    (own,) = [path for path in importlib.metadata.files("numpy") or [] if path.name == "METADATA"]
    metadata = Path(str(own.locate()))
    teacher = world.teachers["right"]
    (spare / "METADATA").write_text(metadata.read_text().replace("\nVersion: ", "\nVersion: 99.", 1))
    (spare / "config.json").write_text((teacher / "config.json").read_text() + "\n")
    (spare / "nvidia-smi").write_text(NVIDIA_SMI)
    (spare / "nvidia-smi").chmod(0o755)
    script = FAULTS[fault][0]
    for name, path in (("run", run), ("spare", spare), ("disk", disk), ("metadata", metadata), ("teacher", teacher)):
        script = script.replace(f"{{{name}}}", str(path))
    return ["unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh"]


@pytest.mark.parametrize("fault", TRIED)
def test_a_fault_of_node2_is_named_and_nothing_is_left(cluster: slurm.Cluster, world: World, fault: str) -> None:
    cluster.restart_node("node2", prepared(world, fault))
    run_dir = world.folder / "run"
    gpus = {"gpus_per_node": 8} if fault == "GPU count" else {}
    recipe = world.write_recipe(run_dir, slurm={"nodes": 2, "student_nodes": 2, "time": "10", **gpus})
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "mopd", "slurm", str(recipe), "--wait"],
        cwd=REPOSITORY,
        env=environment() | cluster.environment,
        capture_output=True,
        text=True,
        timeout=JOB_S,
    )
    seconds = time.monotonic() - begun
    said = "".join(path.read_text(errors="replace") for path in run_dir.glob("logs/job/*.log"))
    assert done.returncode == 2, done.stdout + done.stderr + said
    _, key, what = FAULTS[fault]
    (line,) = [line for line in said.splitlines() if line.startswith("mopd: error: ")]
    assert line.startswith("mopd: error: node2: ") and key in line and what in line.partition(key)[0] + line, said
    assert cluster.jobs() == []
    assert not (run_dir / "metrics.jsonl").exists()
    print(f"{fault}: {seconds:.1f} s from mopd slurm to its end: {line}")
    assert seconds < CHECK_S
