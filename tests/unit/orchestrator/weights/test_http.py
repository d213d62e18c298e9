"""Weight sync to real rollout servers, and to engines of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.base.types import NonFiniteError, UserError
from mopd.config.groups import RoutingConfig, TorchEngineConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import EngineUnavailable, OnRunning, SamplingParams, StaleWeights, ToDraw
from mopd.engines.replicas.interface import LIMITS, Replica, RouterLimits
from mopd.engines.replicas.router import Router
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.messages import decode
from mopd.engines.wire.weights import WeightStart, stage_updates
from mopd.orchestrator.weights import sync as syncing
from mopd.orchestrator.weights.sync import GroupWeightSync
from tests.fixtures.ports import free_port
from tests.fixtures.servers import RunningServer, running_server

SAMPLING = SamplingParams(max_new_tokens=8)


class DyingEngine(RemoteEngine):
    """Loses its server at one step of an update."""

    dies_at: str | None = None

    async def post(self, path: str, *args: Any, **options: Any) -> Any:
        if path == f"/v1/weights/{self.dies_at}":
            raise EngineUnavailable(f"{self.name}: connection reset")
        return await super().post(path, *args, **options)


async def publish(replicas: Sequence[Any], weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """As a group of these replicas does; each takes part, whatever it has."""
    members = [Replica(name=replica.name, engine=replica) for replica in replicas]
    router = Router("rollout", members, RoutingConfig(), kind="rollout")
    await GroupWeightSync(router).publish(weights, version)
    await router.close()


def run(servers: list[RunningServer], action: Any) -> None:
    async def work() -> None:
        replicas = [DyingEngine(server.url, timeout_s=30.0, name=f"r{i}") for i, server in enumerate(servers)]
        try:
            await action(replicas)
        finally:
            for replica in replicas:
                await replica.close()

    asyncio.run(work())


async def assert_serves(replica: Any, source: TorchEngine) -> None:
    (theirs,) = await replica.generate(ToDraw([[5, 6, 7]], SAMPLING, [1]))
    (ours,) = await source.generate(ToDraw([[5, 6, 7]], SAMPLING, [1]))
    assert torch.equal(theirs.tokens, ours.tokens) and torch.equal(theirs.logprobs, ours.logprobs)


def test_one_stream_reaches_every_replica(servers: list[RunningServer], source: TorchEngine) -> None:
    """In several chunks, read once; tensors may be of another dtype than the engine's."""

    async def work(replicas: list[DyingEngine]) -> None:
        await publish(replicas, iter(list(source.model.named_parameters())), 4)
        for replica in replicas:
            assert replica.weight_version == 4 == (await replica.info()).weight_version
            await assert_serves(replica, source)
        rounded = {name: tensor.bfloat16() for name, tensor in source.model.named_parameters()}
        await publish(replicas, rounded.items(), 5)
        for server in servers:
            for name, parameter in server.engine.model.named_parameters():
                assert torch.equal(parameter, rounded[name].float())

    run(servers, work)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_one_stream_reaches_every_engine_of_this_process(folder: Path, source: TorchEngine, num_engines: int) -> None:
    engines = [TorchEngine.empty(folder, TorchEngineConfig(dtype="float32")) for _ in range(num_engines)]
    for i, engine in enumerate(engines):
        engine.name = f"r{i}"

    async def work() -> None:
        await publish(engines, iter(list(source.model.named_parameters())), 4)
        for engine in engines:
            assert engine.weight_version == 4
            await assert_serves(engine, source)
        with pytest.raises(ValueError, match="are missing"):
            await publish(engines, iter([]), 5)
        with pytest.raises(NonFiniteError, match="infinite in float32"):  # finite in the dtype that they come in
            await publish(engines, ((name, w.double() * 1e40) for name, w in source.model.named_parameters()), 6)

    asyncio.run(work())


