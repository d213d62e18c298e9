"""Groups that are closed while something of theirs still starts, or fails to end: once, and without a word too many."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from mopd.config.load import load_recipe
from mopd.config.schema import Recipe
from mopd.placement.groups import Groups, plan_groups
from mopd.placement.interface import ROLLOUT
from mopd.placement.process import ServerState
from mopd.placement.ray.cluster import RayCluster
from mopd.placement.server_group import ServerGroup
from tests.fixtures.recipe import RECIPE
from tests.fixtures.tiny_models import make_hf_model
from tests.unit.placement.launched import Launched

DEADLINE_S = 120.0
LOCAL = [
    f"{group}={{engine: {{type: torch, dtype: float32}}, placement: {{type: local}}}}"
    for group in ("teacher_defaults", "rollout")
]


class SlowToDie:
    """A server that never answers; SIGTERM ends it at once, and whoever sends SIGKILL has to wait for ``may_die``."""

    def __init__(self) -> None:
        self.is_asked, self.is_killed, self.may_die = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.exit_code: int | None = None

    async def state(self) -> ServerState:
        self.is_asked.set()
        return ServerState(url=None, pid=None, exit_code=self.exit_code)

    async def last_words(self) -> str:
        return ""

    async def terminate(self) -> None:
        self.exit_code = 0

    async def kill(self) -> None:
        self.is_killed.set()
        await self.may_die.wait()


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    models = [f"{key}={make_hf_model(tmp_path / 'model')}" for key in ("student.model", "teachers.math.model")]
    return load_recipe(path, [*LOCAL, *models]).recipe


def test_a_start_that_is_cancelled_twice(recipe: Recipe) -> None:
    """As by a stop and then by the end of the loop: whoever ends the server goes on alone, and the group has forgotten
    it by then."""
    plan = plan_groups(recipe, [ROLLOUT])[ROLLOUT]

    async def work() -> None:
        before, server = asyncio.all_tasks(), SlowToDie()
        group = ServerGroup(plan, Launched([server]))
        life = asyncio.create_task(group._bring_up(0))
        await server.is_asked.wait()
        life.cancel()
        await server.is_killed.wait()
        life.cancel()
        with pytest.raises(asyncio.CancelledError):
            await life
        (ending,) = asyncio.all_tasks() - before
        await group.close()
        server.may_die.set()
        await ending

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


class Lost(RayCluster):
    """A cluster whose end fails, as of one that is gone."""

    def __init__(self) -> None:
        self.closes = 0

    async def close(self) -> None:
        self.closes += 1
        raise ConnectionError("the cluster is gone")


def test_a_cluster_that_does_not_end_is_ended_once(recipe: Recipe) -> None:
    """Its error is told, and the folder of the logs goes all the same."""

    async def work() -> None:
        groups = Groups(recipe, log_dir=None, device=torch.device("cpu"), only=())
        await groups.start()
        assert groups._log_dir is not None and groups._log_dir.is_dir()
        groups._cluster = cluster = Lost()
        with pytest.raises(ConnectionError, match="the cluster is gone"):
            await groups.close()
        await groups.close()
        assert cluster.closes == 1 and not groups._log_dir.exists()

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
