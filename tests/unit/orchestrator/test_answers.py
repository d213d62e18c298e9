"""Teachers' answers with real engines: the teacher's own, drawn once, found again by nobody but who asks the same."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.base.files.records import Records
from mopd.base.types import ROLLOUT_FIELDS, Prompt, SampleMeta, UserError
from mopd.config.groups import Assignment, TeacherConfig, TorchEngineConfig
from mopd.conversion.hf.manifest import Manifest
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import EngineRejected, SamplingParams, ToDraw
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.answers import AnswerWorker
from tests.fixtures.tiny_models import EOS_ID, VOCAB_SIZE, make_hf_model
from tests.unit.orchestrator.groups import teacher_of

NAMES = ("first", "second")
MORE = {"ground_truth": None, "extra_info": None, "place": ""}
DATA = PromptDataset(
    [PromptRow(domain=domain, text="", tokens=(5 + i, 7, 9), **MORE) for domain in ("math", "both") for i in range(40)]
)
PROMPTS = [Prompt(sample_id=100 + row, domain="math", row=row) for row in range(6)]
GREEDY, SAMPLED = (SamplingParams(max_new_tokens=6, temperature=temperature) for temperature in (0.0, 1.0))


class Mute:
    """A teacher that must not be asked."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise EngineRejected("drawn anew")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TorchEngine]:
    """Two teachers of different weights."""
    folder = tmp_path_factory.mktemp("teachers")
    return {
        name: TorchEngine.from_pretrained(
            make_hf_model(folder / name, seed=seed, scale=0.1), TorchEngineConfig(dtype="float32")
        )
        for seed, name in enumerate(NAMES)
    }


def worker_of(engines: Mapping[str, Any], folder: Path | None, **more: Any) -> AnswerWorker:
    teachers = {
        "first": TeacherConfig(model="m", domains=("math", "both"), weight=1.0),
        "second": TeacherConfig(model="m", domains=("both",), weight=3.0),
    }
    manifests = {
        f"teachers.{name}": Manifest(path="", config_sha256="c", weights_sha256=name, tokenizer_sha256="t")
        for name in NAMES
    }
    options = {"sampling": GREEDY, "seed": 1, "samples_per_prompt": 1, "vocab_size": VOCAB_SIZE} | more
    store = None if folder is None else Records(folder, {"content": "answers"})
    groups = {name: teacher_of(name, engine) for name, engine in engines.items()}
    return AnswerWorker(groups, Assignment(teachers), manifests, LocalDataPlane(), DATA, store=store, **options)


def answer(
    worker: AnswerWorker, prompts: list[Prompt] = PROMPTS, **options: Any
) -> tuple[list[SampleMeta], dict[str, list[Tensor]]]:
    async def run() -> tuple[list[SampleMeta], dict[str, list[Tensor]]]:
        metas = await worker.generate(prompts, **options)
        return metas, await worker.plane.get([meta.sample_id for meta in metas], (*ROLLOUT_FIELDS, "token_versions"))

    return asyncio.run(run())


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_answers_are_the_teachers_own_and_a_second_run_draws_none(
    engines: dict[str, TorchEngine], tmp_path: Path, sampling: SamplingParams
) -> None:
    """Samples are those of a rollout, field by field; the version is that of the student once the answers are there."""
    first = worker_of(engines, tmp_path, sampling=sampling)
    metas, fields = answer(first, version=lambda: 7)
    assert [meta.sample_id for meta in metas] == [prompt.sample_id for prompt in PROMPTS]
    assert {meta.weight_version for meta in metas} == {7} and set(fields["token_versions"][0].tolist()) == {7}
    assert [own[:3].tolist() for own in fields["tokens"]] == [list(DATA.row(p.row).tokens) for p in PROMPTS]
    assert [meta.truncated for meta in metas] == [own[-1].item() != EOS_ID for own in fields["tokens"]]
    if sampling == GREEDY:
        drawn = asyncio.run(
            engines["first"].generate(ToDraw([DATA.row(p.row).tokens for p in PROMPTS], GREEDY, range(6)))
        )
        assert all(own[3:].equal(one.tokens) for own, one in zip(fields["tokens"], drawn, strict=True))
    assert first.take_numbers() == {"stored_answers_share": 0.0} and first.take_numbers() == {}
    again = worker_of(dict.fromkeys(NAMES, Mute()), tmp_path, sampling=sampling)
    metas_again, fields_again = answer(again, version=lambda: 7)
    assert metas_again == metas and again.take_numbers() == {"stored_answers_share": 1.0}
    for name, own in fields.items():
        assert all(map(torch.equal, own, fields_again[name])), name


