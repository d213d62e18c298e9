"""Adapters in the torch engine answer as folders in which they are merged, beside one another and after updates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from mopd.base.types import NonFiniteError, UserError
from mopd.config.groups import TorchEngineConfig
from mopd.config.student import LoraConfig
from mopd.conversion.adapters import read_adapter
from mopd.engines.interface import SamplingParams, Scores, ToDraw, ToScore, WeightsLost
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.weights import load_staged, stage_updates
from tests.fixtures.adapters import ALPHA, RANK, TARGETS, merged_model, random_adapter, write_adapter
from tests.fixtures.tiny_models import FP32_FORWARD_ATOL, VOCAB_SIZE, make_hf_model

CFG = TorchEngineConfig(dtype="float32")
TOKENS = [torch.tensor([1, 5, 9, 7, 12, 33]), torch.tensor([1, 8, 8, 3])]
STARTS = [2, 1]
SAMPLING = SamplingParams(max_new_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("adapters") / "base", "qwen3", seed=4)


def score(engine: TorchEngine, adapter: str = "") -> list[Scores]:
    return asyncio.run(engine.score(ToScore(TOKENS, STARTS, top_k=VOCAB_SIZE, temperature=1.0, adapter=adapter)))


def distance(one: list[Scores], other: list[Scores]) -> float:
    """Largest difference of the log-probs over the whole vocabulary."""

    def whole(scores: Scores) -> torch.Tensor:
        return torch.zeros_like(scores.logprobs).scatter(1, scores.ids.long(), scores.logprobs)

    return max((whole(a) - whole(b)).abs().max().item() for a, b in zip(one, other, strict=True))


def test_each_adapter_answers_as_its_merged_folder(base: Path, tmp_path: Path) -> None:
    """The base beside them answers as before; an adapter on some modules alone too."""
    tensors = {"math": random_adapter(base, 1), "code": random_adapter(base, 2, targets=("q_proj", "down_proj"))}
    adapters = {name: read_adapter(write_adapter(tmp_path / name, own), base) for name, own in tensors.items()}
    engine = TorchEngine.from_pretrained(base, CFG, adapters=adapters)
    plain = TorchEngine.from_pretrained(base, CFG)
    for name, own in tensors.items():
        merged = TorchEngine.from_pretrained(merged_model(tmp_path / f"{name}-merged", base, own), CFG)
        assert distance(score(engine, name), score(merged)) < 1e-5
        assert distance(score(engine, name), score(plain)) > 0.1
        drawn, expected = (
            asyncio.run(one.generate(ToDraw([[1, 5, 9]], SAMPLING, [0], **given)))[0]
            for one, given in ((engine, {"adapter": name}), (merged, {}))
        )
        assert drawn.tokens.tolist() == expected.tokens.tolist()
        torch.testing.assert_close(drawn.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    assert distance(score(engine), score(plain)) == 0
    assert asyncio.run(engine.info()).adapters == {"math": "", "code": ""}
    with pytest.raises(ValueError, match=r"adapter 'maths' is not loaded in the engine of .*, which has code, math"):
        score(engine, "maths")


def test_an_adapter_beside_gpt_oss_attention(tmp_path: Path) -> None:
    base = make_hf_model(tmp_path / "base", "gpt_oss", seed=4)
    own = random_adapter(base, 1, targets=TARGETS[:4])
    engine = TorchEngine.from_pretrained(
        base, CFG, adapters={"math": read_adapter(write_adapter(tmp_path / "math", own), base)}
    )
    merged = TorchEngine.from_pretrained(merged_model(tmp_path / "merged", base, own), CFG)
    assert distance(score(engine, "math"), score(merged)) < FP32_FORWARD_ATOL
    assert distance(score(engine), score(merged)) > 0.1


def test_students_adapter_is_replaced_by_updates(base: Path, tmp_path: Path) -> None:
    """Nothing answers before the first, each of three answers as merged, and an incomplete one leaves the last."""
    shape = LoraConfig(rank=RANK, alpha=ALPHA, target_modules=TARGETS)
    engine = TorchEngine.from_pretrained(base, CFG, has_weights=False, student_adapter=shape)
    with pytest.raises(WeightsLost):
        score(engine)
    for version in range(3):
        tensors = random_adapter(base, 10 + version)
        staged = stage_updates(tensors.items(), version, into=engine.weight_slots)
        num_bytes = sum(own.numel() * own.element_size() for own in tensors.values())
        assert sum(map(len, staged.bodies)) < 1.02 * num_bytes + 4096  # and the messages' heads
        asyncio.run(load_staged(engine, staged))
        merged = merged_model(tmp_path / f"merged-{version}", base, tensors)
        assert distance(score(engine), score(TorchEngine.from_pretrained(merged, CFG))) < 1e-5
        assert engine.weight_version == version
    before = score(engine)
    tensors = random_adapter(base, 20)
    missing = dict(list(tensors.items())[1:])
    with pytest.raises(ValueError, match=r"1 weights of .* are missing"):
        asyncio.run(engine.load_weights(missing.items(), 3))
    next(iter(tensors.values()))[0, 0] = torch.nan
    with pytest.raises(NonFiniteError):
        asyncio.run(engine.load_weights(tensors.items(), 3))
    assert engine.weight_version == 2 and distance(score(engine), before) == 0


def test_modules_that_the_engine_lacks_are_refused(tmp_path: Path) -> None:
    """Experts lie in one parameter under transformers."""
    base = make_hf_model(tmp_path / "moe", "qwen3_moe", seed=4)
    adapter = read_adapter(write_adapter(tmp_path / "adapter", random_adapter(base, 1)), base)
    with pytest.raises(UserError, match=r"adapts 'model.layers.*experts.*', which is no linear module of the language"):
        TorchEngine.from_pretrained(base, CFG, adapters={"math": adapter})
