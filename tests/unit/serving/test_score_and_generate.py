"""Scores and responses that come over HTTP are those of the engine, bit for bit; the client believes nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from typing import Any

import httpx
import pytest
import torch

from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import EngineRejected, SamplingParams, StaleWeights, ToDraw, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.messages import VERSION
from tests.fixtures.servers import RunningServer, random_tokens, running_server
from tests.fixtures.updates import load
from tests.unit.serving.test_updates import run

LENGTHS, PROMPTS = (40, 7, 12, 5), (20, 3, 12, 1)
SAMPLING = SamplingParams(max_new_tokens=12, temperature=0.8, top_p=0.9, top_k=20)


@pytest.mark.parametrize(
    ("top_k", "temperature", "hidden_size"), [(1, 1.0, 0), (8, 0.7, 64), (48, 1.0, 0), (0, 1.0, 64)]
)
def test_scores_equal_the_engines(
    teacher: RunningServer, local: TorchEngine, top_k: int, temperature: float, hidden_size: int
) -> None:
    """Among the sequences one without a response: it has no rows."""
    tokens = random_tokens(*LENGTHS)

    async def score(engine: Any) -> Any:
        options = {"top_k": top_k, "temperature": temperature, "hidden_size": hidden_size}
        return await engine.score(ToScore(tokens, PROMPTS, **options))

    given = run(teacher, score)
    for theirs, ours in zip(given, asyncio.run(score(local)), strict=True):
        assert torch.equal(theirs.ids, ours.ids) and theirs.ids.dtype == torch.int32
        assert torch.equal(theirs.logprobs, ours.logprobs)
        assert torch.equal(theirs.token_logprobs, ours.token_logprobs)
        assert (theirs.hidden is None) == (not hidden_size)
        if hidden_size:
            assert torch.equal(theirs.hidden, ours.hidden) and theirs.hidden.dtype == torch.bfloat16


def test_another_hidden_size_is_refused_by_name(teacher: RunningServer) -> None:
    async def score(engine: RemoteEngine) -> None:
        with pytest.raises(EngineRejected, match="hidden states of size 32 are asked for: those of"):
            await engine.score(ToScore(random_tokens(9), [2], top_k=0, temperature=1.0, hidden_size=32))

    run(teacher, score)


def test_the_answer_has_nothing_of_the_prompt(teacher: RunningServer) -> None:
    """Bytes of an answer depend on the response's length alone, and stay within 8 K + 32 per response token."""

    async def sizes(engine: RemoteEngine) -> list[int]:
        found = []
        for prompt_length in (1, 100):
            before = engine.bytes_received
            await engine.score(ToScore(random_tokens(prompt_length + 16), [prompt_length], top_k=8, temperature=1.0))
            found.append(engine.bytes_received - before)
        return found

    short, long = run(teacher, sizes)
    assert short == long
    assert short / 16 <= 8 * 8 + 32


def test_a_rollout_server_answers_with_the_version_that_is_asked_for(folder: Any, local: TorchEngine) -> None:
    """No weights: 409. After a push: the engine's own responses. Newer ones are asked for: 409. Another client, which
    pushed nothing, refuses what it gets."""
    engine = TorchEngine.empty(folder, local._cfg)
    prompts, seeds = [[5, 6, 7], [8, 9]], [1, 2**62]

    async def work(remote: RemoteEngine) -> None:
        with pytest.raises(StaleWeights, match="no weights yet"):
            await remote.generate(ToDraw(prompts, SAMPLING, seeds))
        await load(remote, local.model.named_parameters(), 3)
        assert remote.weight_version == 3
        given = await remote.generate(ToDraw(prompts, SAMPLING, seeds))
        for theirs, ours in zip(given, await local.generate(ToDraw(prompts, SAMPLING, seeds)), strict=True):
            assert torch.equal(theirs.tokens, ours.tokens) and theirs.tokens.dtype == torch.int64
            assert torch.equal(theirs.logprobs, ours.logprobs)
            assert theirs.finish_reason == ours.finish_reason
            assert theirs.token_versions.tolist() == [3] * len(ours.tokens)
            assert theirs.token_versions.dtype == torch.int32
        scores = await remote.score(ToScore([torch.tensor([5, 6, 7])], [1], top_k=2, temperature=1.0))
        (ours_scored,) = await local.score(ToScore([torch.tensor([5, 6, 7])], [1], top_k=2, temperature=1.0))
        assert torch.equal(scores[0].logprobs, ours_scored.logprobs)
        assert (await remote.info()).weight_version == 3
        remote.weight_version = 4
        with pytest.raises(StaleWeights, match="has weights 3, not 4"):
            await remote.generate(ToDraw(prompts, SAMPLING, seeds))
        stranger = RemoteEngine(remote.url, timeout_s=30.0)
        with pytest.raises(StaleWeights, match="answered with weights 3, not -1"):
            await stranger.generate(ToDraw(prompts, SAMPLING, seeds))
        await stranger.close()

    with running_server(engine, "rollout") as running:
        run(running, work)


