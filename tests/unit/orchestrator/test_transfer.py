"""Weights over a process group to real engine servers, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from mopd.base.types import NonFiniteError, UserError
from mopd.config.groups import RoutingConfig, TorchEngineConfig
from mopd.config.weights import BucketsConfig, CollectiveConfig, IpcConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import SamplingParams, StaleWeights
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.engines.replicas.transfer import TransferTargets
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.transfer import Transfer
from mopd.weights.group import TransferGroup
from tests.fixtures.linked import Sending
from tests.fixtures.servers import RunningServer, running_server
from tests.fixtures.tiny_models import make_hf_model

CONFIG = TorchEngineConfig(dtype="float32")
SAMPLING = SamplingParams(max_new_tokens=4)
DEADLINE_S = 600.0
COLLECTIVE = CollectiveConfig(type="collective", bucket_mib=1, timeout_s=DEADLINE_S)
IPC = IpcConfig(type="ipc", bucket_mib=1, timeout_s=DEADLINE_S)
IMPATIENT = CollectiveConfig(type="collective", bucket_mib=1, timeout_s=10.0)
"""Way with a short deadline, for tests in which a member waits for another that has gone."""
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    engine = TorchEngine.from_pretrained(folder, CONFIG)
    return {name: slot.detach().clone() for name, slot in engine.weight_slots.items()}


@pytest.fixture
def servers(folder: Path) -> Iterator[list[RunningServer]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running_server(TorchEngine.empty(folder, CONFIG), "rollout")) for _ in range(2)]


class Sender:
    """The orchestrator between a rank with ``weights`` and the replicas of some servers."""

    def __init__(self, servers: list[RunningServer], weights: Weights, way: BucketsConfig) -> None:
        self.engines = [RemoteEngine(s.url, timeout_s=30.0, name=f"r{i}") for i, s in enumerate(servers)]
        members = [Replica(name=engine.name, engine=engine) for engine in self.engines]
        self.router = Router("rollout", members, RoutingConfig(), kind="rollout")
        self.targets = TransferTargets(self.router, num_workers=1, on_running="finish", drain_s=30.0)
        self.student = Sending(weights)
        self.transfer = Transfer(self.targets, way, self.student.ask, num_workers=1, tensors=self.student.tensors)

    async def publish(self, weights: Weights, version: int, *, only_missing: bool = False) -> None:
        self.student.own = weights
        await self.transfer.publish(version, only_missing=only_missing)

    async def close(self) -> None:
        await self.transfer.close()
        await self.router.close()
        for engine in self.engines:
            await engine.close()


Action = Callable[[Sender], Awaitable[None]]


def run(servers: list[RunningServer], weights: Weights, action: Action, way: BucketsConfig = COLLECTIVE) -> None:
    async def work() -> None:
        sender = Sender(servers, weights, way)
        try:
            await asyncio.wait_for(action(sender), 500)
        finally:
            await sender.close()

    asyncio.run(work())


def holds(server: RunningServer, weights: Weights) -> bool:
    return all(torch.equal(slot, weights[name]) for name, slot in server.engine.weight_slots.items())


@pytest.mark.parametrize("way", [COLLECTIVE, IPC])
def test_every_replica_gets_every_bit_and_the_version(
    servers: list[RunningServer], weights: Weights, way: BucketsConfig
) -> None:
    newer = {name: tensor * 1.5 for name, tensor in weights.items()}

    async def action(sender: Sender) -> None:
        for version, sent in enumerate([weights, newer, weights]):
            await sender.publish(sent, version)
            assert all(holds(server, sent) for server in servers)
            (generation,) = await sender.router.generate([[3, 4, 5]], SAMPLING, [1])
            assert set(generation.token_versions.tolist()) == {version}
        assert sender.transfer.take_numbers()["timing/weights_update_s"] > 0

    run(servers, weights, action, way)


def test_what_a_stranger_writes_costs_an_attempt_and_changes_nothing(
    servers: list[RunningServer], weights: Weights, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user of the machine may write into the group's store. The next group has another one."""
    join, spoiled = TransferTargets.join, []

    async def join_spoiled(self: Any, names: Any, order: Any, tensors: bytes) -> Any:
        if not spoiled:
            TCPStore("127.0.0.1", order["port"], is_master=False).set(f"{order['group_id']}/verdict", "go")
        spoiled.append(order["group_id"])
        return await join(self, names, order, tensors)

    async def action(sender: Sender) -> None:
        monkeypatch.setattr(TransferTargets, "join", join_spoiled)
        await sender.publish(weights, 0)
        assert len(spoiled) >= 2 and all(holds(server, weights) for server in servers)

    run(servers, weights, action, IMPATIENT)
    assert f"{spoiled[0]}/verdict' is not signed with this run's secret" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_server_with_another_model_is_one_line(servers: list[RunningServer], weights: Weights) -> None:
    name = next(iter(weights))

    async def action(sender: Sender) -> None:
        others = {n: tensor for n, tensor in weights.items() if n != name}
        sender.transfer._tensors = Sending(others).tensors
        with pytest.raises(UserError, match=f"refused.*1 weights of .* are not announced.*{name}"):
            await sender.publish(others, 1)

    run(servers, weights, action)


