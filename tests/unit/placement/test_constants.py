"""Weights that no step changes, on their way to rollout replicas: sent once, and again to whoever lacks them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mopd.base.types import UserError
from mopd.config.groups import RoutingConfig, TorchEngineConfig
from mopd.config.load import load_recipe
from mopd.config.student import Freeze
from mopd.conversion.models.reading import read_dims
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import EngineRejected, OnRunning
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.weights import StagedConstants, stage_updates
from mopd.orchestrator.student import StudentGroup
from mopd.placement.weights import GroupWeightSync
from mopd.student.vision import constant_names
from tests.fixtures.linked import linked_ranks
from tests.fixtures.recipe import RECIPE
from tests.fixtures.seen import prompts_with_images
from tests.fixtures.servers import RunningServer, running_server
from tests.fixtures.staged import stage_constants
from tests.fixtures.vision import make_vision_model

CONFIG = TorchEngineConfig(dtype="float32")
HEADS = 40 * 1024
"""Bytes of all messages of an update beside its tensors; every block of a tower has more."""


class Student:
    """Weights of which those that ``freeze`` leaves alone never change, as ``StudentGroup`` gives them."""

    def __init__(self, folder: Path, freeze: Freeze) -> None:
        self.folder = folder
        self.weights = load_file(folder / "model.safetensors")
        self.names = constant_names(read_dims(folder), freeze)
        self.staged = stage_constants((name, self.weights[name]) for name in sorted(self.names))

    @property
    def constants(self) -> StagedConstants:
        assert self.staged is not None
        return self.staged

    @property
    def trained(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.weights.items() if name not in self.names}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    @property
    def num_trained_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.trained.values())

    def step(self) -> None:
        """Only what is trained moves."""
        self.weights |= {name: tensor * 0.9 for name, tensor in self.trained.items()}


class Group:
    """Rollout servers behind a router, with what each was sent by the last push."""

    def __init__(self, servers: list[RunningServer], on_running: OnRunning = "finish") -> None:
        self.engines = [RemoteEngine(server.url, timeout_s=30.0, name=f"r{i}") for i, server in enumerate(servers)]
        members = [Replica(name=engine.name, engine=engine) for engine in self.engines]
        self.router = Router("rollout", members, RoutingConfig(), kind="rollout")
        self.sync = GroupWeightSync(self.router, on_running=on_running)

    async def send(self, weights: dict[str, Tensor], version: int, constants: StagedConstants | None) -> list[int]:
        """Bytes that each engine was sent."""
        return await self.sent(lambda: self.sync.send(stage_updates(weights.items(), version, constants=constants)))

    async def sent(self, work: Callable[[], Awaitable[Any]]) -> list[int]:
        before = [engine.bytes_sent for engine in self.engines]
        await work()
        return [engine.bytes_sent - old for engine, old in zip(self.engines, before, strict=True)]

    async def come_back(self, server: RunningServer) -> RemoteEngine:
        """The first replica, started anew."""
        await self.engines[0].close()
        self.engines[0] = RemoteEngine(server.url, timeout_s=30.0, name="r0")
        self.router.replace("r0", self.engines[0])
        return self.engines[0]

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()
        await self.router.close()


def run(servers: list[RunningServer], action: Callable[[Group], Awaitable[None]], **group: Any) -> None:
    async def work() -> None:
        own = Group(servers, **group)
        try:
            await action(own)
        finally:
            await own.close()

    asyncio.run(work())


async def assert_sees(engine: RemoteEngine | TorchEngine, student: Student) -> None:
    """Scores of prompts with images are those of an engine that was given all weights of the moment."""
    prompts, images = prompts_with_images(student.folder)
    tokens, starts = [torch.tensor([*prompt, 7, 8, 9]) for prompt in prompts], [len(prompt) for prompt in prompts]
    full = TorchEngine.empty(student.folder, CONFIG)
    await full.load_weights(student.weights.items(), 0)
    theirs, ours = [await one.score(tokens, starts, top_k=4, temperature=1.0, images=images) for one in (engine, full)]
    assert all(torch.equal(one.logprobs, other.logprobs) for one, other in zip(theirs, ours, strict=True))


def empty(stack: ExitStack, folder: Path) -> RunningServer:
    return stack.enter_context(running_server(TorchEngine.empty(folder, CONFIG), "rollout"))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(("family", "on_running"), [("qwen2_5_vl", "continue"), ("qwen3_vl", "finish")])
def test_a_frozen_tower_is_sent_once_to_each_server(family: str, on_running: OnRunning, tmp_path: Path) -> None:
    """And to one that was started anew, by a repair or by the next update."""
    folder = make_vision_model(tmp_path, family)
    student = Student(folder, "tower")
    tower = student.num_bytes - student.num_trained_bytes
    assert tower > 3 * HEADS

    async def work(group: Group) -> None:
        for engine, sent in zip(group.engines, await group.send(student.trained, 1, student.constants), strict=True):
            assert student.num_bytes < sent < student.num_bytes + HEADS
            await assert_sees(engine, student)
        for version in (2, 3):
            student.step()
            for sent in await group.send(student.trained, version, student.constants):
                assert student.num_trained_bytes < sent < student.num_trained_bytes + HEADS
        for engine in group.engines:
            await assert_sees(engine, student)
        fresh = await group.come_back(empty(stack, folder))
        sent, rest = await group.sent(group.sync.send_again)
        assert student.num_bytes < sent < student.num_bytes + HEADS and rest == 0
        await assert_sees(fresh, student)
        await group.come_back(empty(stack, folder))
        student.step()
        first, second = await group.send(student.trained, 4, student.constants)
        assert first > student.num_bytes and second < student.num_trained_bytes + HEADS
        for engine in group.engines:
            await assert_sees(engine, student)

    with ExitStack() as stack:
        run([empty(stack, folder) for _ in range(2)], work, on_running=on_running)


def test_what_is_trained_is_always_sent(one: Path) -> None:
    """A tower that is not frozen; also to a server that holds constants, and a sender with others replaces them."""
    student, other = Student(one, "tower"), Student(one, "tower_and_merger")
    assert Student(one, "none").names == frozenset()

    async def work(group: Group) -> None:
        await group.send(student.trained, 1, student.constants)
        for version in (2, 3):
            student.weights = {name: tensor * 0.9 for name, tensor in student.weights.items()}
            (sent,) = await group.send(student.weights, version, None)
            assert sent > student.num_bytes
            await assert_sees(group.engines[0], student)
        for version, sender in enumerate((other, student, other), 4):
            sender.weights = load_file(one / "model.safetensors")
            (sent,) = await group.send(sender.trained, version, sender.constants)
            assert sent > sender.num_bytes
        await assert_sees(group.engines[0], other)

    with ExitStack() as stack:
        run([empty(stack, one)], work)


def test_a_failed_update(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is refused changes nothing: constants are kept. One that fails half way leaves a server that asks for
    everything."""
    student = Student(one, "tower")
    name = max(student.trained)

    async def work(group: Group) -> None:
        (engine,) = group.engines
        await group.send(student.trained, 1, student.constants)
        broken = student.trained | {name: student.weights[name] * float("nan")}
        with pytest.raises(UserError, match=r"^weights 2 of the student were refused: .* has .* NaN"):
            await group.send(broken, 2, student.constants)
        with pytest.raises(UserError, match=r"1 weights .* did not arrive"):
            await group.send({n: t for n, t in student.trained.items() if n != name}, 2, student.constants)
        with pytest.raises(UserError, match="arrives though it is a constant"):
            await group.send(student.weights, 2, student.constants)
        await assert_sees(engine, student)
        (sent,) = await group.send(student.trained, 3, student.constants)
        assert sent < student.num_trained_bytes + HEADS
        with monkeypatch.context() as patched:
            patched.setattr(server.engine._eyes, "forget", lambda: 1 / 0)
            await group.send(student.trained, 4, student.constants)
        assert engine.weight_version == 3 and (await engine.info()).weight_version == -1
        (sent,) = await group.sent(group.sync.send_again)
        assert sent > student.num_bytes
        await assert_sees(engine, student)

    with ExitStack() as stack:
        server = empty(stack, one)
        run([server], work)