def test_every_key_of_sampling_reaches_the_engine(folder: Any, local: TorchEngine) -> None:
    """Each changes what is drawn, and to the same. ``num_begun`` matters to a penalty alone."""
    engine = TorchEngine.empty(folder, local._cfg)
    prompts, seeds = [[5 + i, 6, 7] for i in range(12)], list(range(12))
    plain = SamplingParams(max_new_tokens=12)
    penalty = replace(plain, presence_penalty=-2.0)
    cases = [
        (plain, {"temperature": 2.0}),
        (plain, {"top_p": 0.3}),
        (plain, {"top_k": 2}),
        (plain, {"min_p": 0.5}),
        (plain, {"presence_penalty": 2.0}),
        (plain, {"repetition_penalty": 3.0}),
        (plain, {"stop": ("a", "b", "c", "\n")}),
        (plain, {"stop_token_ids": (20, 21, 22, 23)}),
        (plain, {"ignore_eos": True, "max_new_tokens": 100}),
        (penalty, {"num_begun": 2}),
    ]
    assert {name for _, changes in cases for name in changes} == {  # type: ignore[attr-defined]
        field.name for field in fields(SamplingParams) if field.name not in ("num_top_ids", "routes")
    }

    async def work(remote: RemoteEngine) -> None:
        await load(remote, local.model.named_parameters(), 3)
        for base, changes in cases:
            sampling = replace(base, **changes)
            theirs, ours, unchanged = [
                [one.tokens.tolist() for one in await engine.generate(ToDraw(prompts, own, seeds))]
                for engine, own in ((remote, sampling), (local, sampling), (local, base))
            ]
            assert theirs == ours != unchanged, changes
        with pytest.raises(EngineRejected, match="token 48 is outside the vocabulary of 48"):
            await remote.generate(ToDraw(prompts, replace(plain, stop_token_ids=(48,)), seeds))

    with running_server(engine, "rollout") as running:
        run(running, work)


@pytest.mark.parametrize(
    ("tokens", "prompt_lengths", "options", "problem"),
    [
        ([torch.tensor([1, 48])], [1], {}, "token 48 is outside the vocabulary of 48"),
        ([torch.ones(257, dtype=torch.int64)], [1], {}, "a sequence of 257 tokens: .* takes 256"),
        ([torch.tensor([1, 2])], [1], {"top_k": 49}, "top_k is 49: .* gives at most 48"),
        ([torch.ones(200, dtype=torch.int64)] * 21, [1] * 21, {}, "413: a request of 4200 tokens"),
    ],
)
def test_what_the_engine_cannot_do(
    teacher: RunningServer, tokens: Any, prompt_lengths: Any, options: Any, problem: str
) -> None:
    async def score(engine: RemoteEngine) -> None:
        with pytest.raises(EngineRejected, match=problem):
            await engine.score(ToScore(tokens, prompt_lengths, **{"top_k": 2, "temperature": 1.0, **options}))

    run(teacher, score)


def test_info(teacher: RunningServer, folder: Any) -> None:
    info = run(teacher, RemoteEngine.info)
    assert (info.model, info.kind, info.vocab_size, info.max_positions) == (str(folder), "torch", 48, 256)
    assert (info.dtype, info.weight_version, info.max_logprobs) == ("float32", -1, None)
    assert info.manifest == {"config_sha256": "c", "weights_sha256": "w", "tokenizer_sha256": "t"}
    assert (info.limits.max_tokens_per_request, info.limits.max_queued_tokens) == (4096, 8192)
    shown = httpx.get(f"{teacher.url}/info").json()
    assert (shown["role"], shown["name"], shown["wire_version"]) == ("teacher", "math", VERSION)


def test_metrics_count(teacher: RunningServer) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{teacher.url}/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    before = read()

    async def score(engine: RemoteEngine) -> None:
        await engine.score(ToScore(random_tokens(9, 5), [4, 4], top_k=2, temperature=1.0))
        with pytest.raises(EngineRejected):
            await engine.score(ToScore([torch.tensor([1, 48])], [1], top_k=2, temperature=1.0))

    run(teacher, score)
    after = read()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("mopd_scored_tokens_total") == 6
    assert grown('mopd_requests_total{path="/v1/score",status="200"}') == 1
    assert grown('mopd_requests_total{path="/v1/score",status="400"}') == 1
    assert grown('mopd_request_seconds_count{path="/v1/score"}') == 2
    assert grown("mopd_received_bytes_total") > 0 and grown("mopd_sent_bytes_total") > 6 * 20
    assert (after["mopd_queued_tokens"], after["mopd_running_requests"]) == (0, 0)
    assert after["mopd_weight_version"] == -1
