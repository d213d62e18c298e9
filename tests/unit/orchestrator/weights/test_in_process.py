"""In-process weight sync with real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mopd.config.groups import RoutingConfig, TorchEngineConfig
from mopd.engines.interface import SamplingParams
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.weights.sync import GroupWeightSync


def publish(engines: list[TorchEngine], weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    async def work() -> None:
        replicas = [Replica(name=f"r{i}", engine=engine) for i, engine in enumerate(engines)]
        router = Router("rollout", replicas, RoutingConfig(), kind="rollout")
        await GroupWeightSync(router).publish(weights, version)
        await router.close()

    asyncio.run(work())


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_stream_reaches_every_engine(folder: Path, source: TorchEngine, num_engines: int) -> None:
    engines = [TorchEngine.empty(folder, TorchEngineConfig(dtype="float32")) for _ in range(num_engines)]

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from source.model.named_parameters()

    publish(engines, stream(), 4)
    sampling = SamplingParams(max_new_tokens=8)
    (expected,) = asyncio.run(source.generate([[5, 6, 7]], sampling, [1]))
    for engine in engines:
        assert engine.weight_version == 4
        (given,) = asyncio.run(engine.generate([[5, 6, 7]], sampling, [1]))
        assert torch.equal(given.tokens, expected.tokens) and torch.equal(given.logprobs, expected.logprobs)


def test_the_engines_copy_is_its_own(folder: Path) -> None:
    source = TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    engine = TorchEngine.empty(folder, TorchEngineConfig(dtype="float32"))
    publish([engine], source.model.named_parameters(), 0)
    sampling = SamplingParams(max_new_tokens=8)
    (before,) = asyncio.run(engine.generate([[5, 6, 7]], sampling, [1]))
    with torch.no_grad():
        for parameter in source.model.parameters():
            parameter.zero_()
    (after,) = asyncio.run(engine.generate([[5, 6, 7]], sampling, [1]))
    assert torch.equal(before.logprobs, after.logprobs)


def test_a_partial_stream_is_an_error(folder: Path) -> None:
    engine = TorchEngine.empty(folder, TorchEngineConfig(dtype="float32"))
    with pytest.raises(ValueError, match="are missing"):
        publish([engine], iter([]), 1)