def test_constants_that_the_model_lacks(one: Path) -> None:
    async def work(group: Group) -> None:
        foreign = stage_constants([("visual.none.weight", torch.zeros(2))])
        with pytest.raises(UserError, match=r"'visual\.none\.weight' does not exist"):
            await group.send(student.weights, 1, foreign)
        with pytest.raises(EngineRejected, match="did not arrive"):
            await group.engines[0].load_weights(student.trained.items(), 1)

    student = Student(one, "tower")
    with ExitStack() as stack:
        run([empty(stack, one)], work)


def test_an_engine_of_this_process_keeps_what_it_has(one: Path) -> None:
    student = Student(one, "tower")
    engine = TorchEngine.empty(one, CONFIG)

    async def work() -> None:
        router = Router("rollout", [Replica(name="r0", engine=engine)], RoutingConfig(), kind="rollout")
        sync = GroupWeightSync(router)
        await sync.send(stage_updates(student.trained.items(), 1, constants=student.constants))
        student.step()
        await sync.send(stage_updates(student.trained.items(), 2, constants=student.constants))
        with pytest.raises(ValueError, match="arrives though it is a constant kept"):
            await sync.send(stage_updates(student.weights.items(), 3, constants=student.constants))
        await router.close()

    asyncio.run(work())
    slots = engine.weight_slots
    assert engine.weight_version == 2 and slots.keys() == student.weights.keys()
    assert all(torch.equal(slots[name], tensor) for name, tensor in student.weights.items())


