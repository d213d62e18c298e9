"""Servers whose engine gives its memory back for a while, and what a rollout's needs before it answers again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mopd.config.groups import TorchEngineConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import EngineUnavailable, StaleWeights, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.weights import stage_updates
from tests.fixtures.servers import running_server
from tests.fixtures.updates import join, load, tell
from tests.unit.serving.test_updates import Weights, assert_serves, draw, run


class SleepyEngine(TorchEngine):
    """A torch engine with the weights of its folder and a bed."""

    asleep = False

    async def sleep(self) -> None:
        self.asleep = True

    async def wake_up(self, *, weights_only: bool = False) -> None:
        self.asleep = False


def test_sleep_and_wake(folder: Path) -> None:
    engine = SleepyEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    engine.can_sleep = True

    async def work(remote: RemoteEngine) -> None:
        for _ in range(2):
            await remote.sleep()
            assert engine.asleep  # type: ignore[attr-defined]
            with pytest.raises(EngineUnavailable, match="503: the engine is asleep"):
                await remote.score(ToScore([torch.tensor([1, 2])], [1], top_k=1, temperature=1.0))
            await remote.health(timeout_s=5.0)
        for _ in range(2):
            await remote.wake_up()
            assert not engine.asleep  # type: ignore[attr-defined]
            await remote.score(ToScore([torch.tensor([1, 2])], [1], top_k=1, temperature=1.0))

    with running_server(engine) as running:
        run(running, work)


def test_a_rollout_that_slept_answers_after_new_weights_only(
    folder: Path, weights: Weights, local: TorchEngine
) -> None:
    """Each step of the way to the GPU and back: memory of the weights, weights, the rest. A step may be repeated."""
    engine = TorchEngine.empty(folder, TorchEngineConfig(dtype="float32"))

    def num_bytes() -> int:
        return sum(parameter.untyped_storage().nbytes() for parameter in engine.model.parameters())

    async def work(remote: RemoteEngine) -> None:
        await load(remote, weights.items(), 1)
        await assert_serves(remote, local, 1)
        held = num_bytes()
        for version in (2, 3):
            for _ in range(2):
                await remote.sleep()
                assert num_bytes() == 0 and remote.weight_version == -1 == (await remote.info()).weight_version
                with pytest.raises(EngineUnavailable, match="503: the engine is asleep"):
                    await load(remote, weights.items(), version)
            for _ in range(2):
                await remote.wake_up(weights_only=True)
                assert num_bytes() == held
            with pytest.raises(EngineUnavailable, match="503: the engine is asleep"):
                await draw(remote)
            await load(remote, weights.items(), version)
            with pytest.raises(EngineUnavailable, match="503: the engine is asleep"):
                await draw(remote)
            await remote.wake_up()
            await assert_serves(remote, local, version)
        await remote.sleep()
        await remote.wake_up()
        with pytest.raises(StaleWeights, match="has no weights yet"):
            await draw(remote)
        await load(remote, weights.items(), 4)
        await assert_serves(remote, local, 4)

    with running_server(engine, "rollout") as running:
        run(running, work)


def test_sleep_and_updates_exclude_one_another(folder: Path, weights: Weights) -> None:
    engine = TorchEngine.empty(folder, TorchEngineConfig(dtype="float32"))

    async def work(remote: RemoteEngine) -> None:
        await tell(remote, "join", join(stage_updates(weights.items(), 1)))
        with pytest.raises(StaleWeights, match="a weight update is on its way"):
            await remote.sleep()
        await load(remote, weights.items(), 1)
        await draw(remote)

    with running_server(engine, "rollout") as running:
        run(running, work)
