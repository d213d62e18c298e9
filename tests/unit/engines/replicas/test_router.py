"""The router without trouble: order, balance, bounds, numbers of requests. Simulated clock, 100 tokens a second."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from mopd.config.groups import TorchEngineConfig
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.tiny_models import FP32_FORWARD_ATOL, VOCAB_SIZE, make_hf_model
from tests.unit.engines.replicas.stand_in import SAMPLING, StandIn, make_router, run, samples, score


def test_the_replica_with_the_fewest_tokens_under_way_is_next() -> None:
    engines = [StandIn(i) for i in range(2)]
    router = make_router(engines, max_inflight_tokens=1000)
    tokens, starts = samples(60, 10, 10, 10)

    async def work() -> None:
        long = asyncio.create_task(score(router, tokens[:1], starts[:1]))
        await asyncio.sleep(0.01)
        for i in (1, 2, 3):
            await score(router, tokens[i : i + 1], starts[i : i + 1])
        await long

    run(work)
    assert [engine.calls for engine in engines] == [[[1000]], [[1001], [1002], [1003]]]


def test_rollouts_ask_for_room_for_the_longest_response() -> None:
    engine = StandIn()
    router = make_router([engine], kind="rollout", max_tokens_per_request=14, max_inflight_tokens=14)
    router.set_weight_version(0)

    async def work() -> None:
        generations = await router.generate([[7, 1], [8, 1], [9]], SAMPLING, [100, 200, 300])
        assert [int(generation.tokens[0]) for generation in generations] == [107, 208, 309]

    run(work)
    assert engine.calls == [[7, 8], [9]]


def test_two_real_engines_agree_with_one(tmp_path: Path) -> None:
    folder = make_hf_model(tmp_path)
    engines = [TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32")) for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, VOCAB_SIZE, (4 + 3 * i,), generator=generator) for i in range(9)]
    starts = [1 + i % 3 for i in range(9)]

    async def work() -> None:
        shared = await make_router(engines[:2]).score(tokens, starts, top_k=4, temperature=0.7)
        alone = await engines[2].score(tokens, starts, top_k=4, temperature=0.7)
        for a, b in zip(shared, alone, strict=True):
            assert torch.equal(a.ids, b.ids)
            torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=FP32_FORWARD_ATOL)
            torch.testing.assert_close(a.token_logprobs, b.token_logprobs, rtol=0, atol=FP32_FORWARD_ATOL)

    asyncio.run(work())
