"""Weights over a process group to real engine servers, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from mopd.base.types import NonFiniteError, UserError
from mopd.config.groups import TorchEngineConfig
from mopd.config.load import load_recipe
from mopd.config.schema import Recipe
from mopd.config.weights import BucketsConfig, CollectiveConfig, IpcConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import SamplingParams, StaleWeights, ToDraw
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.student import StudentGroup
from mopd.orchestrator.weights import transfer
from mopd.orchestrator.weights.sync import GroupWeightSync
from mopd.orchestrator.weights.targets import TransferTargets
from mopd.orchestrator.weights.transfer import CannotJoin, GroupTransfer
from mopd.weights.carrying import TravellingParts
from mopd.weights.group import GroupOrder
from tests.fixtures.linked import GroupSender, Sending, linked_ranks
from tests.fixtures.recipe import RECIPE
from tests.fixtures.servers import RunningServer

CONFIG = TorchEngineConfig(dtype="float32")
SAMPLING = SamplingParams(max_new_tokens=4)
DEADLINE_S = 600.0
COLLECTIVE = CollectiveConfig(type="collective", bucket_mib=1, timeout_s=DEADLINE_S)
IPC = IpcConfig(type="ipc", bucket_mib=1, timeout_s=DEADLINE_S)
IMPATIENT = CollectiveConfig(type="collective", bucket_mib=1, timeout_s=10.0)
"""Way with a short deadline, for tests in which a member waits for another that has gone."""
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def weights(source: TorchEngine) -> Weights:
    return {name: slot.detach().clone() for name, slot in source.weight_slots.items()}


Action = Callable[[GroupSender], Awaitable[None]]


def run(servers: list[RunningServer], weights: Weights, action: Action, way: BucketsConfig = COLLECTIVE) -> None:
    async def work() -> None:
        sender = GroupSender([server.url for server in servers], weights, way)
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

    async def action(sender: GroupSender) -> None:
        for version, sent in enumerate([weights, newer, weights]):
            await sender.publish(sent, version)
            assert all(holds(server, sent) for server in servers)
            (generation,) = await sender.router.generate(ToDraw([[3, 4, 5]], SAMPLING, [1]))
            assert set(generation.token_versions.tolist()) == {version}
        assert sender.transfer.take_numbers()["timing/weights_update_s"] > 0

    run(servers, weights, action, way)


def test_what_a_stranger_writes_costs_an_attempt_and_changes_nothing(
    servers: list[RunningServer], weights: Weights, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user of the machine may write into the group's store. The next group has another one."""
    join, spoiled = TransferTargets.join, []

    async def join_spoiled(self: Any, workers: Any, order: GroupOrder, tensors: bytes) -> Any:
        if not spoiled:
            TCPStore("127.0.0.1", order.port, is_master=False).set(f"{order.group_id}/verdict", "go")
        spoiled.append(order.group_id)
        return await join(self, workers, order, tensors)

    async def action(sender: GroupSender) -> None:
        monkeypatch.setattr(TransferTargets, "join", join_spoiled)
        await sender.publish(weights, 0)
        assert len(spoiled) >= 2 and all(holds(server, weights) for server in servers)

    run(servers, weights, action, IMPATIENT)
    assert f"{spoiled[0]}/verdict' is not signed with this run's secret" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_server_with_another_model_is_one_line(servers: list[RunningServer], weights: Weights) -> None:
    name = next(iter(weights))

    async def action(sender: GroupSender) -> None:
        others = {n: tensor for n, tensor in weights.items() if n != name}
        sender.transfer._tensors = Sending(others).announced["tensors"]
        with pytest.raises(UserError, match=f"refused.*1 weights of .* are missing.*{name}"):
            await sender.publish(others, 1)

    run(servers, weights, action)


def test_no_number_never_arrives(servers: list[RunningServer], weights: Weights) -> None:
    name = list(weights)[-1]
    broken = weights | {name: torch.full_like(weights[name], float("nan"))}

    async def action(sender: GroupSender) -> None:
        await sender.publish(weights, 1)
        with pytest.raises(NonFiniteError, match=name):
            await sender.publish(broken, 2)
        for engine in sender.engines:  # half of an update does not answer
            with pytest.raises(StaleWeights):
                await engine.generate(ToDraw([[3, 4]], SAMPLING, [1]))
        await sender.publish(weights, 3)
        assert len(await sender.router.generate(ToDraw([[3, 4, 5]], SAMPLING, [1]))) == 1

    run(servers, weights, action)


