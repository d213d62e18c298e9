"""A teacher against its own greedy continuations: right ones pass, each fault on the way fails, in ten
random teachers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.config.groups import TorchEngineConfig
from mopd.config.schedule import PreflightConfig
from mopd.engines.interface import ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.torch.sight import VisionFeatures
from mopd.engines.vision import read_vision
from mopd.orchestrator.preflight.alignment import Alignment, AlignmentCheck, Text
from tests.fixtures.misreadings import PROMPTS, SHIFTS, Misread
from tests.fixtures.seen import placeholders, prompt_image, prompts_with_images
from tests.fixtures.tiny_models import BOS_ID, VOCAB_SIZE, make_hf_model
from tests.fixtures.vision import VISION_VOCAB_SIZE, image_bytes, make_vision_model
from tests.unit.orchestrator.groups import teacher_of

NUM_TEACHERS = 10
FAMILIES = ("qwen3", "llama", "qwen2", "mistral", "deepseek_v3")
LENGTHS = ((14, 12), (23, 16), (17, 5), (30, 16))
"""Tokens of prompt and response."""
Make = Callable[..., TorchEngine]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Make:
    root = tmp_path_factory.mktemp("teachers")

    @cache
    def make(seed: int, dtype: Any = "float32", scale: float = 0.2) -> TorchEngine:
        folder = root / f"{seed}-{dtype}-{scale}"
        family = FAMILIES[seed % len(FAMILIES)]
        make_hf_model(folder, family, seed=seed, scale=scale, hidden_size=32, ffn_size=48)
        return TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype=dtype))

    return make


def probes(seed: int) -> list[Text]:
    """Random texts behind a <bos>."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Text((BOS_ID, *torch.randint(3, VOCAB_SIZE, (prompt + response - 1,), generator=generator).tolist()), prompt)
        for prompt, response in LENGTHS
    ]


def look(*engines: Any, seed: int = 0, dtype: str = "float32", top_k: int = 8, longest: int = 64) -> Alignment:
    """The check by way of a router."""
    limit = PreflightConfig().logprob_limit(dtype)
    check = AlignmentCheck(teacher_of("t", *engines), top_k=top_k, longest=longest, limit=limit, dtype=dtype)
    texts = [Text(text.tokens[:longest], min(text.prompt_length, longest - 2)) for text in probes(seed)]
    return asyncio.run(check.run(texts, has_rotary_positions=True))


@pytest.mark.parametrize("seed", range(NUM_TEACHERS))
def test_ten_random_teachers(teacher: Make, seed: int) -> None:
    """Nearly flat distributions among them: a third of the teachers have small weights."""
    engine = teacher(seed, scale=(0.2, 0.1, 0.02)[seed % 3])
    right = look(engine, seed=seed)
    assert right.problem == ""
    assert right.nearest > 100 * right.difference
    for fault in ("one later", "one earlier", "bos dropped", "bos doubled", "another template", "left-truncated"):
        assert look(Misread(engine, fault), seed=seed).problem, fault


@pytest.mark.parametrize("fault", [*PROMPTS])
def test_what_scoring_and_generating_do_alike_is_caught_too(teacher: Make, fault: str) -> None:
    for seed in range(3):
        assert look(Misread(teacher(seed), fault, everywhere=True), seed=seed).problem, seed


@pytest.mark.parametrize("fault", [*PROMPTS, *SHIFTS])
def test_a_coarse_engine_hides_no_fault(teacher: Make, fault: str) -> None:
    engine = teacher(1, "bfloat16")
    assert look(engine, dtype="bfloat16").problem == ""
    assert look(Misread(engine, fault), dtype="bfloat16").problem
    if fault in PROMPTS:
        assert look(Misread(engine, fault, everywhere=True), dtype="bfloat16").problem


def test_a_teacher_that_is_certain_of_every_token(teacher: Make) -> None:
    """Its own tokens have log-probs near 0 whatever stands before them; the server does not tell its dtype."""
    engine = teacher(6, scale=0.3)
    with torch.no_grad():
        engine.model.model.norm.weight.mul_(10)
    assert look(engine, dtype="unknown").problem == ""
    for fault in (*PROMPTS, *SHIFTS):
        assert look(Misread(engine, fault), dtype="unknown").problem, fault
    for fault in PROMPTS:
        assert look(Misread(engine, fault, everywhere=True), dtype="unknown").problem, fault


def test_the_fault_is_named(teacher: Make) -> None:
    named = {
        "one later": "rows that stand one place too early",
        "one earlier": "rows that stand one place too late",
        "bos dropped": "a prompt with its first token twice",
        "bos doubled": "a prompt without its first token",
    }
    for fault, words in named.items():
        problem = look(Misread(teacher(0), fault)).problem
        assert words in problem and "differ from what its own generation reports" in problem, (fault, problem)


@pytest.mark.parametrize("longest", [6, 9, 24])
@pytest.mark.parametrize("top_k", [1, 8])
def test_short_sequences_and_one_log_prob_suffice(teacher: Make, longest: int, top_k: int) -> None:
    assert look(teacher(2), longest=longest, top_k=top_k).problem == ""
    assert look(Misread(teacher(2), "bos dropped"), longest=longest, top_k=top_k).problem


def test_one_wrong_replica_of_several(teacher: Make) -> None:
    assert look(teacher(3), Misread(teacher(3), "none")).problem == ""
    assert look(teacher(3), Misread(teacher(3), "one later")).problem
    assert look(teacher(3), teacher(8)).problem, "another model"


def test_a_teacher_that_sees_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes hold images, first, last and between; scores of others, or of none, are noticed."""
    folder = make_vision_model(tmp_path)
    engine = TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    generator = torch.Generator().manual_seed(0)
    texts = [
        Text((*prompt, *torch.randint(3, 40, (12,), generator=generator).tolist()), len(prompt), tuple(images))
        for prompt, images in zip(*prompts_with_images(folder), strict=True)
    ]
    text = Text((*placeholders(texts[0].images[0]), *range(3, 20)), 20, texts[0].images)

    def run() -> Alignment:
        group = teacher_of("t", engine, vocab_size=VISION_VOCAB_SIZE, sees_images=True)
        options = {"limit": PreflightConfig().logprob_limit("float32"), "sight": read_vision(folder, None)}
        check = AlignmentCheck(group, top_k=8, longest=64, dtype="float32", **options)
        return asyncio.run(check.run([*texts, text], has_rotary_positions=True))

    right = run()
    assert right.problem == "" and right.nearest > 100 * right.difference
    features = VisionFeatures._features
    monkeypatch.setattr(
        VisionFeatures, "_features", lambda self, image: tuple(map(torch.zeros_like, features(self, image)))
    )
    assert "another image does not change them" in run().problem
    monkeypatch.undo()
    score, wrong = engine.score, image_bytes(56, 84, 5)

    async def of_another(asked: ToScore) -> Any:
        """Every image is one and the same, where its grid allows."""
        one = prompt_image(folder, wrong)
        changed = [[one if own.grid == one.grid else own for own in seen] for seen in asked.seen]
        return await score(replace(asked, images=changed))

    monkeypatch.setattr(engine, "score", of_another)
    assert "they differ from what its own generation reports" in run().problem
