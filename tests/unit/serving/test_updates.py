"""Weight updates on a rollout server: all of it or nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.config.groups import TorchEngineConfig
from mopd.engines.clients import http
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import (
    EngineBusy,
    EngineRejected,
    EngineUnavailable,
    Generation,
    SamplingParams,
    StaleWeights,
    ToDraw,
    ToScore,
)
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.weights import MIN_PART_BYTES, StagedWeights, WeightReceived, stage_updates
from mopd.serving.host import ThreadHost
from tests.fixtures.servers import WAIT_S, GatedEngine, RunningServer, running_server
from tests.fixtures.updates import bring, finish, join, load, start, tell

SAMPLING = SamplingParams(max_new_tokens=8)
Weights = dict[str, Tensor]


@pytest.fixture
def rollout(folder: Path) -> Iterator[RunningServer]:
    engine = GatedEngine.empty(folder, TorchEngineConfig(dtype="float32"))
    assert isinstance(engine, GatedEngine)
    with running_server(engine.arm(), "rollout", limits={"update_timeout_s": 30.0}) as running:
        yield running
        engine.gate.set()


@pytest.fixture(scope="module")
def other_weights(weights: Weights) -> Weights:
    return {name: tensor * 0.5 for name, tensor in weights.items()}


def run(running: RunningServer, action: Callable[[RemoteEngine], Awaitable[Any]], **options: Any) -> Any:
    """What ``action`` returns, given a client of the server."""

    async def work() -> Any:
        remote = RemoteEngine(running.url, **{"timeout_s": WAIT_S, **options})
        try:
            return await action(remote)
        finally:
            await remote.close()

    return asyncio.run(work())


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), WAIT_S)


async def draw(engine: Any) -> Generation:
    (generation,) = await engine.generate(ToDraw([[5, 6, 7]], SAMPLING, [1]))
    return generation


async def assert_serves(remote: RemoteEngine, local: TorchEngine, version: int) -> None:
    """The server answers with ``version`` and with the weights of ``local``."""
    assert (await remote.info()).weight_version == version
    theirs, ours = await draw(remote), await draw(local)
    assert torch.equal(theirs.tokens, ours.tokens) and torch.equal(theirs.logprobs, ours.logprobs)


def cut(weights: Weights, version: int) -> StagedWeights:
    """Into several messages."""
    staged = stage_updates(weights.items(), version, bucket_bytes=MIN_PART_BYTES)
    assert len(staged.bodies) > 2
    return staged


def test_until_the_start_the_old_weights_answer(
    rollout: RunningServer, weights: Weights, other_weights: Weights, local: TorchEngine
) -> None:
    async def work(remote: RemoteEngine) -> None:
        await load(remote, weights.items(), 1)
        staged = cut(other_weights, 2)
        await tell(remote, "join", join(staged))
        for body in staged.bodies:
            await assert_serves(remote, local, 1)
            assert (await tell(remote, "part", body)).weight_version == 1
        await assert_serves(remote, local, 1)
        remote.allow(2)
        await tell(remote, "start", start(staged))
        assert (await tell(remote, "finish", finish(staged), WeightReceived)).weight_version == 2
        assert (await draw(remote)).token_versions.unique().tolist() == [2]  # at least 1 was asked for
        with pytest.raises(StaleWeights, match="has weights 2, not 1"):
            await remote.score(ToScore([torch.tensor([1, 2])], [1], top_k=1, temperature=1.0))
        remote.weight_version = 3
        with pytest.raises(StaleWeights, match="has weights 2, not 3"):
            await draw(remote)

    run(rollout, work)


def test_a_silent_update_leaves_the_old_weights(
    rollout: RunningServer, weights: Weights, other_weights: Weights, local: TorchEngine
) -> None:
    async def work(remote: RemoteEngine) -> None:
        await load(remote, weights.items(), 1)
        staged = cut(other_weights, 2)
        await bring(remote, replace(staged, bodies=staged.bodies[:-1]))
        with pytest.raises(EngineRejected, match=f"{len(staged.bodies) - 1} parts of the update came: send all"):
            await tell(remote, "start", start(staged))
        admission, updates = rollout.server.admission, rollout.server.updates
        assert updates.is_running
        admission.limits = replace(admission.limits, update_timeout_s=0.3)
        await tell(remote, "part", staged.bodies[-1])
        await until(lambda: not updates.is_running)
        with pytest.raises(StaleWeights, match="not in this group"):
            await tell(remote, "start", start(staged))
        with pytest.raises(StaleWeights, match="silent for too long"):
            await tell(remote, "part", staged.bodies[0])
        await assert_serves(remote, local, 1)

    run(rollout, work)


def test_a_part_out_of_turn_ends_the_update(
    rollout: RunningServer, weights: Weights, other_weights: Weights, local: TorchEngine
) -> None:
    async def work(remote: RemoteEngine) -> None:
        await load(remote, weights.items(), 1)
        staged = cut(other_weights, 2)
        await bring(remote, replace(staged, bodies=staged.bodies[:1]))
        with pytest.raises(EngineRejected, match=r"400: part 0 came when 1 of \d+ was due"):
            await tell(remote, "part", staged.bodies[0])
        with pytest.raises(StaleWeights, match="no such weight update"):
            await tell(remote, "part", staged.bodies[1])
        await assert_serves(remote, local, 1)

    run(rollout, work)


def test_a_new_update_replaces_the_one_whose_sender_died(
    rollout: RunningServer, weights: Weights, other_weights: Weights, local: TorchEngine
) -> None:
    async def work(remote: RemoteEngine) -> None:
        staged = cut(other_weights, 2)
        await bring(remote, replace(staged, bodies=staged.bodies[:1]))
        await load(remote, weights.items(), 2)
        for step, message in (("part", staged.bodies[1]), ("start", start(staged))):
            with pytest.raises(StaleWeights, match=r"no such weight update|not in this group"):
                await tell(remote, step, message)
        await assert_serves(remote, local, 2)

    run(rollout, work)


Damage = Callable[[Weights], object]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda w: w.popitem(), r"are missing, among them"),
        (lambda w: w.update(other=torch.zeros(2)), "'other' does not exist"),
        (lambda w: w.update({min(w): w[min(w)][None]}), "has shape"),
        (lambda w: w.update({min(w): w[min(w)].to(torch.int8)}), "has dtype int8"),
    ],
)
def test_wrong_weights_leave_the_old_ones(
    rollout: RunningServer, weights: Weights, other_weights: Weights, local: TorchEngine, damage: Damage, problem: str
) -> None:
    """Refused with 400 in one line, whatever is wrong with them; the next update is taken."""
    wrong = dict(other_weights)
    damage(wrong)

    async def work(remote: RemoteEngine) -> None:
        await load(remote, weights.items(), 1)
        with pytest.raises(EngineRejected, match=problem) as refused:
            await load(remote, wrong.items(), 2)
        assert "HTTP 400" in str(refused.value) and "\n" not in str(refused.value)
        assert remote.weight_version == 1
        await remote.health(timeout_s=5.0)
        await assert_serves(remote, local, 1)
        await load(remote, weights.items(), 3)
        await assert_serves(remote, local, 3)

    run(rollout, work)


def test_a_load_that_fails_half_way_leaves_no_weights_until_the_next_update(
    rollout: RunningServer, weights: Weights, local: TorchEngine
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    async def work(remote: RemoteEngine) -> None:
        await load(remote, weights.items(), 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout.engine, "swap_weights", fail)
            with pytest.raises(EngineUnavailable, match="HTTP 500"):
                await load(remote, weights.items(), 2)
        with pytest.raises(StaleWeights, match="no weights yet"):
            await draw(remote)
        await load(remote, weights.items(), 3)
        await assert_serves(remote, local, 3)

    run(rollout, work)


def test_weights_wait_for_no_connection_of_requests(
    rollout: RunningServer, weights: Weights, other_weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request holds the only one for as long as its response is drawn."""
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 1)

    async def work(remote: RemoteEngine) -> None:
        await load(remote, weights.items(), 1)
        rollout.engine.gate.clear()
        running = asyncio.create_task(draw(remote))
        await until(lambda: bool(rollout.engine.num_samples))
        await bring(remote, cut(other_weights, 2))
        assert not running.done()
        rollout.engine.gate.set()
        await running

    run(rollout, work)