def test_a_flipped_bit_is_seen_and_sent_again(
    servers: list[RunningServer], weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, flips, kept = TravellingParts.carry, [1], list[Tensor]()

    def flipping(self: TravellingParts, number: int, buffer: Tensor, sender: int) -> Any:
        if self.group.rank == 0 and flips:
            buffer = buffer.clone()
            buffer[flips.pop()] ^= 4
            kept.append(buffer)
        return honest(self, number, buffer, sender)

    async def action(sender: GroupSender) -> None:
        monkeypatch.setattr(TravellingParts, "carry", flipping)
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

    async def action(sender: GroupSender) -> None:
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
        assert sender.targets.lacking(2) == []  # it costs nobody a deadline again
        monkeypatch.setattr(RemoteEngine, "post", post)
        while "r0" not in sender.targets.lacking(2):  # a busy machine may answer too late
            await sender.targets.hear()
        await sender.transfer.publish(3, asked=2)
        assert [engine.weight_version for engine in sender.engines] == [3, 2]
        assert sender.router.weight_version == 2 and holds(servers[0], newer)

    run(servers, weights, action)


def engines_lack_interface(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All engines are asked to listen on a network that they do not have. Returns the groups that were tried."""
    join, tried = TransferTargets.join, list[str]()

    async def elsewhere(self: Any, workers: Any, order: GroupOrder, tensors: bytes) -> Any:
        if order.is_staged:
            return await join(self, workers, order, tensors)
        tried.append(order.group_id)
        return await join(self, workers, replace(order, interface="nope0"), tensors)

    monkeypatch.setattr(TransferTargets, "join", elsewhere)
    return tried


def test_where_nobody_can_join_two_attempts_end_in_one_line(
    servers: list[RunningServer], weights: Weights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = engines_lack_interface(monkeypatch)

    async def action(sender: GroupSender) -> None:
        named = r"no rollout engine came into .* at 127\.0\.0\.1, .*weight_sync"
        with pytest.raises(CannotJoin, match=named) as caught:
            await sender.publish(weights, 1)
        assert len(tried) == 2 and "\n" not in str(caught.value)

    run(servers, weights, action)
    assert "weight_sync.interface is 'nope0', which has no IPv4 address" in caplog.text
    assert "Traceback" not in caplog.text


class Worker(Sending):
    """A student as rank 0 asks it."""

    def __init__(self, own: Weights, recipe: Recipe) -> None:
        super().__init__(own)
        self.recipe = recipe

    def weights(
        self, part: str = "all", *, in_place: bool = False, ema: float | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        yield from self.own.items()


@pytest.mark.parametrize(("or_http", "repairs"), [(True, False), (True, True), (False, False)])
def test_a_student_that_may_goes_on_by_http_where_nobody_can_join(
    servers: list[RunningServer],
    weights: Weights,
    folder: Path,
    tmp_path: Path,
    or_http: bool,
    repairs: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A repair that waits for its turn meanwhile does not ask the group that was left."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    way = f"weight_sync={{type: collective, timeout_s: {DEADLINE_S}, or_http: {str(or_http).lower()}}}"
    keys = [f"student.model={folder}", "rollout.placement={type: local}", way]
    recipe = load_recipe(tmp_path / "recipe.yaml", keys).recipe
    worker, tried = Worker(weights, recipe), engines_lack_interface(monkeypatch)
    facts = {"is_on_gpu": False, "announced": worker.announced}

    async def action(sender: GroupSender) -> None:
        sync = GroupWeightSync(sender.router)
        async with linked_ranks(worker) as ranks:
            student = StudentGroup(recipe, ranks, facts, sync)
            if repairs:
                sender.router.set_weight_version(0)  # which nobody has
                async with ranks.turn:
                    publishing = asyncio.create_task(student.publish(0))
                    await asyncio.sleep(0)
                    repairing = asyncio.create_task(sync.send_again())
                    while len(ranks.turn._waiters or ()) < 2:
                        await asyncio.sleep(0.01)
                assert await repairing == ()
                await publishing
            if or_http:
                for version in (1, 2):
                    await student.publish(version)
                    assert [engine.weight_version for engine in sender.engines] == [version] * 2
                    worker.own = {name: tensor * 2 for name, tensor in worker.own.items()}
                assert all(holds(server, {name: 2 * tensor for name, tensor in weights.items()}) for server in servers)
                assert await sync.send_again() == ()
            else:
                with pytest.raises(CannotJoin):
                    await student.publish(1)
            await student.close()

    run(servers, weights, action)
    assert len(tried) == 2
    assert caplog.text.count("the weights go by HTTP, which is slower, from now on: no rollout engine") == or_http


@pytest.mark.parametrize(
    ("hosts", "own", "interface", "expected"),
    [
        (["here"], "", None, "127.0.0.1"),
        (["here", "there"], "", None, "10.0.0.5"),
        (["here"], "there", None, "10.0.0.5"),
        ([], "", None, "127.0.0.1"),
        (["there"], "", "lo", "127.0.0.1"),
    ],
)
def test_the_store_is_where_the_way_to_others_begins(
    hosts: list[str], own: str, interface: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"here": "127.0.0.1", "there": "10.0.0.5"}
    monkeypatch.setattr(transfer, "address_towards", lambda host, port: ways[host])
    monkeypatch.setattr(transfer, "GroupStore", lambda host, timeout_s: host)
    targets: Any = SimpleNamespace(hosts=lambda: hosts)
    cfg, student = replace(COLLECTIVE, interface=interface), Sending({})
    assert GroupTransfer(targets, cfg, student.ask, host=own, **student.announced)._open_store(1.0) == expected


def test_no_address_is_one_line(servers: list[RunningServer], weights: Weights) -> None:
    async def action(sender: GroupSender) -> None:
        with pytest.raises(
            UserError, match=r"no address for the weights' way .*'nope0'.* set it to one of .*lo"
        ) as told:
            await sender.publish(weights, 1)
        assert "\n" not in str(told.value)

    run(servers, weights, action, replace(COLLECTIVE, interface="nope0"))
