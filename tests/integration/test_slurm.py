"""Runs as jobs of a real Slurm, on nodes that share this machine (``tests/fixtures/slurm.py``).

``make slurm`` also runs what takes minutes: other forms, requeues, lost nodes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import slurm
from tests.fixtures.mounts import private_mounts
from tests.integration.jobs import ended, job_id, job_logs, num_steps, replica_pids, until
from tests.integration.world import REPOSITORY, World, environment, mopd, read_metrics, read_validation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multirank,
    pytest.mark.skipif(bool(slurm.why_not()), reason=slurm.why_not() or "Slurm is there"),
]
long = pytest.mark.skipif("MOPD_SLURM" not in os.environ, reason="takes minutes: make slurm")
ON_NODES = {
    "student__parallel": {"tensor_model_parallel_size": 2, "data_parallel_size": 2},
    "teacher_defaults": {"placement": {"type": "registered"}, "engine": {"type": "torch", "dtype": "float32"}},
    "schedule__wait_timeout_s": 180,
}
"""Overrides of a world's recipe: four ranks, and teachers that register."""
ENROOT = "export RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=node1 MASTER_PORT=29500"
"""What enroot's hook for PyTorch images sets in the container of every step under pyxis (``50-slurm-pytorch.sh``)."""
TOGETHER: dict[str, Any] = (
    {**ON_NODES, "slurm": {"student_nodes": 2, "gpus_per_node": 3, "time": "10", "setup": [ENROOT], "interface": "lo"}}
    if "MOPD_SLURM" in os.environ
    else {
        **ON_NODES,
        "student__parallel": {"tensor_model_parallel_size": 2},
        "schedule__steps": 3,
        "rollout__placement": {"type": "registered"},
        "slurm": {"student_nodes": 2, "gpus_per_node": 3, "time": "10", "setup": [ENROOT], "interface": "lo"},
    }
)
"""The job that ``make test`` tries too, there with a rank on each node: nothing that a job starts is warm."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    with slurm.running(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def nodes(cluster: slurm.Cluster) -> Iterator[slurm.Cluster]:
    """The cluster, for one test's jobs."""
    yield cluster
    cluster.clear()