@pytest.mark.parametrize("step", ["join", "part", "start"])
def test_a_replica_that_dies_is_left_behind(
    servers: list[RunningServer], source: TorchEngine, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream is read to its end, the other replica serves the new version, the dead one nothing of it."""
    read: list[str] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source.model.named_parameters():
            read.append(name)
            yield name, tensor

    async def work(replicas: list[DyingEngine]) -> None:
        await publish(replicas, source.model.named_parameters(), 1)
        replicas[0].dies_at = step
        await publish(replicas, stream(), 2)
        assert read == [name for name, _ in source.model.named_parameters()]
        assert (
            f"weights to rollout replica r0, {step}: " in caplog.text and "weights 2 did not reach r0\n" in caplog.text
        )
        assert [replica.weight_version for replica in replicas] == [-1 if step == "start" else 1, 2]
        await assert_serves(replicas[1], source)
        assert (await replicas[0].info()).weight_version == 1
        replicas[0].weight_version = 2
        with pytest.raises(StaleWeights):
            await replicas[0].generate(ToDraw([[5, 6, 7]], SAMPLING, [1]))
        replicas[0].dies_at = None
        await publish(replicas, stream(), 3)
        assert [replica.weight_version for replica in replicas] == [3, 3]
        await assert_serves(replicas[0], source)

    run(servers, work)


def test_a_server_that_is_away_is_waited_for(
    folder: Path, source: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before an update and comes back at its address without weights, after more looks and refused requests
    than any fault is allowed: it is sent the weights, and answers what was asked meanwhile."""
    monkeypatch.setattr(syncing, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(syncing, "AWAY_PAUSE_S", 0.01)
    port = free_port()
    weights, looks, health = list(source.model.named_parameters()), list[float](), RemoteEngine.health

    async def counted(engine: RemoteEngine, *, timeout_s: float) -> None:
        looks.append(timeout_s)
        await health(engine, timeout_s=timeout_s)

    monkeypatch.setattr(RemoteEngine, "health", counted)

    def serving() -> contextlib.AbstractContextManager[RunningServer]:
        return running_server(TorchEngine.empty(folder, TorchEngineConfig(dtype="float32")), "rollout", port=port)

    async def work() -> None:
        engine = RemoteEngine(f"http://127.0.0.1:{port}", timeout_s=60.0, name="rollout.0")
        limits = RouterLimits(backoff_s=0.001, breaker_reset_s=0.001)
        replicas = [Replica(name="rollout.0", engine=engine)]
        router = Router("rollout", replicas, RoutingConfig(request_timeout_s=600.0), kind="rollout", limits=limits)
        sync = GroupWeightSync(router)
        with serving():
            await sync.publish(weights, 1)
            repair = sync.watch(router.remove, patience_s=600.0)
        drawing = asyncio.create_task(router.generate(ToDraw([[5, 6, 7]], SAMPLING, [1])))
        retries = 0
        while (retries := retries + router.take_numbers().retries) < 2 * LIMITS.max_attempts:
            await asyncio.sleep(0.01)
        await sync.publish(weights, 2)
        later = asyncio.create_task(router.generate(ToDraw([[5, 6, 7]], SAMPLING, [1])))
        while len(looks) < 2 * syncing.MAX_PUSHES:
            await asyncio.sleep(0.01)
        with serving():
            (ours,) = await source.generate(ToDraw([[5, 6, 7]], SAMPLING, [1]))
            for (theirs,) in (await drawing, await later):
                assert torch.equal(theirs.tokens, ours.tokens) and set(theirs.token_versions.tolist()) == {2}
            await repair.close()
            await router.close()
            await engine.close()

    asyncio.run(asyncio.wait_for(work(), 120.0))


def test_a_server_that_stays_away_is_given_up(
    servers: list[RunningServer], source: TorchEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After its patience, with the reason, in a line; the other one answers on."""
    monkeypatch.setattr(syncing, "AWAY_PAUSE_S", 0.01)

    async def work(replicas: list[DyingEngine]) -> None:
        gone = RemoteEngine(f"http://127.0.0.1:{free_port()}", timeout_s=30.0, name="r1")
        members = [Replica(name="r0", engine=replicas[0]), Replica(name="r1", engine=gone)]
        router = Router("rollout", members, RoutingConfig(), kind="rollout")
        sync = GroupWeightSync(router)
        await sync.publish(source.model.named_parameters(), 1)
        repair = sync.watch(router.give_up, patience_s=0.1)
        while len(router.replicas) > 1:
            await asyncio.sleep(0.01)
        (told,) = (line for line in caplog.messages if "given up" in line)
        assert told.startswith("r1 is given up: r1: /health") and told.endswith(", for 0.1 s")
        assert len(await router.generate(ToDraw([[5, 6, 7]], SAMPLING, [1]))) == 1
        await repair.close()
        await router.close()
        await gone.close()

    run(servers, work)


def test_a_replica_that_lost_a_part_is_sent_all_again_at_once(
    servers: list[RunningServer], source: TorchEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers, so that its update begins anew; the others' goes on."""
    post, lost = RemoteEngine.post, list[str]()

    async def losing(self: RemoteEngine, path: str, body: bytes, *args: Any, **options: Any) -> Any:
        if path == "/v1/weights/part" and self.name == "r0" and not lost:
            lost.append(path)
            raise StaleWeights("r0: HTTP 409: no such weight update")
        return await post(self, path, body, *args, **options)

    monkeypatch.setattr(RemoteEngine, "post", losing)

    async def work(replicas: list[DyingEngine]) -> None:
        await publish(replicas, source.model.named_parameters(), 1)
        assert [replica.weight_version for replica in replicas] == [1, 1] and lost
        await assert_serves(replicas[0], source)

    run(servers, work)
    assert caplog.text.count("weights to rollout replica r0, part: ") == 1 and "replica r1" not in caplog.text


def test_no_replica_left_is_told_after_the_stream(
    servers: list[RunningServer], source: TorchEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """No error of the update: a repair may reach the servers."""
    count = 0

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal count
        for pair in source.model.named_parameters():
            count += 1
            yield pair

    async def work(replicas: list[DyingEngine]) -> None:
        for replica in replicas:
            replica.dies_at = "join"
        await publish(replicas, stream(), 1)
        assert "weights 1 did not reach r0, r1" in caplog.text
        assert count == len(list(source.model.named_parameters()))

    run(servers, work)


def test_of_a_stream_that_breaks_nothing_is_sent(servers: list[RunningServer], source: TorchEngine) -> None:
    """The old weights go on."""

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(source.model.named_parameters()))
        raise RuntimeError("the student died")

    async def work(replicas: list[DyingEngine]) -> None:
        await publish(replicas, source.model.named_parameters(), 1)
        with pytest.raises(RuntimeError, match="the student died"):
            await publish(replicas, stream(), 2)
        for replica in replicas:
            await assert_serves(replica, source)

    run(servers, work)


@pytest.mark.parametrize("on_running", ["finish", "continue"])
def test_old_replicas_work_on_until_the_start(
    servers: list[RunningServer], source: TorchEngine, on_running: OnRunning
) -> None:
    """The router asks for the new weights when everyone has them; what the recipe says becomes of running responses
    reaches the servers; the stream is not read again for a replica that came back."""
    held, reached = asyncio.Event(), asyncio.Event()

    class HeldEngine(DyingEngine):
        async def post(self, path: str, body: bytes, *args: Any, **options: Any) -> Any:
            if path == "/v1/weights/part" and self.weight_version == 1:
                reached.set()
                await held.wait()
            if path == "/v1/weights/start":
                assert decode(body, WeightStart).on_running == on_running
            return await super().post(path, body, *args, **options)

    async def work(_: list[DyingEngine]) -> None:
        replicas = [HeldEngine(server.url, timeout_s=30.0, name=f"r{i}") for i, server in enumerate(servers)]
        router = Router("rollout", [Replica(name=r.name, engine=r) for r in replicas], RoutingConfig(), kind="rollout")
        sync = GroupWeightSync(router, on_running=on_running)
        await sync.publish(source.model.named_parameters(), 1)
        sending = asyncio.create_task(sync.send(stage_updates(source.model.named_parameters(), 2)))
        await reached.wait()
        assert router.weight_version == 1 and not router.needs_weights
        assert (await router.generate(ToDraw([[5, 6, 7]], SAMPLING, [1])))[0].token_versions.unique().tolist() == [1]
        held.set()
        await sending
        assert router.weight_version == 2 and [r.weight_version for r in replicas] == [2, 2]
        assert await sync.send_again() == ()
        back = RemoteEngine(servers[0].url, timeout_s=30.0, name="r0")
        router.replace("r0", back)
        assert list(await sync.send_again()) == ["r0"] and back.weight_version == 2
        await assert_serves(back, source)
        for engine in (*replicas, back):
            await engine.close()
        await router.close()

    run(servers, work)


def test_weights_that_do_not_fit_the_model(servers: list[RunningServer], source: TorchEngine) -> None:
    async def work(replicas: list[DyingEngine]) -> None:
        with pytest.raises(UserError, match=r"^the student's weights were refused: r[01]: .* are missing"):
            await publish(replicas, list(source.model.named_parameters())[:-1], 1)

    run(servers, work)