def test_no_number_never_arrives(servers: list[RunningServer], weights: Weights) -> None:
    name = list(weights)[-1]
    broken = weights | {name: torch.full_like(weights[name], float("nan"))}

    async def action(sender: Sender) -> None:
        await sender.publish(weights, 1)
        with pytest.raises(NonFiniteError, match=name):
            await sender.publish(broken, 2)
        for engine in sender.engines:  # half of an update does not answer
            with pytest.raises(StaleWeights):
                await engine.generate([[3, 4]], SAMPLING, [1])
        await sender.publish(weights, 3)
        assert len(await sender.router.generate([[3, 4, 5]], SAMPLING, [1])) == 1

    run(servers, weights, action)


def test_a_flipped_bit_is_seen_and_sent_again(
    servers: list[RunningServer], weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, flips = TransferGroup.broadcast, [1]

    def flipping(self: TransferGroup, buffer: Tensor, **options: Any) -> Any:
        if self.rank == 0 and flips:
            buffer[flips.pop()] ^= 4
        return honest(self, buffer, **options)

    async def action(sender: Sender) -> None:
        monkeypatch.setattr(TransferGroup, "broadcast", flipping)
        await sender.publish(weights, 1)
        assert not flips
        assert all(holds(server, weights) for server in servers)
        assert [engine.weight_version for engine in sender.engines] == [1, 1]

    run(servers, weights, action)


@pytest.mark.parametrize("phase", ["join", "start", "finish"])
def test_a_replica_that_goes_is_left_behind_and_comes_again(
    servers: list[RunningServer], weights: Weights, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica stops answering in one phase: the other gets the weights within the deadlines, the lost one when it
    answers again."""

    async def action(sender: Sender) -> None:
        await sender.publish(weights, 1)
        lost, post = sender.engines[0], RemoteEngine.post

        async def silent(self: RemoteEngine, path: str, *args: Any, **options: Any) -> Any:
            if self is lost and path.endswith(phase):
                self = RemoteEngine("http://127.0.0.1:1", timeout_s=1.0)
            return await post(self, path, *args, **options)

        monkeypatch.setattr(RemoteEngine, "post", silent)
        await sender.transfer.close()  # the next update begins with a group
        newer = {name: tensor * 0.5 for name, tensor in weights.items()}
        await sender.publish(newer, 2)
        assert sender.engines[1].weight_version == 2
        assert holds(servers[1], newer)
        assert sender.router.needs_weights == ("r0",)
        assert await sender.targets.lacking(None) == []  # it costs nobody a deadline again
        monkeypatch.setattr(RemoteEngine, "post", post)
        while "r0" not in await sender.targets.lacking(None):  # a busy machine may answer too late
            await sender.targets.hear()
        await sender.publish(newer, 2, only_missing=True)
        assert sender.engines[0].weight_version == 2
        assert holds(servers[0], newer)

    run(servers, weights, action)