def command(cluster: slurm.Cluster, *arguments: str | Path) -> subprocess.Popen[str]:
    """``mopd`` where this cluster's commands are."""
    return subprocess.Popen(
        [sys.executable, "-m", "mopd", *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment() | cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_trained_as_on_one_machine(run_dir: Path, expected: Path) -> None:
    assert [line["rewards"] for line in read_validation(run_dir)] == [
        line["rewards"] for line in read_validation(expected)
    ]
    ours, theirs = read_metrics(run_dir), read_metrics(expected)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)


@pytest.fixture(scope="module")
def one_machine(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of as many ranks on one machine."""
    run_dir = tmp_path_factory.mktemp("one_machine") / "run"
    keys = {key: value for key, value in TOGETHER.items() if key != "rollout__placement"}
    keys |= {"teacher_defaults": {}, "slurm": None}
    done = mopd("train", world.write_recipe(run_dir, **keys))
    assert done.returncode == 0, done.stderr
    return run_dir


def test_two_nodes_train_as_one_machine(nodes: slurm.Cluster, world: World, one_machine: Path, tmp_path: Path) -> None:
    """The ranks over both, each teacher and the rollout in a step of its own, on the GPUs that the ranks leave; the
    weights go to the rollout's node over the network."""
    run_dir = tmp_path / "run"
    code, output, errors = ended(command(nodes, "slurm", world.write_recipe(run_dir, **TOGETHER), "--wait"))
    assert code == 0, output + errors + job_logs(run_dir)
    assert_trained_as_on_one_machine(run_dir, one_machine)
    assert (run_dir / "logs" / "node1" / "teachers.left.0.log").is_file()
    assert (run_dir / "logs" / "node2" / "teachers.right.0.log").is_file()
    assert {path.parent.name for path in (run_dir / "logs").glob("node?/rank_*.log")} == {"node1", "node2"}
    assert "COMPLETED" in output and f"step {len(read_metrics(run_dir))}/" in output
    if "rollout__placement" in TOGETHER:  # by a group: HTTP has no such number
        written = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert all('"timing/weights_send_s"' in line for line in written)
    assert f"job {job_id(run_dir)} of {run_dir}" in output
    code, output, _ = ended(command(nodes, "status", run_dir))
    assert code == 0 and f"job {job_id(run_dir)} COMPLETED" in output


@pytest.mark.parametrize(
    ("slurm_keys", "says"),
    [
        ({"nodes": 2, "partition": "nowhere"}, "sbatch refused the job: invalid partition specified: nowhere"),
        (
            {"nodes": 2},
            "slurm.gpus_per_node is missing, and nodes of the default partition have gpu:8: set it, to 0 for",
        ),
        ({"nodes": 2, "partition": "wide"}, "gpus_per_node is missing, and nodes of partition 'wide' have gpu:8"),
        (
            {"nodes": 4, "gpus_per_node": 0},
            "slurm: sbatch refused the job: allocation failure: Requested node configuration is not",
        ),
    ],
)
def test_what_is_refused_leaves_nothing(
    nodes: slurm.Cluster, models: World, tmp_path: Path, slurm_keys: dict[str, Any], says: str
) -> None:
    run_dir = tmp_path / "runs" / "one"
    recipe = models.write_recipe(run_dir, **ON_NODES, slurm=slurm_keys)
    code, output, errors = ended(command(nodes, "slurm", recipe), timeout_s=120)
    assert (code, output) == (2, "") and says in errors and errors.count("\n") == 1, errors
    assert not run_dir.exists() and nodes.jobs() == []


def test_a_fault_of_node2_is_named_and_nothing_is_left(nodes: slurm.Cluster, world: World, tmp_path: Path) -> None:
    """The job checks its nodes before anything starts; ``test_check_nodes.py`` tries all faults. The node's slurmd runs
    in a mount namespace of its own, in which a teacher's folder is empty."""
    private_mounts(tmp_path)
    hide = f'mount -t tmpfs tmpfs {world.teachers["right"]} && exec "$@"'
    nodes.restart_node("node2", ["unshare", "--mount", "sh", "-c", hide, "sh"])
    run_dir = tmp_path / "run"
    recipe = world.write_recipe(run_dir, slurm={"nodes": 2, "student_nodes": 2, "gpus_per_node": 0, "time": "10"})
    code, output, errors = ended(command(nodes, "slurm", recipe, "--wait"))
    nodes.restart_node("node2", [])
    assert code == 2, output + errors + job_logs(run_dir)
    (line,) = [line for line in job_logs(run_dir).splitlines() if line.startswith("mopd: error: ")]
    assert line.startswith("mopd: error: node2: ") and "teachers.right.model" in line and "has no config.json" in line
    assert nodes.jobs() == [] and not (run_dir / "metrics.jsonl").exists()


def start_again_at_once(nodes: slurm.Cluster, run_dir: Path) -> None:
    """Slurm keeps a job that was queued again for two minutes."""
    until(lambda: "PENDING" in nodes.run("squeue", "--noheader", f"--jobs={job_id(run_dir)}", "--format=%T"))
    time.sleep(5.0)  # within the same second the nodes would refuse it, as a job that has been ended
    nodes.run("scontrol", "update", f"JobId={job_id(run_dir)}", "StartTime=now", "TimeLimit=10")


@long
def test_each_group_in_a_component_of_its_own(
    nodes: slurm.Cluster, world: World, one_machine: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    keys = {"form": "heterogeneous", "partition": "wide", "student_nodes": 2, "gpus_per_node": 0, "time": "10"}
    code, output, errors = ended(command(nodes, "slurm", world.write_recipe(run_dir, **ON_NODES, slurm=keys), "--wait"))
    assert code == 0, output + errors + job_logs(run_dir)
    assert_trained_as_on_one_machine(run_dir, one_machine)
    assert (run_dir / "logs" / "node3" / "teachers.left.0.log").is_file()
    assert (run_dir / "logs" / "node4" / "teachers.right.0.log").is_file()


@long
@pytest.mark.ray
def test_ray_inside_the_job(nodes: slurm.Cluster, world: World, one_machine: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run_dir = tmp_path / "run"
    engine = {"type": "torch", "dtype": "float32"}
    keys = {**ON_NODES, "teacher_defaults": {"placement": {"type": "ray"}, "engine": engine}}
    recipe = world.write_recipe(run_dir, **keys, slurm={"form": "ray", "nodes": 2, "gpus_per_node": 0, "time": "10"})
    code, output, errors = ended(command(nodes, "slurm", recipe, "--wait"))
    assert code == 0, output + errors + job_logs(run_dir)
    assert_trained_as_on_one_machine(run_dir, one_machine)
    assert {path.parent.name for path in (run_dir / "logs").glob("node?/ray.log")} == {"node1", "node2"}


ALL_ON_RANK_0: dict[str, Any] = {
    **ON_NODES,
    "teacher_defaults": {},
    "schedule__steps": 400,  # a minute: Slurm counts limits in minutes
    "validation__every_steps": 40,
    "checkpoint__every_steps": 20,
}


@pytest.fixture(scope="module")
def uninterrupted(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of four ranks on one machine, engines in rank 0's process."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = mopd("train", world.write_recipe(run_dir, **ALL_ON_RANK_0))
    assert done.returncode == 0, done.stderr
    return run_dir


def lose_a_step(nodes: slurm.Cluster, run_dir: Path) -> None:
    nodes.kill_steps("node2")


def reach_the_limit(nodes: slurm.Cluster, run_dir: Path) -> None:
    nodes.run("scontrol", "update", f"JobId={job_id(run_dir)}", "TimeLimit=1")


@long
@pytest.mark.parametrize("interrupt", [lose_a_step, reach_the_limit])
def test_what_interrupts_a_job_queues_it_again(
    nodes: slurm.Cluster,
    world: World,
    uninterrupted: Path,
    tmp_path: Path,
    interrupt: Callable[[slurm.Cluster, Path], None],
) -> None:
    run_dir = tmp_path / "run"
    recipe = world.write_recipe(
        run_dir, **ALL_ON_RANK_0, slurm={"nodes": 2, "gpus_per_node": 0, "time": "10", "stop_before_s": 30}
    )
    process = command(nodes, "slurm", recipe, "--wait")
    until(lambda: num_steps(run_dir) >= 30)
    interrupt(nodes, run_dir)
    start_again_at_once(nodes, run_dir)
    code, output, errors = ended(process)
    assert code == 0, output + errors + job_logs(run_dir)
    assert "start 2" in output
    assert read_metrics(run_dir) == read_metrics(uninterrupted)
    assert read_validation(run_dir) == read_validation(uninterrupted)


@long
def test_stop_from_another_node(nodes: slurm.Cluster, world: World, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    never = {"checkpoint__every_steps": 1000, "validation__every_steps": 1000}  # which may save a best step, too
    keys = {**ON_NODES, "schedule__steps": 1000, **never}
    recipe = world.write_recipe(
        run_dir, **keys, slurm={"nodes": 2, "gpus_per_node": 0, "time": "10", "stop_before_s": 30}
    )
    process = command(nodes, "slurm", recipe, "--wait")
    until(lambda: num_steps(run_dir) >= 3)
    step = ["srun", f"--jobid={job_id(run_dir)}", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=node2"]
    before = num_steps(run_dir)
    began = time.monotonic()
    nodes.run(*step, sys.executable, "-m", "mopd", "stop", str(run_dir))
    code, output, _ = ended(process)
    took_s = time.monotonic() - began
    print(f"gone {took_s:.1f} s after mopd stop, {num_steps(run_dir) - before} steps later")
    assert code == 75, output + job_logs(run_dir)
    steps = num_steps(run_dir)
    assert [path.name for path in (run_dir / "checkpoints").glob("step_*")] == [f"step_{steps:08d}"]
    assert "start 2" not in output and nodes.jobs() == [] and took_s < 60


@long
def test_replicas_are_started_again_and_go_to_the_spare_node(
    nodes: slurm.Cluster, world: World, tmp_path: Path
) -> None:
    """A teacher is killed three times: twice where it was, then on the spare node. With the fourth time the run has
    lost it, which is no error of the recipe: exit code 69, and back into the queue."""
    run_dir = tmp_path / "run"
    teacher = {"type": "registered", "startup_timeout_s": 60.0}
    keys: dict[str, Any] = {
        **ON_NODES,
        "student__parallel": {"tensor_model_parallel_size": 1},
        "teacher_defaults": {"placement": teacher, "engine": {"type": "torch", "dtype": "float32"}},
        "schedule__steps": 100_000,
        "checkpoint__every_steps": 100_000,
        "validation__every_steps": 100_000,
    }
    job = {"nodes": 2, "spare_nodes": 1, "student_nodes": 1, "gpus_per_node": 4, "time": "30", "setup": [ENROOT]}
    ended(command(nodes, "slurm", world.write_recipe(run_dir, **keys, slurm=job)))
    homes = []
    for _ in range(4):
        before = num_steps(run_dir)
        until(lambda before=before: num_steps(run_dir) > before + 2)  # type: ignore[misc]
        (home,) = replica_pids(run_dir, "teachers.left")
        homes.append(home)
        os.kill(replica_pids(run_dir, "teachers.left")[home], signal.SIGKILL)
        for file in (run_dir / "replicas").glob("teachers.left.*.json"):
            file.unlink()
    assert homes == ["node1", "node1", "node2", "node2"], job_logs(run_dir)
    until(lambda: "exit code 69: back into the queue" in job_logs(run_dir))
    told = job_logs(run_dir)
    assert "teachers.left.0 has ended on node2 with exit code 137, 4 of 4 in a row" in told
    assert "teachers.left.placement.min_replicas: 0 of 1 servers are there after 60 s" in told


@long
def test_a_lost_node_of_replicas_costs_a_spare_one(nodes: slurm.Cluster, world: World, tmp_path: Path) -> None:
    """Four nodes: the rank, each teacher, a spare one. The node of the second teacher dies with its daemon; the run
    goes on to its end, in the same job."""
    run_dir = tmp_path / "run"
    keys: dict[str, Any] = {
        **ON_NODES,
        "student__parallel": {"tensor_model_parallel_size": 1},
        "schedule__steps": 150,
        "checkpoint__every_steps": 150,
        "validation__every_steps": 150,
        "slurm": {"partition": "wide", "nodes": 4, "spare_nodes": 1, "gpus_per_node": 1, "time": "30"},
    }
    process = command(nodes, "slurm", world.write_recipe(run_dir, **keys), "--wait")
    until(lambda: num_steps(run_dir) > 3)
    nodes.stop_node("node3")
    nodes.kill_steps("node3")
    code, output, errors = ended(process)
    nodes.start_node("node3")
    assert code == 0, output + errors + job_logs(run_dir)
    assert (run_dir / "logs" / "node4" / "teachers.right.0.log").is_file() and "start 2" not in output
