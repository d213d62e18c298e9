"""Responses that are under way when new weights arrive (``on_running: continue``), and those that end before others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from mopd.config.groups import TorchEngineConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import (
    EngineBusy,
    EngineUnavailable,
    Generation,
    ResponseCallback,
    SamplingParams,
    ToDraw,
    ToScore,
)
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.weights import stage_updates
from tests.fixtures.servers import WAIT_S, RunningServer, running_server
from tests.fixtures.tiny_models import EOS_ID, make_hf_model
from tests.fixtures.updates import load, push
from tests.unit.serving import test_updates as updates
from tests.unit.serving.test_updates import until

CFG = TorchEngineConfig(dtype="float32")
SAMPLING = SamplingParams(max_new_tokens=60)
PROMPTS, SEEDS = [[5, 6, 7 + i] for i in range(24)], list(range(24))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[TorchEngine]:
    """Two models whose responses end at very different steps, the same but for their weights."""
    found = []
    for seed in (1, 2):
        path = make_hf_model(tmp_path_factory.mktemp("model"), seed=seed, scale=0.3)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, 30, 31]}))
        found.append(TorchEngine.from_pretrained(path, CFG))
    return found


class SteppedEngine(TorchEngine):
    """A torch engine that stops before one of its model's forward passes until it may go on."""

    go_on = threading.Event()

    def hold_at(self, step: int) -> None:
        """Stop before forward pass ``step``, counted from here."""
        self.left, self.held, self.go_on = step, threading.Event(), threading.Event()
        self.model.register_forward_pre_hook(self._step)

    def _step(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            self.held.set()
            assert self.go_on.wait(WAIT_S)


@pytest.fixture
def rollout(models: list[TorchEngine]) -> Iterator[RunningServer]:
    engine = SteppedEngine.empty(models[0].name, CFG)
    with running_server(engine, "rollout") as running:
        yield running
        running.engine.go_on.set()


def run(rollout: RunningServer, models: list[TorchEngine], action: Callable[[RemoteEngine], Awaitable[None]]) -> None:
    async def work(remote: RemoteEngine) -> None:
        await load(remote, models[0].model.named_parameters(), 1)
        await action(remote)

    updates.run(rollout, work)


def own_logprobs(model: TorchEngine, prompt: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    sequence = torch.cat([torch.tensor(prompt), tokens])
    (scores,) = asyncio.run(model.score(ToScore([sequence], [len(prompt)], top_k=1, temperature=1.0)))
    return scores.token_logprobs


async def hear(remote: RemoteEngine) -> tuple[dict[int, Generation], asyncio.Task[list[Generation]]]:
    told: dict[int, Generation] = {}
    task = asyncio.create_task(remote.generate(ToDraw(PROMPTS, SAMPLING, SEEDS), on_response=told.__setitem__))
    return told, task


def test_a_short_response_arrives_before_the_long_one_ends(rollout: RunningServer, models: list[TorchEngine]) -> None:
    """The engine stands before its 31st step: what stopped in the steps before is there, its room is free again."""
    expected = asyncio.run(models[0].generate(ToDraw(PROMPTS, SAMPLING, SEEDS)))
    short = {i for i, given in enumerate(expected) if len(given.tokens) <= 30}
    assert 0 < len(short) < len(PROMPTS)

    async def work(remote: RemoteEngine) -> None:
        rollout.engine.hold_at(31)
        told, task = await hear(remote)
        left, admission = len(PROMPTS) - len(short), rollout.server.admission
        await until(lambda: len(told) == len(short) and admission.queued_sequences == left)
        await until(rollout.engine.held.is_set)
        assert set(told) == short and not task.done()
        rollout.engine.go_on.set()
        for given, wanted in zip(await task, expected, strict=True):
            assert torch.equal(given.tokens, wanted.tokens) and torch.equal(given.logprobs, wanted.logprobs)
        assert len(told) == len(PROMPTS)

    run(rollout, models, work)


def test_what_runs_is_handed_back_and_goes_on_under_the_new_weights(
    rollout: RunningServer, models: list[TorchEngine]
) -> None:
    """Each token has the log-prob that its own version gives it, with the whole response before it."""
    drawn: list[Generation] = []

    async def work(remote: RemoteEngine) -> None:
        rollout.engine.hold_at(31)
        _, task = await hear(remote)
        await until(rollout.engine.held.is_set)
        waiting = asyncio.create_task(remote.generate(ToDraw([[9, 9]], SAMPLING, [7])))
        await until(lambda: rollout.server.admission.num_running == 2)
        staged = stage_updates(models[1].model.named_parameters(), 2)
        pushing = asyncio.create_task(push(remote, staged, "continue"))
        await until(rollout.engine._interrupted.is_set)
        rollout.engine.go_on.set()
        await pushing
        drawn.extend(await task)
        assert (await waiting)[0].token_versions.unique().tolist() == [2]  # it had not begun
        for i, given in enumerate(drawn):
            if given.finish_reason == "handed_back":
                assert len(given.tokens) == 31 and given.token_versions.unique().tolist() == [1]
                left = SamplingParams(max_new_tokens=SAMPLING.max_new_tokens - len(given.tokens))
                (rest,) = await remote.generate(ToDraw([PROMPTS[i] + given.tokens.tolist()], left, [SEEDS[i]]))
                parts = {n: torch.cat([getattr(g, n) for g in (given, rest)]) for n in NAMES}
                drawn[i] = Generation(**parts, finish_reason=rest.finish_reason)

    run(rollout, models, work)
    assert {tuple(given.token_versions.unique().tolist()) for given in drawn} == {(1,), (1, 2)}
    assert {given.finish_reason for given in drawn} <= {"stop", "length"}
    apart = 0.0
    for prompt, given in zip(PROMPTS, drawn, strict=True):
        old, new = (own_logprobs(model, prompt, given.tokens) for model in models)
        is_new = given.token_versions == 2
        torch.testing.assert_close(given.logprobs, torch.where(is_new, new, old), rtol=0, atol=1e-4)
        apart = max(apart, float((new - old).abs().max()))
    assert apart > 0.1  # the two versions are told apart


NAMES = ("tokens", "logprobs", "token_versions")


def test_a_client_that_goes_away_in_mid_stream(rollout: RunningServer, models: list[TorchEngine], local: Any) -> None:
    """Its place in the queue is free; the server goes on."""

    async def work(remote: RemoteEngine) -> None:
        rollout.engine.hold_at(31)
        told, task = await hear(remote)
        await until(lambda: bool(told))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: rollout.server.admission.queued_sequences == 0)
        assert rollout.server.admission.queued_tokens == rollout.server.admission.num_running == 0
        rollout.engine.go_on.set()
        assert len(await remote.generate(ToDraw(PROMPTS, SAMPLING, SEEDS))) == len(PROMPTS)

    run(rollout, models, work)


def test_a_failure_after_the_first_response_is_told_in_the_stream(
    rollout: RunningServer, models: list[TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_off(_: object, *, on_response: ResponseCallback) -> list[Generation]:
        on_response(3, drawn)
        raise EngineUnavailable("the core process ended")

    async def work(remote: RemoteEngine) -> None:
        monkeypatch.setattr(rollout.engine, "generate", break_off)
        told, task = await hear(remote)
        with pytest.raises(EngineUnavailable, match="HTTP 503: the engine is dead: the core process ended"):
            await task
        assert list(told) == [3] and torch.equal(told[3].tokens, drawn.tokens)

    ones = torch.ones(2)
    drawn = Generation(tokens=ones.long(), logprobs=-ones, finish_reason="length", token_versions=ones.int())
    run(rollout, models, work)


def test_admission_counts_sequences_and_prompts(rollout: RunningServer, models: list[TorchEngine]) -> None:
    """Not the length that responses may have; a request that comes alone is let in whatever its number."""

    async def work(remote: RemoteEngine) -> None:
        admission = rollout.server.admission
        limits = (await remote.info()).limits
        assert (limits.max_sequences, limits.max_running_tokens) == (
            256,
            65536,
        ) and admission.max_queued_sequences == 512
        admission.max_queued_sequences = 24
        rollout.engine.hold_at(1)
        _, task = await hear(remote)
        await until(rollout.engine.held.is_set)
        assert (admission.queued_tokens, admission.queued_sequences) == (3 * 24, 24)
        with pytest.raises(EngineBusy, match="24 of 24 sequences are queued: no room for 1"):
            await remote.generate(ToDraw([[5]], SAMPLING, [1]))
        rollout.engine.go_on.set()
        await task
        assert len(await remote.generate(ToDraw([[5]] * 30, SAMPLING, list(range(30))))) == 30

    run(rollout, models, work)
