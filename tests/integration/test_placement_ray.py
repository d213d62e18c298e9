"""Replicas as servers of Ray actors, on a cluster of this machine that lives as long as the groups."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from mopd.base.types import UserError
from mopd.cli.main import main
from mopd.engines.interface import ToDraw, ToScore
from mopd.launch.failure import STOPPED_CODE
from mopd.placement.groups import plan_groups
from mopd.placement.interface import ROLLOUT
from mopd.placement.ray.agent import Agent
from mopd.placement.ray.cluster import RayCluster
from tests.integration.groups import (
    LEFT,
    RIGHT,
    ROUTING,
    SAMPLING,
    Student,
    assert_same_scores,
    is_alive,
    make_recipe,
    make_samples,
    pid_of,
    run,
    score_here,
    server_group,
    started,
    until,
)
from tests.integration.ray_nodes import remove
from tests.integration.world import World, start_mopd, write_prompts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multirank,
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

RAY = {"type": "ray", "startup_timeout_s": 300.0}


@pytest.mark.long
def test_replicas_on_ray(models: World, tmp_path: Path) -> None:
    """Scores, weights, an interpreter by another name, a killed server, a lost agent, and nothing left behind."""
    python = str(Path(sys.executable).with_name(f"python3.{sys.version_info.minor}"))
    recipe = make_recipe(
        models,
        tmp_path,
        teacher_defaults={"placement": RAY, "replicas": 2},
        rollout={"max_response_length": 4, "placement": {**RAY, "python": python}, "routing": ROUTING},
    )
    samples = make_samples(24)
    expected = score_here(models.teachers["left"], *samples, top_k=8)

    async def work() -> None:
        student = Student(models.student)
        async with started(recipe, tmp_path / "logs", [LEFT, ROLLOUT], student) as (groups, routers):
            placement = server_group(groups, LEFT)
            assert_same_scores(await routers[LEFT].score(ToScore(*samples, top_k=8, temperature=1.0)), expected)
            await student.publish(1)
            await routers[ROLLOUT].generate(ToDraw([[3, 4, 5]], SAMPLING, [1]))
            tables = ray().util.placement_group_table()
            rooms = [table for table in tables.values() if table["state"] == "CREATED"]
            assert sorted(len(room["bundles"]) for room in rooms) == [1, 2]

            os.kill(pid_of(groups, LEFT, 0), signal.SIGKILL)
            agent = parent_of(parent_of(pid_of(groups, LEFT, 1)))  # server, reaper, agent
            orphan = pid_of(groups, LEFT, 1)
            os.kill(agent, signal.SIGKILL)
            assert_same_scores(await routers[LEFT].score(ToScore(*samples, top_k=8, temperature=1.0)), expected)
            await until(lambda: placement.restarts == [1, 1] and None not in placement.pids, timeout_s=200.0)
            assert not is_alive(orphan)
            assert_same_scores(await routers[LEFT].score(ToScore(*samples, top_k=8, temperature=1.0)), expected)
            assert psutil.Process(pid_of(groups, ROLLOUT, 0)).cmdline()[0] == python
            pids = [pid_of(groups, LEFT, 0), pid_of(groups, LEFT, 1), pid_of(groups, ROLLOUT, 0)]
        assert not any(is_alive(pid) for pid in pids)
        assert not ray().is_initialized()

    run(work(), timeout_s=400.0)
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "teachers.left.0.log",
        "teachers.left.1.log",
        "rollout.0.log",
    }


@dataclass(frozen=True, kw_only=True)
class TwoNodes:
    """A cluster of two nodes of 3 CPUs each that others run."""

    cluster: Any
    node: Any
    """The one without Ray's head."""
    folder: Path
    """Its processes' folder for temporary files."""

    @property
    def placement(self) -> dict[str, Any]:
        """A replica that fills a node."""
        return {**RAY, "address": self.cluster.address, "num_cpus": 3}


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    """One for all tests below, the last of which breaks it."""
    from ray.cluster_utils import Cluster

    folder = Path(tempfile.mkdtemp(prefix="m-"))  # pytest's own folders are too long for Ray's sockets
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr("tempfile.tempdir", None)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
        try:
            yield TwoNodes(cluster=cluster, node=cluster.add_node(num_cpus=3), folder=folder)
        finally:
            cluster.shutdown()
            remove(folder)


