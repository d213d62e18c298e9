"""How the blocking engine is driven: small requests share a call, errors reach those who asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from mopd.engines.interface import ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.serving.admission import Admission, ServerLimits
from mopd.serving.errors import Refusal
from mopd.serving.host import ThreadHost
from tests.fixtures.servers import GatedEngine, random_tokens
from tests.fixtures.tiny_models import FP32_FORWARD_ATOL


async def behind_the_first(engine: GatedEngine, host: ThreadHost, calls: list[Any]) -> list[Any]:
    """Results of ``calls``, all of which wait while a first request of one sample is at the engine."""
    await host.start()
    engine.gate.clear()
    first = asyncio.create_task(host.score(ToScore(random_tokens(5), [2], top_k=1, temperature=1.0)))
    while not engine.num_samples:
        await asyncio.sleep(0.01)
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0.05)
    engine.gate.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_waiting_requests_share_a_call_and_get_their_own_scores(gated: GatedEngine, local: TorchEngine) -> None:
    """Ten requests for the same thing: one call. Another top-k: a call of its own."""
    host = ThreadHost(gated, max_batch_tokens=10_000)

    async def work() -> None:
        tokens = [random_tokens(10 + i, 6, seed=i) for i in range(10)]
        calls = [host.score(ToScore(given, [4, 2], top_k=3, temperature=1.0)) for given in tokens]
        other = host.score(ToScore(tokens[0], [4, 2], top_k=2, temperature=1.0))
        *results, other_result = await behind_the_first(gated, host, [*calls[:5], *calls[5:], other])
        for given, scores in zip(tokens, results, strict=True):
            for theirs, ours in zip(
                scores, await local.score(ToScore(given, [4, 2], top_k=3, temperature=1.0)), strict=True
            ):
                assert torch.equal(theirs.ids, ours.ids)
                torch.testing.assert_close(theirs.logprobs, ours.logprobs, atol=FP32_FORWARD_ATOL, rtol=0)
        assert other_result[0].ids.shape[1] == 2
        await host.close()

    asyncio.run(work())
    assert gated.num_samples == [1, 20, 2]


def test_a_call_is_bounded_in_tokens(gated: GatedEngine) -> None:
    host = ThreadHost(gated, max_batch_tokens=40)

    async def work() -> None:
        calls = [host.score(ToScore(random_tokens(15), [4], top_k=3, temperature=1.0)) for _ in range(5)]
        calls.append(host.score(ToScore(random_tokens(100), [4], top_k=3, temperature=1.0)))
        results = await behind_the_first(gated, host, calls)
        assert [scores[0].ids.shape[0] for scores in results] == [11] * 5 + [96]
        await host.close()

    asyncio.run(work())
    assert gated.num_samples == [1, 2, 2, 1, 1]


def test_an_error_reaches_everyone_who_shared_the_call_and_the_host_goes_on(gated: GatedEngine) -> None:
    host = ThreadHost(gated, max_batch_tokens=1000)

    async def work() -> None:
        calls = [host.score(ToScore(random_tokens(5), [0], top_k=3, temperature=1.0)) for _ in range(2)]
        results = await behind_the_first(gated, host, calls)
        assert all(isinstance(result, ValueError) and "prompt length 0" in str(result) for result in results)
        assert len(await host.score(ToScore(random_tokens(5), [2], top_k=3, temperature=1.0))) == 1
        await host.close()
        with pytest.raises(RuntimeError, match="not running"):
            await host.score(ToScore(random_tokens(5), [2], top_k=3, temperature=1.0))

    asyncio.run(work())


def test_closing_cancels_what_waits(gated: GatedEngine) -> None:
    host = ThreadHost(gated, max_batch_tokens=1000)

    async def work() -> None:
        await host.start()
        gated.gate.clear()
        tasks = [
            asyncio.create_task(host.score(ToScore(random_tokens(5), [2], top_k=k, temperature=1.0))) for k in (1, 2)
        ]
        while not gated.num_samples:
            await asyncio.sleep(0.01)
        assert host.is_computing
        await host.close()
        done, _ = await asyncio.wait(tasks, timeout=600)
        assert [task.cancelled() for task in done] == [True, True]
        gated.gate.set()

    asyncio.run(work())
    assert gated.num_samples == [1]


def test_admission_counts_tokens() -> None:
    async def work() -> None:
        admission = Admission(ServerLimits(max_tokens_per_request=10, max_queued_tokens=15))
        first = admission.admit(10)
        with pytest.raises(Refusal) as refused:
            admission.admit(6)
        assert refused.value.status == 429 and refused.value.details["retry_after_s"] > 0
        second = admission.admit(5)
        with pytest.raises(Refusal) as refused:
            admission.admit(11)
        assert refused.value.status == 413
        with admission.running():
            with pytest.raises(Refusal) as refused:
                await admission.wait_idle(0.01)
            assert refused.value.status == 504
        await admission.wait_idle(0.01)
        for _ in range(2):
            first.release()
            second.release()
        assert admission.queued_tokens == 0
        admission.pause(Refusal(503, "asleep", "first"))
        for action in (lambda: admission.admit(1), lambda: admission.pause(Refusal(503, "other", "second"))):
            with pytest.raises(Refusal, match="first"):  # one pause at a time: neither ends the other
                action()
        assert admission.closed_kind is None
        admission.resume()
        admission.admit(1).release()
        admission.pause(Refusal(503, "asleep", "first"))
        admission.close("draining", "the end")
        admission.resume()
        assert admission.closed_kind == "draining"
        for action in (lambda: admission.admit(1), lambda: admission.pause(Refusal(503, "asleep", ""))):
            with pytest.raises(Refusal, match="the end"):
                action()

    asyncio.run(work())
    with pytest.raises(ValueError, match="could never enter"):
        ServerLimits(max_tokens_per_request=10, max_queued_tokens=9)