@pytest.mark.parametrize(
    ("sampling", "change", "is_found"),
    [
        (GREEDY, {"seed": 2}, True),
        (SAMPLED, {"seed": 2}, False),
        (GREEDY, {"sampling": SAMPLED}, False),
        (GREEDY, {"sampling": replace(GREEDY, max_new_tokens=5)}, False),
        (GREEDY, {"sampling": replace(GREEDY, stop=("a",))}, False),
        (GREEDY, {"sampling": replace(GREEDY, stop_token_ids=(5,))}, False),
        (GREEDY, {"sampling": replace(GREEDY, ignore_eos=True)}, False),
        (GREEDY, {"manifest": {"weights_sha256": "other"}}, False),
        (GREEDY, {"manifest": {"tokenizer_sha256": "other"}}, False),
        (SAMPLED, {"samples_per_prompt": 2}, False),
    ],
)
def test_an_answer_is_found_by_the_same_question_alone(
    engines: dict[str, TorchEngine], tmp_path: Path, sampling: SamplingParams, change: dict[str, Any], is_found: bool
) -> None:
    answer(worker_of(engines, tmp_path, sampling=sampling))
    other = worker_of(dict.fromkeys(NAMES, Mute()), tmp_path, sampling=sampling)
    manifest = replace(other.manifests["teachers.first"], **change.get("manifest", {}))
    other = replace(other, **{key: value for key, value in change.items() if key != "manifest"})
    other = replace(other, manifests={**other.manifests, "teachers.first": manifest})
    if is_found:
        answer(other)
    else:
        with pytest.raises(UserError, match=r"teachers.first gave no answer to prompts .*drawn anew"):
            answer(other)


def test_one_prompt_in_two_epochs_has_one_answer_and_several_draws_differ(engines: dict[str, TorchEngine]) -> None:
    """Also where nothing is kept: within one call. What is not asked of the store does not count."""
    twice = [PROMPTS[0], replace(PROMPTS[0], sample_id=300)]
    worker = worker_of(engines, None, sampling=SAMPLED, samples_per_prompt=3)
    metas, fields = answer(worker, twice)
    assert worker.take_numbers() == {}
    texts = [tuple(own.tolist()) for own in fields["tokens"]]
    assert [meta.sample_id for meta in metas] == [300, 301, 302, 900, 901, 902]
    assert texts[:3] == texts[3:] and len(set(texts)) > 1


def test_an_ensemble_answers_by_its_weights(engines: dict[str, TorchEngine]) -> None:
    """One teacher of weight 1 and one of 3: each prompt's answer is one of theirs, a quarter the first's."""
    prompts = [Prompt(sample_id=row, domain="both", row=row) for row in range(40, 80)]
    _, fields = answer(worker_of(engines, None, sampling=GREEDY), prompts)
    own = {
        name: asyncio.run(engine.generate(ToDraw([DATA.row(p.row).tokens for p in prompts], GREEDY, range(40))))
        for name, engine in engines.items()
    }
    by = [[name for name in NAMES if own[name][i].tokens.equal(fields["tokens"][i][3:])] for i in range(40)]
    assert all(by) and ["first"] in by and ["second"] in by
    assert 4 <= by.count(["first"]) <= 16  # of a binomial of 40 and 1/4 that is 99.5 %; the seed is fixed


def test_ids_that_the_student_lacks_are_refused(engines: dict[str, TorchEngine], tmp_path: Path) -> None:
    highest = max(int(own[3:].max()) for own in answer(worker_of(engines, tmp_path))[1]["tokens"])
    for folder in (None, tmp_path):  # drawn and stored
        with pytest.raises(UserError, match=rf"^teachers.first answered with token {highest}, which .* {highest} tok"):
            answer(worker_of(engines, folder, vocab_size=highest))


def test_ids_that_stand_for_images_are_refused(engines: dict[str, TorchEngine], tmp_path: Path) -> None:
    """A teacher that reads text alone may draw them."""
    drawn = int(answer(worker_of(engines, tmp_path))[1]["tokens"][0][3])
    for folder in (None, tmp_path):  # drawn and stored
        with pytest.raises(UserError, match=rf"^teachers.first answered with token {drawn}, which stands for an image"):
            answer(worker_of(engines, folder, vision_ids=(drawn,)))
