"""Scores that are kept: found by whoever asks the same teacher the same, by nobody else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.base.files.records import Records
from mopd.base.types import HIDDEN_FIELD, TEACHER_FIELDS, TOKEN_FIELD, PromptImage, SampleMeta, UserError
from mopd.config.groups import Assignment, TeacherConfig, TorchEngineConfig
from mopd.config.load import load_recipe
from mopd.config.payloads import Asked
from mopd.conversion.hf.manifest import Manifest
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import EngineRejected, Scores, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.kept.scores import ScoreCache, open_score_cache
from mopd.orchestrator.teachers import TeacherWorker
from tests.fixtures.recipe import RECIPE
from tests.fixtures.samples import meta_of
from tests.fixtures.tiny_models import VOCAB_SIZE, make_hf_model
from tests.unit.orchestrator.groups import router_of, teacher_of

TEACHERS = {
    "a": TeacherConfig(model="unread", domains=("math",), weight=3.0),
    "b": TeacherConfig(model="unread", domains=("math", "code"), weight=1.0),
}
METAS = [meta_of(i, "code" if i == 2 else "math", prompt=2 + i, response=3 + i) for i in range(3)]
TOKENS = [torch.arange(3, 3 + meta.length) % VOCAB_SIZE for meta in METAS]


class Counted:
    """A real engine that counts the samples that it is asked about, and may refuse those of one length."""

    def __init__(self, engine: TorchEngine, refused: int = 0) -> None:
        self.engine, self.refused, self.num_asked = engine, refused, 0

    async def score(self, asked: ToScore) -> list[Scores]:
        if any(len(own) == self.refused for own in asked.tokens):
            raise EngineRejected("b.0: no")
        self.num_asked += len(asked)
        return await self.engine.score(asked)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TorchEngine]:
    root = tmp_path_factory.mktemp("teachers")
    folders = {name: make_hf_model(root / name, seed=i) for i, name in enumerate(TEACHERS)}
    return {
        name: TorchEngine.from_pretrained(path, TorchEngineConfig(dtype="float32")) for name, path in folders.items()
    }


def score(
    engines: Mapping[str, TorchEngine],
    folder: Path,
    metas: Sequence[SampleMeta] = METAS,
    tokens: Sequence[Tensor] = TOKENS,
    *,
    identities: Mapping[str, str] | None = None,
    top_k: int = 4,
    temperature: float = 1.0,
    max_bytes: int = 2**30,
    refused: int = 0,
    payload: Asked | None = None,
    teachers: Mapping[str, TeacherConfig] = TEACHERS,
) -> tuple[dict[str, list[Tensor]], dict[str, int], dict[str, float]]:
    """Score as a run that starts now would: fields of the scored samples, samples asked of each teacher, metrics."""
    scorers = {name: Counted(engine, refused) for name, engine in engines.items()}
    ids = {name: f"hash of {name}" for name in TEACHERS} if identities is None else dict(identities)

    async def run() -> dict[str, list[Tensor]]:
        plane = LocalDataPlane()
        await plane.put(metas, {"tokens": list(tokens)})
        groups = {name: teacher_of(name, scorer) for name, scorer in scorers.items()}
        names = TEACHER_FIELDS[2:] if payload is not None and not payload.width else TEACHER_FIELDS
        if payload is not None and payload.hidden:
            names = (*names, HIDDEN_FIELD)
            for group in groups.values():
                group.hidden_size = 64
        wanted = dict.fromkeys(groups, payload or Asked(own=top_k))
        options: dict[str, Any] = {"temperature": temperature, "keep_going": bool(refused)}
        worker = TeacherWorker(groups, Assignment(teachers), plane, asked=wanted, always_ids=[4, 9], **options)
        records = Records(folder, {"content": "teacher scores"}, max_bytes=max_bytes)
        worker.cache = cache = ScoreCache(records, ids)
        failed = {failure.sample.sample_id for failure in await worker.score(metas)}
        numbers.update(cache.take_numbers())
        return await plane.get([meta.sample_id for meta in metas if meta.sample_id not in failed], names)

    numbers: dict[str, float] = {}
    fields = asyncio.run(run())
    return fields, {name: scorer.num_asked for name, scorer in scorers.items()}, numbers


def test_what_was_asked_is_found_bit_for_bit(engines: dict[str, TorchEngine], tmp_path: Path) -> None:
    fresh, asked, numbers = score(engines, tmp_path)
    assert asked == {"a": 2, "b": 3} and numbers["scores_found_share"] == 0
    again, asked, numbers = score(engines, tmp_path)
    assert asked == {"a": 0, "b": 0} and numbers["scores_found_share"] == 1
    assert numbers["scores_cache_bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir())
    for name in TEACHER_FIELDS:
        assert all(torch.equal(one, other) for one, other in zip(fresh[name], again[name], strict=True))
        assert [own.dtype for own in fresh[name]] == [own.dtype for own in again[name]]


@pytest.mark.parametrize("payload", [Asked(own=0), Asked(own=0, always=2), Asked(own=4, always=2)])
def test_ids_that_were_given_are_part_of_what_was_asked(
    engines: dict[str, TorchEngine], tmp_path: Path, payload: Asked
) -> None:
    names = TEACHER_FIELDS if payload.width else TEACHER_FIELDS[2:]
    fresh, asked, _ = score(engines, tmp_path, payload=payload)
    assert asked == {"a": 2, "b": 3} and score(engines, tmp_path)[1] == asked
    again, asked, _ = score(engines, tmp_path, payload=payload)
    assert asked == {"a": 0, "b": 0}
    for name in names:
        assert all(torch.equal(one, other) for one, other in zip(fresh[name], again[name], strict=True))


def test_hidden_states_are_kept_too(engines: dict[str, TorchEngine], tmp_path: Path) -> None:
    """Scores without them do not pass for scores with them."""
    alone = {"a": TeacherConfig(model="unread", domains=("math",)), "b": TeacherConfig(model="u", domains=("code",))}
    options: dict[str, Any] = {"payload": Asked(hidden=True), "teachers": alone}
    score(engines, tmp_path, payload=Asked(), teachers=alone)
    fresh, asked, _ = score(engines, tmp_path, **options)
    assert asked == {"a": 2, "b": 1}
    again, asked, _ = score(engines, tmp_path, **options)
    assert asked == {"a": 0, "b": 0}
    for name in (TOKEN_FIELD, HIDDEN_FIELD):
        assert all(torch.equal(one, other) for one, other in zip(fresh[name], again[name], strict=True))
    assert {(own.dtype, own.shape[1]) for own in again[HIDDEN_FIELD]} == {(torch.bfloat16, 64)}


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ({"identities": {"a": "hash of a", "b": "another"}}, {"a": 0, "b": 3}),
        ({"top_k": 3}, {"a": 2, "b": 3}),
        ({"temperature": 1.5}, {"a": 2, "b": 3}),
        ({"tokens": [TOKENS[0].flip(0), *TOKENS[1:]]}, {"a": 1, "b": 1}),
        ({"metas": [meta_of(0, "math", prompt=1, response=4), *METAS[1:]]}, {"a": 1, "b": 1}),
    ],
    ids=lambda value: next(iter(value)) if "a" not in value else None,
)
def test_nothing_else_is(
    engines: dict[str, TorchEngine], tmp_path: Path, change: dict[str, Any], asked: dict[str, int]
) -> None:
    score(engines, tmp_path)
    kept, counts, _ = score(engines, tmp_path, **change)
    assert counts == asked
    alone, _, _ = score(engines, tmp_path / "empty", **change)
    assert all(torch.equal(*pair) for pair in zip(kept["teacher_ids"], alone["teacher_ids"], strict=True))


def test_a_refused_sample_is_asked_again(engines: dict[str, TorchEngine], tmp_path: Path) -> None:
    refused = METAS[2].length
    fields, _, _ = score(engines, tmp_path, refused=refused)
    assert len(fields["teacher_ids"]) == 2
    assert score(engines, tmp_path)[1] == {"a": 0, "b": 1}


def test_a_full_folder_takes_nothing_more(
    engines: dict[str, TorchEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fields, asked, _ = score(engines, tmp_path, max_bytes=900)
    assert asked == {"a": 2, "b": 3} and len(fields["teacher_ids"]) == 3
    assert caplog.text.count("as large as data.scores_cache_max_gib allows") == 1
    assert 0 < score(engines, tmp_path)[2]["scores_found_share"] < 1


def opened(folder: Path, **change: Any) -> str | ScoreCache | None:
    """Open the cache of a recipe with one teacher, whose manifest or engine differs by ``change``."""
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    recipe = load_recipe(path, [f"data.scores_cache={folder / 'scores'}"]).recipe
    hashes = {name: change.get(name, name) for name in ("config_sha256", "weights_sha256", "tokenizer_sha256")}
    engine = TorchEngine.from_pretrained(folder / "model", TorchEngineConfig(dtype=change.get("dtype", "float32")))
    routers = {"teachers.math": router_of("math", engine)}
    return asyncio.run(open_score_cache(recipe, routers, {"teachers.math": Manifest(path="math", **hashes)}))


def test_a_teacher_is_known_by_all_that_decides_its_scores(tmp_path: Path) -> None:
    make_hf_model(tmp_path / "model")
    changes: list[dict[str, str]] = [{}, {"dtype": "bfloat16"}]
    changes += [{name: "other"} for name in ("config_sha256", "weights_sha256", "tokenizer_sha256")]
    caches = [opened(tmp_path, **change) for change in changes]
    asked = ToScore(TOKENS[:1], [METAS[0].prompt_length], top_k=4, temperature=1.0)
    keys = {cache.keys("math", asked)[0] for cache in caches if isinstance(cache, ScoreCache)}
    assert len(keys) == len(changes)
    again = opened(tmp_path)
    assert isinstance(again, ScoreCache) and again.keys("math", asked)[0] in keys
    for change in ({"prompt_lengths": [METAS[0].prompt_length + 1]}, {"temperature": 0.5}):
        assert again.keys("math", replace(asked, **change))[0] not in keys  # type: ignore[arg-type]
    images = [PromptImage(digest=bytes([i]), grid=(1, 2, 2), load=bytes) for i in range(2)]
    seen = {
        again.keys("math", replace(asked, images=[shown]))[0]
        for shown in ([images[0]], [images[1]], images, images[::-1])
    }
    assert len(seen | keys) == 4 + len(keys) and again.keys("math", replace(asked, images=[[]]))[0] in keys
    ids = torch.arange(6 * METAS[0].response_length, dtype=torch.int32)
    given = [ids.view(-1, 6), ids.view(-1, 6) + 1, ids[: len(ids) // 2].view(-1, 3), ids.view(-1, 3)]
    told = {again.keys("math", replace(asked, given=[own]))[0] for own in given}
    assert len(told | keys) == len(given) + len(keys)
    with pytest.raises(UserError, match=r"teachers.math.model 'math' holds no weights, so that nothing tells whose"):
        opened(tmp_path, weights_sha256="")
    Records(tmp_path / "scores", {"content": "samples"}).append(b"x", {})
    with pytest.raises(UserError, match="content is 'samples' there, and 'teacher scores' is asked for"):
        opened(tmp_path)


def test_a_record_that_holds_no_scores_is_told(engines: dict[str, TorchEngine], tmp_path: Path) -> None:
    score(engines, tmp_path)
    records = Records(tmp_path)
    for key, arrays in list(records.items()):
        records.append(key, {**arrays, "logprobs": arrays["logprobs"] + 1})
    with pytest.raises(UserError, match=r"data.scores_cache: a record of .* holds no scores"):
        score(engines, tmp_path)
