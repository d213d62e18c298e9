"""Teachers that read more than the student: their scores are those of a forward on their own tokens, and no offset, no
token and no length of a view comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mopd.base.types import TEACHER_FIELDS, SampleMeta
from mopd.config.data import DataConfig
from mopd.config.groups import TeacherConfig, TorchEngineConfig
from mopd.config.losses import TopKLossConfig
from mopd.config.schedule import PreflightConfig, ScheduleConfig
from mopd.config.schema import Recipe
from mopd.config.student import StudentConfig
from mopd.config.views import ViewConfig
from mopd.data.prompts import PromptDataset, PromptRow, PromptView
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import Scores, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.launch.checks.inputs import Check
from mopd.orchestrator.preflight.scores import ScoresCheck
from mopd.orchestrator.teachers import TeacherGroup, TeacherWorker
from tests.fixtures.samples import meta_of
from tests.fixtures.tiny_models import BOS_ID, VOCAB_SIZE, make_hf_model
from tests.unit.orchestrator.groups import teacher_of

TOP_K = 5
LENGTHS = [(4, 3), (9, 6), (2, 1), (7, 8), (5, 4), (3, 9)]
"""Tokens of each sample's prompt and response."""
VIEWS = {"hinted": 23, "persona": 11}
"""Tokens by which each teacher's prompts are longer."""
DOMAINS = {"plain": ("math", "code"), "hinted": ("math",), "persona": ("math", "law")}
ENGINE = TorchEngineConfig(dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("teacher") / "model")


FAULTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "none": lambda own, _: own,
    "first token lost": lambda own, _: own[1:],
    "first token twice": lambda own, _: torch.cat([own[:1], own]),
    "last token of the prompt lost": lambda own, start: torch.cat([own[: start - 1], own[start:]]),
}
"""What an off-by-one on the way of a view makes of it: rows that are sound by themselves, after another prompt."""


class Shifted:
    """A teacher's engine that reads each prompt as ``fault`` tells."""

    def __init__(self, engine: TorchEngine, fault: str) -> None:
        self.engine, self.fault = engine, fault

    async def info(self) -> Any:
        return await self.engine.info()

    async def generate(self, *args: Any, **options: Any) -> Any:
        return await self.engine.generate(*args, **options)

    async def score(self, asked: ToScore) -> list[Scores]:
        given = list(zip(asked.tokens, asked.prompt_lengths, strict=True))
        read = [FAULTS[self.fault](own, start) for own, start in given]
        starts = [start + len(own) - len(sent) for own, (sent, start) in zip(read, given, strict=True)]
        return await self.engine.score(replace(asked, tokens=read, prompt_lengths=starts))


def random_ids(generator: torch.Generator, length: int) -> tuple[int, ...]:
    return (BOS_ID, *torch.randint(3, VOCAB_SIZE, (length - 1,), generator=generator).tolist())


def samples() -> tuple[PromptDataset, list[SampleMeta], list[Tensor], dict[int, int]]:
    """Return rows in another order than the samples, the samples with their tokens, and the row of each."""
    generator = torch.Generator().manual_seed(5)
    rows, metas, tokens, of_sample = [], [], [], {}
    for i, (prompt, response) in enumerate(LENGTHS):
        domain = ("math", "code", "law")[i % 3]
        own = random_ids(generator, prompt)
        views = {
            name: PromptView("", random_ids(generator, prompt + more))
            for name, more in VIEWS.items()
            if domain in DOMAINS[name]
        }
        row = PromptRow(
            domain=domain, text="", tokens=own, ground_truth=None, extra_info=None, place=f"row {i}", views=views
        )
        rows.insert(0, row)
        metas.append(meta_of(40 + i, domain, prompt=prompt, response=response))
        tokens.append(torch.tensor([*own, *random_ids(generator, response + 1)[1:]]))
        of_sample[40 + i] = len(LENGTHS) - 1 - i
    return PromptDataset(rows), metas, tokens, of_sample


def recipe_of(folder: Path) -> Recipe:
    views = {name: ViewConfig(prompt="{prompt}", max_prompt_length=64) for name in VIEWS}
    return Recipe(
        run_dir="unused",
        student=StudentConfig(model="unused"),
        teachers={
            name: TeacherConfig(model=str(folder), domains=own, weight=1.0, view=views.get(name))
            for name, own in DOMAINS.items()
        },
        data=DataConfig(train=("unused",), max_prompt_length=16),
        loss=TopKLossConfig(top_k=TOP_K),
        schedule=ScheduleConfig(steps=1, prompts_per_step=1),
        preflight=PreflightConfig(compare_with_transformers=True),
    )


def read_by(name: str, meta: SampleMeta, tokens: Tensor, row: PromptRow) -> tuple[Tensor, int]:
    """The tokens that a teacher reads, and where the response begins, written from the definition."""
    prompt = list(row.views[name].tokens) if name in VIEWS else list(row.tokens)
    return torch.tensor(prompt + tokens.tolist()[meta.prompt_length :]), len(prompt)