def test_a_part_is_not_even_read_without_an_update(rollout: RunningServer, teacher: RunningServer) -> None:
    """Nobody holds 64 MiB by announcing them."""
    for running, status in ((rollout, b"409"), (teacher, b"403")):
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            head = b"POST /v1/weights/part HTTP/1.1\r\nhost: localhost\r\ncontent-length: 67108864\r\n\r\n"
            client.sendall(head + b"abc")
            assert status in client.recv(1000).split(b"\r\n")[0]


def test_what_runs_ends_with_the_old_weights_and_what_waits_is_answered_with_the_new_ones(
    rollout: RunningServer, weights: Weights, other_weights: Weights, local: TorchEngine
) -> None:
    """``finish`` waits for the call that runs, not for the queue behind it."""

    async def work(remote: RemoteEngine) -> None:
        await load(remote, weights.items(), 1)
        engine = rollout.engine
        engine.gate.clear()
        running = asyncio.create_task(draw(remote))
        await until(lambda: bool(engine.num_samples))
        other, waiting = RemoteEngine(rollout.url, timeout_s=30.0), RemoteEngine(rollout.url, timeout_s=30.0)
        waiting.weight_version = 1
        early = asyncio.create_task(draw(waiting))
        host = rollout.server.served.host
        await until(lambda: len(host._waiting) == 1)  # type: ignore[attr-defined]
        update = asyncio.create_task(load(other, other_weights.items(), 2))
        await until(lambda: len(host._waiting) == 2)  # type: ignore[attr-defined]
        waiting.allow(2)
        late = asyncio.create_task(draw(other))
        await until(lambda: len(host._waiting) == 3)  # type: ignore[attr-defined]
        assert not any(task.done() for task in (running, early, update, late))
        engine.gate.set()
        assert torch.equal((await running).logprobs, (await draw(local)).logprobs)
        await update
        for given in (await early, await late):
            assert set(given.token_versions.tolist()) == {2}
        await other.close()
        await waiting.close()

    run(rollout, work)


def test_an_engine_with_a_queue_of_its_own_gets_nothing_until_it_is_idle(
    rollout: RunningServer,
    weights: Weights,
    other_weights: Weights,
    local: TorchEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``finish``: nothing new is let in meanwhile, and told to come back soon."""
    monkeypatch.setattr(ThreadHost, "swaps_between_calls", False)

    async def work(remote: RemoteEngine) -> None:
        await load(remote, weights.items(), 1)
        engine = rollout.engine
        engine.gate.clear()
        running = asyncio.create_task(draw(remote))
        await until(lambda: bool(engine.num_samples))
        other = RemoteEngine(rollout.url, timeout_s=30.0)
        update = asyncio.create_task(load(other, other_weights.items(), 2))
        await until(lambda: rollout.server.admission._is_paused)
        assert not update.done()
        with pytest.raises(EngineBusy, match="weights 2 wait for what runs") as busy:
            await draw(remote)
        assert busy.value.retry_after_s < 1
        engine.gate.set()
        assert torch.equal((await running).logprobs, (await draw(local)).logprobs)
        await update
        assert (await other.info()).weight_version == 2
        await other.close()

    run(rollout, work)
