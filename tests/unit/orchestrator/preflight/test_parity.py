"""A teacher's scores against its own folder: what is right passes in fp32, and each way to be wrong fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from mopd.base.types import PromptImage
from mopd.config.groups import TorchEngineConfig
from mopd.config.schedule import PreflightConfig
from mopd.engines.interface import ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.preflight.parity import Parity, Probe, Reference
from tests.fixtures.mistakes import MISTAKES, MistakenEngine
from tests.fixtures.tiny_models import BOS_ID, VOCAB_SIZE, make_hf_model
from tests.fixtures.vision import IMAGE_TOKEN_ID, image_bytes, make_vision_model

TOP_K = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parity")
    return {name: make_hf_model(root / name, seed=i) for i, name in enumerate(("own", "other"))}


def measure(folder: Path, scorer: TorchEngine, *, temperature: float = 1.0, dtype: str = "float32") -> Parity:
    """Three probes, compared with ``folder``. Not through a router, which would refuse some mistakes by themselves."""
    generator = torch.Generator().manual_seed(4)
    tokens = [
        torch.cat([torch.tensor([BOS_ID]), torch.randint(3, VOCAB_SIZE, (length,), generator=generator)])
        for length in (9, 14, 21)
    ]
    starts = [4, 5, 6]
    scores = asyncio.run(scorer.score(ToScore(tokens, starts, top_k=TOP_K, temperature=temperature)))
    probes = [
        Probe(tokens=t, prompt_length=n, ids=s.ids, logprobs=s.logprobs, token_logprobs=s.token_logprobs)
        for t, n, s in zip(tokens, starts, scores, strict=True)
    ]
    return Reference(str(folder), dtype).compare(probes, temperature=temperature)


def load(folder: Path) -> TorchEngine:
    return TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_right_scores_pass(folders: dict[str, Path], temperature: float) -> None:
    parity = measure(folders["own"], load(folders["own"]), temperature=temperature)
    assert parity.num_positions == 6 + 8 + 8
    assert abs(parity.kl) < 1e-7
    assert parity.mean_difference <= parity.max_difference < 1e-4


@pytest.mark.parametrize("mistake", [*MISTAKES, "swapped"])
def test_each_mistake_fails_both_limits(folders: dict[str, Path], mistake: str) -> None:
    """A mistake exceeds the limits by far, so that the wider ones of 16-bit engines catch it too."""
    engine = MistakenEngine.from_pretrained(
        folders["other" if mistake == "swapped" else "own"], TorchEngineConfig(dtype="float32")
    )
    engine.mistake = mistake  # type: ignore[attr-defined]
    parity = measure(folders["own"], engine)
    for dtype in ("float32", "bfloat16"):
        assert parity.kl > 2 * PreflightConfig().self_kl_limit(dtype)
        assert parity.mean_difference > 2 * PreflightConfig().logprob_limit(dtype)


def test_limits_follow_the_dtype_unless_they_are_set() -> None:
    assert PreflightConfig().self_kl_limit("float32") < PreflightConfig().self_kl_limit("bfloat16")
    assert PreflightConfig().logprob_limit("float32", "float32") < PreflightConfig().logprob_limit(
        "float32", "bfloat16"
    )
    assert PreflightConfig(max_self_kl=0.5).self_kl_limit("float32") == 0.5
    assert PreflightConfig(max_logprob_difference=0.25).logprob_limit("float32") == 0.25


def test_a_reference_sees_the_images_of_a_prompt(tmp_path: Path) -> None:
    """Two of unequal size in one prompt, none in the other. With the wrong image the scores are another's."""
    folder = make_vision_model(tmp_path / "own")
    grids = ((1, 4, 6), (1, 6, 4))
    files = [image_bytes(28 * rows // 2, 28 * columns // 2, seed=rows) for _, rows, columns in grids]
    images = tuple(
        PromptImage(digest=bytes([i]) * 16, grid=grid, load=partial(bytes, file))
        for i, (grid, file) in enumerate(zip(grids, files, strict=True))
    )
    text = torch.tensor([BOS_ID, 5, 6, 7, 8, 9, 10, 11])
    places = [torch.full((rows * columns // 4,), IMAGE_TOKEN_ID) for _, rows, columns in grids]
    tokens = [torch.cat([text[:3], places[0], text[3:4], places[1], text[4:]]), text]
    starts, seen = [len(tokens[0]) - 3, 4], [images, ()]
    scores = asyncio.run(load(folder).score(ToScore(tokens, starts, top_k=TOP_K, temperature=1.0, images=seen)))

    def parity(shown: Sequence[Sequence[PromptImage]]) -> Parity:
        probes = [
            Probe(tokens=t, prompt_length=n, ids=s.ids, logprobs=s.logprobs, token_logprobs=s.token_logprobs, images=i)
            for t, n, s, i in zip(tokens, starts, scores, shown, strict=True)
        ]
        return Reference(str(folder), "float32").compare(probes, temperature=1.0)

    right = parity(seen)
    assert abs(right.kl) < 1e-7 and right.max_difference < 1e-4
    other = replace(images[0], load=partial(image_bytes, 56, 84, 77))
    assert parity([(other, images[1]), ()]).mean_difference > 0.01