def test_scores_are_those_of_a_forward_on_what_the_teacher_reads(folder: Path) -> None:
    """Views and lengths mixed in one batch, three teachers of one domain with views of their own or none, float64 as
    the reference. The fields have the response's length, and the student's own tokens are as they were."""
    dataset, metas, tokens, rows = samples()
    recipe = recipe_of(folder)
    engine = TorchEngine.from_pretrained(folder, ENGINE)
    groups = {name: teacher_of(name, engine) for name in DOMAINS}

    async def run() -> dict[str, list[Tensor]]:
        plane = LocalDataPlane()
        await plane.put(metas, {"tokens": [own.clone() for own in tokens]})
        worker = TeacherWorker(groups, recipe.assignment, plane, asked=recipe.asked, temperature=1.0, dataset=dataset)
        assert await worker.score(metas, rows) == []
        return await plane.get([meta.sample_id for meta in metas], ("tokens", *TEACHER_FIELDS))

    fields = asyncio.run(run())
    assert all(map(torch.equal, fields["tokens"], tokens))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for i, (meta, own) in enumerate(zip(metas, tokens, strict=True)):
        names = recipe.assignment.teachers_of(meta.domain)
        sampled = []
        for place, name in enumerate(names):
            read, start = read_by(name, meta, own, dataset.row(rows[meta.sample_id]))
            with torch.no_grad():
                logprobs = model(read[None]).logits[0].log_softmax(-1)[start - 1 : -1]
            assert len(logprobs) == meta.response_length
            best, ids = logprobs.topk(TOP_K)
            assert torch.equal(fields["teacher_ids"][i][:, place].long(), ids)
            torch.testing.assert_close(fields["teacher_logprobs"][i][:, place].double(), best, rtol=0, atol=1e-5)
            sampled.append(logprobs.gather(-1, own[meta.prompt_length :, None]).squeeze(-1))
        mean = torch.stack(sampled).mean(0)
        torch.testing.assert_close(fields["teacher_token_logprobs"][i].double(), mean, rtol=0, atol=1e-5)
    # the views do matter here: without them the scores are others
    alone, start = tokens[0], metas[0].prompt_length
    with torch.no_grad():
        plain = model(alone[None]).logits[0].log_softmax(-1)[start - 1 : -1].topk(TOP_K).values
    assert (plain - fields["teacher_logprobs"][0][:, 1]).abs().max() > 0.1


def judged(folder: Path, name: str, group: TeacherGroup, *, is_compared: bool) -> Check:
    dataset, metas, tokens, rows = samples()
    recipe = recipe_of(folder)
    preflight = PreflightConfig(compare_with_transformers=is_compared)
    recipe = replace(recipe, preflight=preflight, teachers={name: recipe.teachers[name]})
    own = [i for i, meta in enumerate(metas) if meta.domain in DOMAINS[name]]
    metas, tokens = [metas[i] for i in own], [tokens[i] for i in own]

    async def judge() -> Check:
        plane = LocalDataPlane()
        await plane.put(metas, {"tokens": tokens})
        worker = TeacherWorker(
            {name: group}, recipe.assignment, plane, asked=recipe.asked, temperature=1.0, dataset=dataset
        )
        assert await worker.score(metas, rows) == []
        prompts = worker.prompts_of(name, metas, rows)
        return await ScoresCheck(recipe, group, plane, None, "float32", prompts=prompts).judge(metas)

    return asyncio.run(judge())


@pytest.mark.parametrize("is_compared", [True, False], ids=["transformers", "itself"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_shift_on_the_way_of_a_view_is_caught(folder: Path, fault: str, is_compared: bool) -> None:
    engine = Shifted(TorchEngine.from_pretrained(folder, ENGINE), fault)
    check = judged(folder, "hinted", teacher_of("hinted", engine), is_compared=is_compared)
    assert check.status == ("ok" if fault == "none" else "failed"), check.detail


def test_a_view_that_did_not_reach_the_teacher_is_caught(folder: Path) -> None:
    """Scores of the student's own prompts are not those of a teacher with a view."""
    dataset, metas, tokens, rows = samples()
    recipe = recipe_of(folder)
    group = teacher_of("hinted", TorchEngine.from_pretrained(folder, ENGINE))
    recipe = replace(recipe, teachers={"hinted": recipe.teachers["hinted"]})
    own = [(meta, sequence) for meta, sequence in zip(metas, tokens, strict=True) if meta.domain == "math"]
    metas, tokens = [meta for meta, _ in own], [sequence for _, sequence in own]

    async def judge() -> Check:
        plane = LocalDataPlane()
        await plane.put(metas, {"tokens": tokens})
        blind = TeacherWorker({"hinted": group}, recipe.assignment, plane, asked=recipe.asked, temperature=1.0)
        assert await blind.score(metas) == []
        seeing = TeacherWorker(
            {"hinted": group}, recipe.assignment, plane, asked=recipe.asked, temperature=1.0, dataset=dataset
        )
        with pytest.raises(KeyError):  # a sample whose row nobody told is not scored without its view
            await seeing.score(metas)
        prompts = seeing.prompts_of("hinted", metas, rows)
        return await ScoresCheck(recipe, group, plane, None, "float32", prompts=prompts).judge(metas)

    assert asyncio.run(judge()).status == "failed"
