"""TorchEngine with images against transformers: both families, however the prompts are batched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mopd.base.types import PromptImage
from mopd.config.groups import TorchEngineConfig
from mopd.engines.interface import EngineRejected, Generation, SamplingParams, ToDraw, ToScore
from mopd.engines.torch.decoding import draw
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.seen import Transformers, placeholders, prompt_image, prompts_with_images
from tests.fixtures.tiny_models import FP32_FORWARD_ATOL, make_hf_model
from tests.fixtures.vision import IMAGE_TOKEN_ID, VISION_FAMILIES, image_bytes, make_vision_model

CONFIG = TorchEngineConfig(dtype="float32")


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def engine(folder: Path) -> TorchEngine:
    return TorchEngine.from_pretrained(folder, CONFIG)


def generate(
    engine: TorchEngine, prompts: Sequence[list[int]], images: Sequence[list[PromptImage]], **sampling: float
) -> list[Generation]:
    chosen = SamplingParams(**{"max_new_tokens": 8, **sampling})
    return asyncio.run(engine.generate(ToDraw(prompts, chosen, [5 + len(p) for p in prompts], images=images)))


def test_generation_scoring_and_transformers_agree(folder: Path, engine: TorchEngine) -> None:
    prompts, images = prompts_with_images(folder)
    drawn = generate(engine, prompts, images)
    tokens = [torch.tensor([*prompt, *given.tokens.tolist()]) for prompt, given in zip(prompts, drawn, strict=True)]
    starts = [len(prompt) for prompt in prompts]
    scores = asyncio.run(engine.score(ToScore(tokens, starts, top_k=6, temperature=1.0, images=images)))
    reference = Transformers(folder)
    for i, given in enumerate(drawn):
        expected = reference.logprobs(tokens[i].tolist(), starts[i], images[i])
        own = expected.gather(-1, given.tokens[:, None]).squeeze(-1)
        torch.testing.assert_close(given.logprobs, own, rtol=0, atol=FP32_FORWARD_ATOL)
        torch.testing.assert_close(scores[i].token_logprobs, own, rtol=0, atol=FP32_FORWARD_ATOL)
        torch.testing.assert_close(scores[i].logprobs, expected.topk(6).values, rtol=0, atol=FP32_FORWARD_ATOL)
    other = [[prompt_image(folder, image_bytes(56, 84, seed=9))], *images[1:]]
    blind = asyncio.run(engine.score(ToScore(tokens, starts, top_k=6, temperature=1.0, images=other)))
    assert (blind[0].token_logprobs - scores[0].token_logprobs).abs().max() > 0.01  # it is the image that is seen
    assert torch.equal(blind[1].token_logprobs, scores[1].token_logprobs)


def test_a_response_does_not_depend_on_its_neighbours(folder: Path, engine: TorchEngine) -> None:
    prompts, images = prompts_with_images(folder)
    together = generate(engine, prompts, images, temperature=0.8)
    for prompt, own, given in zip(prompts, images, together, strict=True):
        (alone,) = generate(engine, [prompt], [own], temperature=0.8)
        assert alone.tokens.tolist() == given.tokens.tolist()


def test_new_weights_see_anew(folder: Path, tmp_path: Path) -> None:
    """By the checkpoint's own names, flat or nested; features of the old weights are forgotten."""
    other = make_vision_model(tmp_path / "other", folder_family(folder), seed=1)
    engine = TorchEngine.empty(folder, CONFIG)
    prompts, images = prompts_with_images(folder)
    tokens = [torch.tensor([*prompt, 7, 8]) for prompt in prompts]
    for version, source in enumerate((folder, other)):
        weights = load_file(source / "model.safetensors")
        asyncio.run(engine.load_weights(weights.items(), version))
        scores = asyncio.run(
            engine.score(ToScore(tokens, [len(p) for p in prompts], top_k=4, temperature=1.0, images=images))
        )
        reference = Transformers(source)
        for i, given in enumerate(scores):
            expected = reference.logprobs(tokens[i].tolist(), len(prompts[i]), images[i]).topk(4).values
            torch.testing.assert_close(given.logprobs, expected, rtol=0, atol=FP32_FORWARD_ATOL)


def folder_family(folder: Path) -> str:
    return next(family for family in VISION_FAMILIES if f'"{family}"' in (folder / "config.json").read_text())


def test_ids_of_vision_are_never_drawn(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where they are by far the most probable; log-probs are those of the whole distribution."""
    barred = torch.tensor([3, 17, 59])
    logits = torch.randn(64, 60, generator=torch.Generator().manual_seed(0)).index_fill(1, barred, 8.0)
    uniform = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for cut in ({}, {"temperature": 0.0}, {"temperature": 0.5, "top_p": 0.9}, {"top_k": 3}):
        sampling = SamplingParams(max_new_tokens=1, **cut)
        tokens, logprobs = draw(logits, sampling, uniform, barred)
        assert not torch.isin(tokens, barred).any()
        whole = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
        torch.testing.assert_close(logprobs, whole.gather(1, tokens[:, None]).squeeze(1), rtol=0, atol=1e-5)
    head = engine.model.get_output_embeddings()
    shifted = torch.zeros(engine.vocab_size)
    shifted[IMAGE_TOKEN_ID] = 100.0
    monkeypatch.setattr(head, "forward", lambda hidden: torch.nn.functional.linear(hidden, head.weight) + shifted)
    (given,) = generate(engine, [[1, 2, 3]], [[]])
    assert IMAGE_TOKEN_ID not in given.tokens and given.logprobs.max() < -50


def test_images_that_do_not_fit_are_refused(folder: Path, engine: TorchEngine, tmp_path: Path) -> None:
    image = prompt_image(folder, image_bytes(56, 84))
    prompt = [1, *placeholders(image), 5]
    for prompts, images in (([prompt], [[]]), ([prompt], [[image, image]]), ([[1, 5]], [[image]])):
        with pytest.raises(ValueError, match=r"sequence 0: \d+ image tokens for \d images"):
            generate(engine, prompts, images)
    smaller = prompt_image(folder, image_bytes(96, 128), max_pixels=64 * 64 + 4096)
    larger = prompt_image(folder, image_bytes(96, 128))
    assert smaller.grid != larger.grid
    with pytest.raises(ValueError, match=r"for who asks: give both sides one processor and one data\.max_pixels"):
        generate(engine, [[1, *placeholders(smaller)]], [[smaller]])
    text = TorchEngine.from_pretrained(make_hf_model(tmp_path / "text", "qwen3"), CONFIG)
    with pytest.raises(EngineRejected, match="sees no images"):
        generate(text, [prompt], [[image]])
    assert asyncio.run(text.info()).image_processing is None
    assert asyncio.run(engine.info()).image_processing is not None
