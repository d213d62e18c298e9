"""A teacher's scores as they lie in the data plane: of one teacher, and of several that answer for a domain."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mopd.base.types import SampleMeta
from mopd.config.data import DataConfig
from mopd.config.groups import TeacherConfig, TorchEngineConfig
from mopd.config.losses import FullLossConfig, TopKLossConfig
from mopd.config.schedule import PreflightConfig, ScheduleConfig
from mopd.config.schema import Recipe
from mopd.config.student import StudentConfig
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import Scores
from mopd.engines.torch.engine import TorchEngine
from mopd.launch.checks.inputs import Check
from mopd.orchestrator.preflight.scores import ScoresCheck
from mopd.orchestrator.teachers import TeacherWorker
from tests.fixtures.samples import meta_of
from tests.fixtures.tiny_models import BOS_ID, VOCAB_SIZE, make_hf_model
from tests.unit.orchestrator.groups import teacher_of

TOP_K = 8
DRAWN = -1.5
"""The student's log-prob of each of its tokens."""
ENGINE = TorchEngineConfig(dtype="float32")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("teachers")
    return {name: make_hf_model(root / name, seed=i) for i, name in enumerate(("one", "other", "third"))}


def probes() -> tuple[list[SampleMeta], list[Tensor]]:
    """Return three samples with responses of five tokens, and their tokens."""
    generator = torch.Generator().manual_seed(3)
    metas = [meta_of(i, domain, prompt=4 + i, response=5) for i, domain in enumerate(("math", "code", "math"))]
    tokens = [
        torch.cat([torch.tensor([BOS_ID]), torch.randint(3, VOCAB_SIZE, (8 + i,), generator=generator)])
        for i in range(len(metas))
    ]
    return metas, tokens


class OtherStates(TorchEngine):
    """Its log-probs are right, its hidden states those of the row before."""

    async def score(self, *args: Any, **options: Any) -> list[Scores]:
        scores = await super().score(*args, **options)
        return [own if own.hidden is None else replace(own, hidden=own.hidden.roll(1, 0)) for own in scores]


def judged(
    folders: dict[str, Path],
    engines: dict[str, str],
    domains: dict[str, tuple[str, ...]],
    *,
    hidden: type[TorchEngine] | None = None,
    compares: bool = True,
) -> dict[str, list[Check]]:
    """Judgement and distance of every teacher by name, whose engine has the weights of the folder that ``engines``
    names; with ``hidden`` it is of that class, and sends hidden states."""
    payload: Any = {} if hidden is None else {"payload": "hidden"}
    teachers = {
        name: TeacherConfig(model=str(folders[name]), domains=own, weight=1.0, **payload)
        for name, own in domains.items()
    }
    recipe = Recipe(
        run_dir="unused",
        student=StudentConfig(model="unused"),
        teachers=teachers,
        data=DataConfig(train=("unused",)),
        loss=TopKLossConfig(top_k=TOP_K) if hidden is None else FullLossConfig(type="full_reverse_kl"),
        schedule=ScheduleConfig(steps=1, prompts_per_step=1),
        preflight=PreflightConfig(compare_with_transformers=compares),
    )
    kind = hidden or TorchEngine
    groups = {name: teacher_of(name, kind.from_pretrained(folders[engines[name]], ENGINE)) for name in teachers}
    for group in groups.values():
        group.hidden_size = 0 if hidden is None else 64
    metas, tokens = probes()

    async def judge() -> dict[str, list[Check]]:
        plane = LocalDataPlane()
        drawn = [torch.full((meta.response_length,), DRAWN) for meta in metas]
        masks = [torch.ones(meta.response_length, dtype=torch.bool) for meta in metas]
        await plane.put(metas, {"tokens": tokens, "rollout_logprobs": drawn, "loss_mask": masks})
        worker = TeacherWorker(groups, recipe.assignment, plane, asked=recipe.asked, temperature=1.0)
        assert await worker.score(metas) == []
        found = {}
        for name in teachers:
            own = [meta for meta in metas if name in recipe.assignment.teachers_of(meta.domain)]
            check = ScoresCheck(recipe, groups[name], plane, None, "float32")
            found[name] = [await check.judge(own), await check.distance(own)]
        return found

    return asyncio.run(judge())


