"""Replicas that give their memory to the student, against real servers: what one that does not follow costs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mopd.base.types import UserError
from mopd.config.groups import RoutingConfig, TorchEngineConfig
from mopd.config.load import load_recipe
from mopd.config.weights import IpcConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import EngineUnavailable, Generation, SamplingParams, ToDraw
from mopd.engines.replicas.router import Router
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.weights.sync import GroupWeightSync
from mopd.placement import server_group
from mopd.placement.groups import plan_groups
from mopd.placement.process import ServerState
from mopd.placement.server_group import ServerGroup
from mopd.placement.sharing.rollout import RolloutMemory, TurnsGenerator
from mopd.placement.sharing.turns import GpuTurns
from tests.fixtures.linked import Sending
from tests.fixtures.recipe import RECIPE
from tests.fixtures.servers import RunningServer, running_server
from tests.fixtures.tiny_models import make_hf_model
from tests.unit.placement.launched import Launched

SAMPLING = SamplingParams(max_new_tokens=4)
SHARED = (
    "rollout={replicas: 2, engine: {type: torch, dtype: float32}, placement: {type: local, share_gpus_with: student}}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def source(folder: Path) -> TorchEngine:
    return TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))


@pytest.fixture
def servers(folder: Path) -> Iterator[list[RunningServer]]:
    with contextlib.ExitStack() as stack:
        engines = [TorchEngine.empty(folder, TorchEngineConfig(dtype="float32")) for _ in range(2)]
        yield [stack.enter_context(running_server(engine, "rollout")) for engine in engines]


class Process:
    """A server in a thread of this process, which ends when it is told to, unless it is stuck."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.exit_code: int | None = None
        self.is_stuck = False

    async def state(self) -> ServerState:
        return ServerState(url=self.url, pid=1, exit_code=self.exit_code)

    async def last_words(self) -> str:
        return "told to"

    async def terminate(self) -> None:
        self.exit_code = 0

    async def kill(self) -> None:
        self.exit_code = None if self.is_stuck else -9


class Shared:
    """Two rollout replicas in their group, with weights."""

    def __init__(self, servers: list[RunningServer], source: TorchEngine, tmp_path: Path) -> None:
        recipe_file = tmp_path / "recipe.yaml"
        recipe_file.write_text(RECIPE)
        parallel = "student.parallel.tensor_model_parallel_size=2"
        settings = [f"student.model={source.name}", "teachers.math.placement={type: local}", parallel, SHARED]
        self.processes = [Process(server.url) for server in servers]
        self.recipe = load_recipe(recipe_file, settings).recipe
        plan = plan_groups(self.recipe, ["rollout"])["rollout"]
        self.memory = RolloutMemory()
        self.memory.group = self.group = ServerGroup(plan, Launched(self.processes))

    async def start(self, source: TorchEngine) -> None:
        self.router = Router("rollout", await self.group.start(), RoutingConfig(), kind="rollout")
        self.memory.weights = self.sync = GroupWeightSync(self.router)
        await self.sync.publish(source.model.named_parameters(), 1)

    async def start_by_ipc(self, student: Student) -> GpuTurns:
        """Weights come from the student's own memory; the turns are real, the student lends nothing."""
        self.router = Router("rollout", await self.group.start(), RoutingConfig(), kind="rollout")
        recipe = replace(self.recipe, weight_sync=IpcConfig(type="ipc", bucket_mib=1, timeout_s=5.0))
        sending = Sending(student.weights)
        ranks: Any = SimpleNamespace(ask=sending.ask, turn=asyncio.Lock())
        self.memory.weights = self.sync = GroupWeightSync(self.router)
        self.sync.attach(ranks, recipe, sending.announced, takes_turns=True, newest=lambda: student.version)
        turns = GpuTurns(Lender(), self.memory)
        self.sync.kept_awake = lambda: turns.kept_awake("rollout")
        return turns

    async def close(self) -> None:
        await self.sync.close()
        for process in self.processes:
            process.is_stuck = False
        await self.router.close()
        await self.group.close()


class Student:
    """Weights, and how many steps they have seen."""

    def __init__(self, source: TorchEngine) -> None:
        self.weights = {name: slot.detach().clone() for name, slot in source.weight_slots.items()}
        self.version = 0

    def step(self) -> None:
        self.version += 1
        for tensor in self.weights.values():
            tensor.mul_(0.9)


def weights_of(server: RunningServer) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in server.engine.model.parameters())


def test_replicas_wake_with_the_weights_that_were_sent_last(
    servers: list[RunningServer], source: TorchEngine, tmp_path: Path
) -> None:
    async def work() -> None:
        shared = Shared(servers, source, tmp_path)
        await shared.start(source)
        before = await shared.router.generate(ToDraw([[5, 6, 7]], SAMPLING, [1]))
        for _ in range(2):
            await shared.memory.give_back()
            assert [weights_of(server) for server in servers] == [0, 0]
            assert await shared.sync.send_again() == ()  # nobody is repaired while all sleep
            await shared.memory.take()
            after = await shared.router.generate(ToDraw([[5, 6, 7]], SAMPLING, [1]))
            assert after[0].tokens.tolist() == before[0].tokens.tolist()
        await shared.close()

    asyncio.run(work())


