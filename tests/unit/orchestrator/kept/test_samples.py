"""Samples that are kept come back as they were, in their order, and only to a recipe that may train on them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mopd.base.files.records import Records
from mopd.base.types import Batch, Prompt, SampleMeta, UserError
from mopd.config.load import load_recipe
from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import Manifest
from mopd.data_plane.local import LocalDataPlane
from mopd.orchestrator.kept.samples import (
    OF_TEXTS,
    SampleKeeper,
    StoredSamples,
    StoredWorker,
    about_samples,
    open_stored,
    steps_of,
    write_samples,
)
from tests.fixtures.recipe import RECIPE
from tests.fixtures.samples import meta_of
from tests.fixtures.tiny_models import make_hf_model

STUDENT = Manifest(path="s", config_sha256="c", weights_sha256="w", tokenizer_sha256="t")
GRADIENT = (
    "loss={type: policy_gradient, task_reward_weight: 1, correction: {type: icepop}}",
    "rollout.samples_per_prompt=2",
)
DENSE = ("loss={type: topk_forward_kl, task_reward_weight: 1, correction: {type: icepop}}", GRADIENT[1])
STORED = ("schedule.on_policy_fraction=0.5",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_hf_model(tmp_path / "student")
    return tmp_path


def recipe_of(folder: Path, *settings: str, scored: bool = False) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    more = [f"data.scored=[{folder / 'samples'}]", *STORED] if scored else []
    return load_recipe(path, [f"student.model={folder / 'student'}", *more, *settings]).recipe


def step_of(first: int, num: int = 4, *, per_prompt: int = 2) -> tuple[list[SampleMeta], dict[str, list[Tensor]]]:
    generator = torch.Generator().manual_seed(first)
    metas, fields = [], {"tokens": [], "loss_mask": [], "rollout_logprobs": [], "task_advantage": []}  # type: ignore[var-annotated]
    for i in range(num):
        prompt, response = 1 + i // per_prompt, 2 + (first + i) % 3
        mask = torch.rand(response, generator=generator) < 0.7
        meta = meta_of(first + i, ("math", "code")[i // per_prompt % 2], 7, prompt=prompt, response=response)
        metas.append(replace(meta, num_loss_tokens=int(mask.sum()), truncated=i == 1))
        fields["tokens"].append(torch.randint(0, 2**31 - 1, (prompt + response,), generator=generator))
        fields["loss_mask"].append(mask)
        for name in ("rollout_logprobs", "task_advantage"):
            fields[name].append(-torch.rand(response, generator=generator))
    return metas, fields


def keep(folder: Path, recipe: Recipe, step: int, metas: Sequence[SampleMeta], fields: dict[str, list[Tensor]]) -> None:
    async def run() -> None:
        plane = LocalDataPlane()
        await plane.put(metas, fields)
        await SampleKeeper(folder / "samples", recipe, STUDENT, plane).keep(step, Batch(samples=tuple(metas)))

    asyncio.run(run())


def test_what_a_run_keeps_is_trained_on_as_it_was(folder: Path) -> None:
    recipe = recipe_of(folder, *GRADIENT)
    steps = {2: step_of(8), 1: step_of(0), 3: step_of(16)}
    keep(folder, recipe, 1, *step_of(100, num=6))  # of a life before the checkpoint that the run went on from
    for step, (metas, fields) in steps.items():
        keep(folder, recipe, step, metas, fields)
    assert steps_of(Records(folder / "samples")) == [1, 2, 3]
    stored = open_stored(recipe_of(folder, *GRADIENT, scored=True), STUDENT)
    assert stored is not None and stored.domains == ["math", "code"] * 3

    async def load() -> tuple[list[SampleMeta], dict[str, list[Tensor]]]:
        plane = LocalDataPlane()
        prompts = [Prompt(sample_id=50 + row, domain=stored.domains[row], row=row) for row in (3, 4, 1)]
        metas = await StoredWorker(stored, plane, recipe.loss_fields(1)).load(prompts, weight_version=9)
        return metas, await plane.get([meta.sample_id for meta in metas], list(steps[1][1]))

    metas, fields = asyncio.run(load())
    wanted = [(steps[step], i) for step, start in ((2, 2), (3, 0), (1, 2)) for i in (start, start + 1)]
    assert [meta.sample_id for meta in metas] == [106, 107, 108, 109, 102, 103]
    for i, ((own, expected), j) in enumerate(wanted):
        assert metas[i] == replace(own[j], sample_id=metas[i].sample_id, weight_version=9)
        for name, tensors in expected.items():
            assert fields[name][i].dtype == tensors[j].dtype and torch.equal(fields[name][i], tensors[j])


def test_texts_have_no_logprobs(folder: Path) -> None:
    metas, fields = step_of(0)
    about = about_samples(recipe_of(folder, "rollout.samples_per_prompt=2"), STUDENT, sampling=OF_TEXTS)
    texts = {name: fields[name] for name in ("tokens", "loss_mask")}
    write_samples(Records(folder / "samples", about), 0, metas, texts)
    _, own = StoredSamples([folder / "samples"], samples_per_prompt=2).read(1)[0]
    assert torch.equal(own["tokens"], fields["tokens"][2]) and own["rollout_logprobs"].isnan().all()


@pytest.mark.parametrize(
    ("made_by", "settings", "line"),
    [
        (
            (),
            ("rollout.samples_per_prompt=1",),
            "samples_per_prompt of its samples is '2', and '1' here: set rollout.sam",
        ),
        (("rollout.temperature=0.5", "loss.temperature=0.5"), (), None),
        (
            ("rollout.temperature=0.5",),
            ("loss={type: k2, correction: {type: tis}}",),
            "sampling of its samples is 'temperature 0.5, top_p 1.0, top_k -1', and 'temperature 1.0, .*a divergence",
        ),
        ((), GRADIENT, "task_advantage of its samples is 'none', and 'mean' here: set loss.task_advantage"),
        (GRADIENT, (*GRADIENT, "loss.task_advantage=grpo"), "task_advantage of its samples is 'mean', and 'grpo' here"),
        (DENSE, (*DENSE, "loss.task_advantage=grpo"), "task_advantage of its samples is 'mean', and 'grpo' here"),
        (
            (*DENSE, "rollout.temperature=0.5", "loss.temperature=0.5"),
            DENSE,
            "sampling of its samples is 'temperature 0.5, top_p 1.0, top_k -1', and 'temperature 1.0",
        ),
    ],
)
def test_samples_of_another_kind_are_refused(
    folder: Path, made_by: tuple[str, ...], settings: tuple[str, ...], line: str | None
) -> None:
    both = "rollout.samples_per_prompt=2"
    keep(folder, recipe_of(folder, both, *made_by), 1, *step_of(0))
    recipe = recipe_of(folder, both, *settings, scored=True)
    if line is None:
        assert open_stored(recipe, STUDENT) is not None
        return
    with pytest.raises(UserError, match=f"data.scored: .*samples: {line}"):
        open_stored(recipe, STUDENT)


def test_samples_of_another_tokenizer_are_refused(folder: Path) -> None:
    keep(folder, recipe_of(folder, "rollout.samples_per_prompt=2"), 1, *step_of(0))
    other = replace(STUDENT, tokenizer_sha256="u")
    with pytest.raises(UserError, match="tokenizer_sha256 of its samples is 't', and 'u' here: their ids mean other"):
        open_stored(recipe_of(folder, "rollout.samples_per_prompt=2", scored=True), other)


def test_what_holds_no_samples_is_refused(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"samples holds no samples: name the folder samples of a run with metrics.keep"
    ):
        open_stored(recipe_of(folder, scored=True), STUDENT)


@pytest.mark.parametrize("settings", [("metrics.keep_samples=true",), ()])
def test_samples_without_their_images_are_refused(folder: Path, settings: tuple[str, ...]) -> None:
    (folder / "student" / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    recipe = recipe_of(folder, *settings, scored=not settings)
    with pytest.raises(UserError, match=r"student.model sees images, which stored samples do not hold: leave both out"):
        open_stored(recipe, STUDENT)
    assert open_stored(recipe_of(folder), STUDENT) is None


@pytest.mark.parametrize("name", ["tokens", "loss_mask", "rollout_logprobs", "lengths", "domains"])
def test_records_that_contradict_each_other_are_told(folder: Path, name: str) -> None:
    keep(folder, recipe_of(folder, "rollout.samples_per_prompt=2"), 1, *step_of(0))
    records = Records(folder / "samples")
    for key, arrays in list(records.items()):
        cut = {name: arrays[name][: -5 if name == "domains" else -1]} if name in arrays else {}
        records.append(key, arrays | cut)
    with pytest.raises(UserError, match="the samples of step 1 are not what mopd writes"):
        StoredSamples([folder / "samples"], samples_per_prompt=2).read(1)