def test_a_replica_lies_on_one_node_of_a_cluster_that_others_run(
    models: World, two_nodes: TwoNodes, tmp_path: Path
) -> None:
    """Two replicas of 3 CPUs fit, and GPUs are missing. The cluster stays."""
    placement = two_nodes.placement
    recipe = make_recipe(models, tmp_path, teacher_defaults={"placement": placement, "replicas": 2})
    samples = make_samples(24)
    expected = score_here(models.teachers["left"], *samples, top_k=8)

    async def work() -> None:
        async with started(recipe, tmp_path / "logs", [LEFT]) as (_, routers):
            assert_same_scores(await routers[LEFT].score(ToScore(*samples, top_k=8, temperature=1.0)), expected)
            tables = ray().util.placement_group_table().values()
            (room,) = [table for table in tables if table["state"] == "CREATED"]
            assert len(set(room["bundles_to_node_id"].values())) == 2
        on_gpus = {"placement": {**RAY, "address": placement["address"], "num_gpus": 2}, "replicas": 3}
        many = make_recipe(models, tmp_path, teacher_defaults=on_gpus)
        with pytest.raises(UserError, match=r"teachers\.left: .* 3 replicas of 2 GPUs .* 12 GPUs are missing"):
            async with started(many, None, [LEFT, RIGHT]):
                pass
        assert not ray().is_initialized()

    run(work(), timeout_s=400.0)
    assert len(two_nodes.cluster.list_all_nodes()) == 2


def test_a_stop_before_agents_have_begun(models: World, two_nodes: TwoNodes, tmp_path: Path) -> None:
    """They would answer once there is room for them: nobody waits for one after another, and nothing is raised."""
    placement = {**RAY, "address": two_nodes.cluster.address}
    recipe = make_recipe(
        models, tmp_path, rollout={"max_response_length": 4, "placement": placement, "routing": ROUTING}
    )

    async def work() -> None:
        cluster = await RayCluster.open([plan_groups(recipe)[ROLLOUT]], log_dir=tmp_path / "logs", gpus=())
        never = ray().remote(Agent).options(num_cpus=10_000)
        cluster._agents |= {(f"never {i}", 0): never.remote(str(tmp_path)) for i in range(10)}
        await asyncio.wait_for(cluster.close(), 40.0)
        assert not ray().is_initialized()

    run(work(), timeout_s=200.0)


@pytest.mark.long
def test_a_node_that_falls_silent_is_named_and_costs_seconds(
    models: World,
    two_nodes: TwoNodes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its agent and its raylet are stopped, as by a lost network: the groups end although it never answers, and once
    Ray has ended it nothing is left of it, neither folder nor server."""
    monkeypatch.setattr("mopd.placement.ray.cluster.CALL_TIMEOUT_S", 1000.0)  # longer than this test may take
    monkeypatch.setattr("mopd.placement.ray.cluster.LAST_CALL_TIMEOUT_S", 1.0)
    node = two_nodes.node
    recipe = make_recipe(models, tmp_path, teacher_defaults={"placement": two_nodes.placement, "replicas": 2})

    async def work() -> list[int]:
        async with started(recipe, tmp_path / "logs", [LEFT]) as (groups, _):
            pids = [pid_of(groups, LEFT, index) for index in range(2)]
            raylets = [process.process.pid for process in node.all_processes["raylet"]]
            agents = [parent_of(parent_of(pid)) for pid in pids]
            stopped = [*raylets, *(agent for agent in agents if parent_of(agent) in raylets)]
            assert len(stopped) == 2 and list(two_nodes.folder.glob("mopd-*"))
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        return pids

    pids = run(work(), timeout_s=400.0)
    assert f"node {node.node_ip_address} was lost: its agent did not answer" in caplog.text
    two_nodes.cluster.remove_node(node, allow_graceful=False)
    run(until(lambda: not any(is_alive(pid) for pid in pids) and not list(two_nodes.folder.glob("mopd-*"))))


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return int(stat.rsplit(")", 1)[1].split()[1])


def ray() -> Any:
    import ray as package
    import ray.util

    return package


@pytest.mark.long
def test_a_run_that_is_stopped_before_its_first_step(models: World, tmp_path: Path) -> None:
    """While servers of Ray's agents are there and one that nobody has registered is waited for: a line, no traceback
    of anybody, and nothing left behind."""
    run_dir = tmp_path / "run"
    write_prompts(tmp_path / "train.parquet", num_rows=8, start=0)
    recipe = models.write_recipe(
        run_dir,
        teachers__left__placement={"type": "registered", "startup_timeout_s": 3600.0},
        teachers__right__placement=RAY,
        rollout__placement=RAY,
        student__parallel={},
        data__train=[str(tmp_path / "train.parquet")],
        data__validation=[str(tmp_path / "train.parquet")],
    )
    process = start_mopd("train", recipe)
    try:
        deadline = time.monotonic() + 300
        while len([*run_dir.glob("logs/*/rollout.0.log"), *run_dir.glob("logs/*/teachers.right.0.log")]) < 2:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "no server was started on Ray"
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        assert main(["stop", str(run_dir)]) == 0
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == STOPPED_CODE, errors
    assert "Traceback" not in errors, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("mopd: ")]
    assert line.startswith("mopd: stopped before a step was trained, as mopd stop (")
    assert not psutil.wait_procs(family, timeout=60)[1]
