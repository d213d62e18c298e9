"""Which server is the recipe's model: by its hashes, its size, or its scores on the fixed probe."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mopd.base.types import UserError
from mopd.config.groups import TorchEngineConfig
from mopd.conversion.hf.manifest import HASHES, Manifest, make_manifest
from mopd.engines.interface import EngineInfo, Scores, ToScore
from mopd.engines.replicas.identity import (
    Needs,
    fingerprint,
    fingerprint_difference,
    fingerprint_tokens,
    largest_difference,
    problems_of,
)
from mopd.engines.replicas.interface import Replica
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.tiny_models import VOCAB_SIZE, make_hf_model, make_tokenizer
from tests.fixtures.vision import VISION_VOCAB_SIZE, make_vision_model

NEEDS = Needs(length=256, num_ids=VOCAB_SIZE)


def manifest_of(folder: Path, cache: Path) -> Manifest:
    make_tokenizer(folder)
    return make_manifest(folder, cache_file=cache)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("identity") / "own", seed=1)


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Manifest:
    return manifest_of(folder, folder.parent / "cache.json")


@pytest.fixture(scope="module")
def info(folder: Path, manifest: Manifest) -> EngineInfo:
    """What a server of the folder says."""
    engine = TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    hashes = {name: getattr(manifest, name) for name in HASHES}
    return replace(asyncio.run(engine.info()), manifest=hashes)


def test_the_same_folder_has_no_problem(info: EngineInfo, manifest: Manifest) -> None:
    assert problems_of(info, manifest, NEEDS, key="teachers.math", is_rollout=False) == []


def test_other_weights_are_named_with_both_hashes(info: EngineInfo, manifest: Manifest, tmp_path: Path) -> None:
    other = manifest_of(make_hf_model(tmp_path / "other", seed=2), tmp_path / "cache.json")
    (problem,) = problems_of(info, other, NEEDS, key="teachers.math", is_rollout=False)
    assert problem.startswith("teachers.math: weights_sha256 is ")
    assert manifest.weights_sha256[:12] in problem and other.weights_sha256[:12] in problem
    assert problems_of(info, other, NEEDS, key="rollout", is_rollout=True) == []  # its weights are pushed


def test_another_architecture_cannot_take_the_students_weights(info: EngineInfo, tmp_path: Path) -> None:
    other = manifest_of(make_hf_model(tmp_path / "other", num_layers=3), tmp_path / "cache.json")
    (problem,) = problems_of(info, other, NEEDS, key="rollout", is_rollout=True)
    assert "config_sha256" in problem


def test_too_small_replicas_are_named(info: EngineInfo, manifest: Manifest) -> None:
    long = replace(NEEDS, length=257)
    (problem,) = problems_of(info, manifest, long, key="teachers.math", is_rollout=False)
    assert "it takes 256 tokens, data.max_prompt_length + rollout.max_response_length is 257" in problem
    (problem,) = problems_of(replace(info, max_logprobs=5), manifest, NEEDS, key="teachers.math", is_rollout=False)
    assert (
        f"it gives at most 5 log-probs per position, loss.top_k and always_ids ask for {VOCAB_SIZE}: lower" in problem
    )


def test_a_fingerprint_tells_models_apart_and_knows_its_own(folder: Path, tmp_path: Path) -> None:
    def take(path: Path) -> dict[str, object]:
        engine = TorchEngine.from_pretrained(path, TorchEngineConfig(dtype="float32"))
        replica = Replica(name="math.0", engine=engine)
        return asyncio.run(fingerprint(replica, vocab_size=VOCAB_SIZE, temperature=1.0))

    own, again, other = take(folder), take(folder), take(make_hf_model(tmp_path, seed=2))
    assert fingerprint_difference(own, again) < 1e-6
    assert fingerprint_difference(own, other) > 0.1
    assert largest_difference([own]) == 0
    assert largest_difference([own, again, other]) > 0.1
    assert fingerprint_difference(own, {**own, "vocab_size": 7}) == float("inf")


def test_the_probe_of_a_model_that_sees_images_has_no_place_of_one(tmp_path: Path) -> None:
    engine = TorchEngine.from_pretrained(make_vision_model(tmp_path), TorchEngineConfig(dtype="float32"))

    def take(*, sees_images: bool) -> dict[str, object]:
        replica = Replica(name="math.0", engine=engine)
        return asyncio.run(fingerprint(replica, vocab_size=VISION_VOCAB_SIZE, temperature=1.0, sees_images=sees_images))

    assert fingerprint_difference(take(sees_images=True), take(sees_images=True)) == 0
    with pytest.raises(ValueError, match="image tokens for 0 images"):
        take(sees_images=False)


def test_a_probe_that_cannot_be_scored_so_is_no_fingerprint() -> None:
    class Broken:
        async def score(self, asked: ToScore) -> list[Scores]:
            count = len(asked.tokens[0]) - 1
            nothing = torch.full((count, 1), -1.0)
            return [Scores(ids=nothing.int() + 2, logprobs=nothing, token_logprobs=torch.full((count,), torch.nan))]

    replica = Replica(name="math.0", engine=cast(Any, Broken()))
    with pytest.raises(UserError, match=r"math\.0 cannot have scored the fixed probe: .*not finite \(nan\)"):
        asyncio.run(fingerprint(replica, vocab_size=48, temperature=1.0))


def test_the_probe_is_the_same_everywhere() -> None:
    assert fingerprint_tokens(50_000)[:4] == [7632, 2576, 38171, 44212]
    assert len(set(fingerprint_tokens(50_000))) > 40
    assert all(0 <= token < 7 for token in fingerprint_tokens(7))