@pytest.mark.parametrize("is_lost", [False, True])
def test_replicas_wake_with_the_weights_that_the_student_has(
    servers: list[RunningServer], source: TorchEngine, tmp_path: Path, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one is lost while they come: it is ended, the other one answers with them."""

    async def work() -> None:
        shared, student = Shared(servers, source, tmp_path), Student(source)
        turns = await shared.start_by_ipc(student)
        for version in range(1, 4):
            await turns.begin("student")
            assert version == 1 or [weights_of(server) for server in servers] == [0, 0]
            student.step()
            turns.end("student")
            if is_lost and version == 3:
                monkeypatch.setattr(shared.group.engines[0], "post", lost)
            await shared.sync.stage(version)
            await shared.sync.send_staged()
            (response,) = await shared.router.generate(ToDraw([[5, 6, 7]], SAMPLING, [1]))
            assert set(response.token_versions.tolist()) == {version}
            for server in servers[is_lost and version == 3 :]:
                slots = server.engine.weight_slots
                assert all(torch.equal(slots[name], tensor) for name, tensor in student.weights.items())
        codes = [process.exit_code for process in shared.processes]
        assert codes == ([-9, None] if is_lost else [None, None])
        await shared.close()

    async def lost(*_: object, **__: object) -> None:
        raise EngineUnavailable("connection reset")

    asyncio.run(work())


@pytest.mark.parametrize("fails_at", ["sleep", "weights", "post", "cache"])
def test_a_replica_that_does_not_follow_is_ended(
    servers: list[RunningServer],
    source: TorchEngine,
    tmp_path: Path,
    fails_at: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At each step of the cycle; the other one answers."""

    async def work() -> None:
        shared = Shared(servers, source, tmp_path)
        await shared.start(source)
        broken = shared.group.engines[0]
        assert isinstance(broken, RemoteEngine)

        async def lost(*_: object, **options: object) -> None:
            if fails_at == "cache" and options.get("weights_only"):
                return await RemoteEngine.wake_up(broken, weights_only=True)
            raise EngineUnavailable("connection reset")

        monkeypatch.setattr(broken, fails_at if fails_at in ("sleep", "post") else "wake_up", lost)
        await shared.memory.give_back()
        await shared.memory.take()
        assert [process.exit_code for process in shared.processes] == [-9, None]
        assert "is ended" in caplog.text
        other = shared.group.engines[1]
        (response,) = await other.generate(ToDraw([[5, 6, 7]], SAMPLING, [1]))
        assert response.token_versions.tolist()[0] == 1
        await shared.close()

    asyncio.run(work())


def test_one_that_does_not_end_either_ends_the_run(
    servers: list[RunningServer], source: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_group, "KILL_WAIT_S", 0.05)

    async def work() -> None:
        shared = Shared(servers, source, tmp_path)
        await shared.start(source)
        shared.processes[1].is_stuck = True

        async def lost() -> None:
            raise EngineUnavailable("connection reset")

        monkeypatch.setattr(shared.group.engines[1], "sleep", lost)
        with pytest.raises(UserError, match=r"rollout.1 does not sleep \(connection reset\), and does not end either"):
            await shared.memory.give_back()
        await shared.close()

    asyncio.run(work())


def test_drawing_stops_where_the_student_is_to_save(
    servers: list[RunningServer], source: TorchEngine, tmp_path: Path
) -> None:
    """A request to stop does not wait for long responses, and nothing is drawn after it."""

    async def work() -> None:
        shared = Shared(servers, source, tmp_path)
        await shared.start(source)
        turns = GpuTurns(Lender(), shared.memory)
        generator = TurnsGenerator(shared.router, lambda: turns.kept_awake("rollout"))
        never = asyncio.Event()

        class Endless:
            weight_version = 1

            async def generate(self, *_: object, **__: object) -> list[Generation]:
                await never.wait()
                raise AssertionError

        endless = TurnsGenerator(Endless(), lambda: turns.kept_awake("rollout"))
        assert len(await generator.generate(ToDraw([[5, 6, 7]], SAMPLING, [1]))) == 1
        drawing = asyncio.create_task(endless.generate(ToDraw([[5, 6, 7]], SAMPLING, [1])))
        await asyncio.sleep(0.05)
        saving = asyncio.create_task(turns.begin("student"))
        await asyncio.sleep(0.05)
        assert not saving.done()
        endless.stop()
        with pytest.raises(UserError, match="nothing more is drawn"):
            await drawing
        await asyncio.wait_for(saving, 30.0)
        turns.end("student")
        with pytest.raises(UserError, match="nothing more is drawn"):
            await endless.generate(ToDraw([[5, 6, 7]], SAMPLING, [1]))
        await shared.close()

    asyncio.run(work())


class Lender:
    """The student's side, which holds nothing."""

    async def give_back(self) -> None:
        """At once."""

    async def take(self) -> None:
        """At once."""