class Worker:
    """What a rank asks of the student."""

    layout = SimpleNamespace(device=torch.device("cpu"))
    recipe = SimpleNamespace(schedule=SimpleNamespace(wait_timeout_s=30.0))
    weight_version = 0

    def __init__(self, student: Student) -> None:
        self.student, self.constants = student, student.names
        self.read: list[str] = []

    def weights(self, part: str) -> Iterator[tuple[str, Tensor]]:
        self.read.append(part)
        for name, tensor in self.student.weights.items():
            if part == "all" or (name in self.constants) == (part == "constants"):
                yield name, tensor

    def load(self, folder: Path) -> dict[str, Any]:
        """A checkpoint whose tower is another."""
        self.student.weights = load_file(folder / "model.safetensors")
        return {}


@pytest.mark.parametrize("is_served", [False, True])
def test_a_student_reads_its_constants_once_and_again_after_a_checkpoint(
    one: Path, is_served: bool, tmp_path: Path
) -> None:
    student, other = Student(one, "tower"), make_vision_model(tmp_path / "other", seed=1)
    worker = Worker(student)
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(RECIPE)
    recipe = load_recipe(recipe_file, [f"student.model={one}"]).recipe
    facts = {"is_on_gpu": False, "has_constants": True, "announced": None}

    async def work(stack: ExitStack) -> None:
        engine: Any = TorchEngine.empty(one, CONFIG)
        if is_served:
            engine = RemoteEngine(empty(stack, one).url, timeout_s=30.0, name="r0")
        router = Router("rollout", [Replica(name="r0", engine=engine)], RoutingConfig(), kind="rollout")
        async with linked_ranks(worker) as ranks:
            group = StudentGroup(recipe, ranks, facts, GroupWeightSync(router))
            for version, expected in enumerate((["constants", "trained"], ["trained"], ["trained"]), 1):
                await group.publish(version)
                assert worker.read == expected
                await assert_sees(engine, student)
                student.step()
                worker.read.clear()
            await group.load(other)
            await group.publish(4)
            assert worker.read == ["constants", "trained"]
            await assert_sees(engine, student)
            await group.close()
        await router.close()
        if is_served:
            await engine.close()

    with ExitStack() as stack:
        asyncio.run(work(stack))