DOMAINS = {
    "one for each domain": {"one": ("math",), "other": ("code",)},
    "two for one domain": {"one": ("math", "code"), "other": ("code",)},
    "two for both": {"one": ("code", "math"), "other": ("math", "code")},
}


@pytest.mark.parametrize("how", DOMAINS)
def test_every_teacher_is_held_against_its_own_folder(folders: dict[str, Path], how: str) -> None:
    domains = DOMAINS[how]
    right = judged(folders, {"one": "one", "other": "other"}, domains)
    assert {name: found[0].status for name, found in right.items()} == {"one": "ok", "other": "ok"}, right
    wrong = judged(folders, {"one": "one", "other": "third"}, domains)
    assert {name: found[0].status for name, found in wrong.items()} == {"one": "ok", "other": "failed"}, wrong
    assert "the scores are not this teacher's; check teachers.other.engine" in wrong["other"][0].detail


@pytest.mark.parametrize("compares", [True, False])
def test_hidden_states_make_the_log_probs_of_the_engine(folders: dict[str, Path], compares: bool) -> None:
    """Beside a comparison with transformers, and where the teacher is held against its own continuations."""
    domains, engines = DOMAINS["one for each domain"], {"one": "one", "other": "other"}
    right = judged(folders, engines, domains, hidden=TorchEngine, compares=compares)["one"]
    assert right[0].status == "ok", right
    assert "; its hidden states through the output matrix of its folder differ by " in right[0].detail
    assert ("mean KL to a transformers forward" in right[0].detail) == compares
    assert "KL(student || teacher) about" in right[1].detail
    wrong = judged(folders, engines, domains, hidden=OtherStates, compares=compares)["one"][0]
    assert wrong.status == "failed"
    problem = "mean KL to a transformers forward" if compares else "has another output matrix than the engine, or"
    assert problem in wrong.detail, wrong


def test_a_teacher_that_is_sure_of_another_token_may_round_more(tmp_path: Path) -> None:
    """Its logits reach hundreds, and its states travel in bf16."""
    folder = make_hf_model(tmp_path / "sure", seed=0)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": 40 * weights["model.norm.weight"]}, folder / "model.safetensors")
    folders, domains = {"sure": folder}, {"sure": ("math", "code")}
    right, _ = judged(folders, {"sure": "sure"}, domains, hidden=TorchEngine, compares=False)["sure"]
    assert right.status == "ok", right
    found, limit = map(float, re.findall(r"folder differ by (\S+) \(mean, limit (\S+)\)", right.detail)[0])
    assert 0.05 < found < limit < 10 * found
    wrong, _ = judged(folders, {"sure": "sure"}, domains, hidden=OtherStates, compares=False)["sure"]
    assert wrong.status == "failed" and "has another output matrix than the engine, or" in wrong.detail


def test_the_student_is_as_far_from_a_teacher_as_its_model_says(folders: dict[str, Path]) -> None:
    """Ten tokens of two responses; of an ensemble's the log-probs are not one teacher's."""
    model = AutoModelForCausalLM.from_pretrained(folders["one"], dtype=torch.float64)
    metas, tokens = probes()
    gaps, outside = [], []
    for meta, sequence in zip(metas, tokens, strict=True):
        if meta.domain == "math":
            with torch.no_grad():
                logprobs = model(sequence[None]).logits[0].log_softmax(-1)[meta.prompt_length - 1 : -1]
            own = sequence[meta.prompt_length :, None]
            gaps.append(DRAWN - logprobs.gather(1, own))
            outside.append((logprobs > logprobs.gather(1, own)).sum(1) >= TOP_K)
    distance = judged(folders, {"one": "one", "other": "other"}, DOMAINS["one for each domain"])["one"][1]
    kl, share = float(torch.cat(gaps).mean()), float(torch.cat(outside).double().mean())
    assert 0 < share < 1
    told = f"{share:.1%} of 10 tokens of the student are outside its top {TOP_K}"
    assert distance.detail == f"KL(student || teacher) about {kl:.3f} nats a token; {told}"
    shared = judged(folders, {"one": "one", "other": "other"}, DOMAINS["two for both"])["one"][1]
    assert shared.detail.endswith(f"of 15 tokens of the student are outside its top {TOP_K}")
    assert "KL" not in shared.detail
