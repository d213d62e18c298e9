"""Every replica of the rollout is held against the student: real engines, one of which has not got a weight."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.base.types import Prompt, SampleMeta, UserError
from mopd.config.groups import TorchEngineConfig
from mopd.config.load import load_recipe
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import Generation, SamplingParams, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.launch.checks.inputs import Check
from mopd.orchestrator.preflight.rollout import RolloutCheck
from mopd.orchestrator.rollout import RolloutWorker
from mopd.orchestrator.weights.sync import GroupWeightSync
from tests.fixtures.recipe import RECIPE
from tests.fixtures.tiny_models import VOCAB_SIZE, make_hf_model
from tests.unit.orchestrator.groups import router_of

FLOAT32 = TorchEngineConfig(dtype="float32")
ROWS = [
    PromptRow(domain="math", text="", tokens=(5, 6, 7 + i), ground_truth="", extra_info=None, place="") for i in (0, 1)
]


class Student:
    """Student whose log-probs are those of an engine with its weights."""

    vocab_size = VOCAB_SIZE

    def __init__(self, engine: TorchEngine, plane: LocalDataPlane) -> None:
        self._engine, self._plane = engine, plane

    async def logprobs(self, samples: Sequence[SampleMeta], *, temperature: float) -> list[Tensor]:
        tokens = (await self._plane.get([s.sample_id for s in samples], ("tokens",)))["tokens"]
        starts = [sample.prompt_length for sample in samples]
        scores = await self._engine.score(ToScore(tokens, starts, top_k=1, temperature=temperature))
        return [given.token_logprobs for given in scores]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engines(folder: Path) -> list[TorchEngine]:
    """Three replicas that have got weights 0."""
    source = TorchEngine.from_pretrained(folder, FLOAT32)
    made = [TorchEngine.empty(folder, FLOAT32) for _ in range(3)]
    for engine in made:
        asyncio.run(engine.load_weights(source.weight_slots.items(), 0))
    return made


def check(folder: Path, engines: Sequence[Any], tmp_path: Path, *overrides: str) -> tuple[Check, LocalDataPlane]:
    """The probe of the group is drawn by the first replica."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.yaml", ["student.dtype=float32", *overrides]).recipe
    plane, dataset = LocalDataPlane(), PromptDataset(ROWS)

    async def work() -> Check:
        router = router_of("rollout", *engines, kind="rollout")
        sampling = SamplingParams(max_new_tokens=8)
        rollout = RolloutWorker(router, plane, dataset, sampling=sampling, seed=1, samples_per_prompt=2)
        workers: Any = SimpleNamespace(
            routers={"rollout": router}, rollout=rollout, dataset=dataset, plane=plane, weights=GroupWeightSync(router)
        )
        first = dataclasses.replace(rollout, generator=engines[0])
        samples = await first.generate([Prompt(sample_id=i, domain="math", row=i) for i in (0, 1)])
        student = Student(TorchEngine.from_pretrained(folder, FLOAT32), plane)
        found = await RolloutCheck(recipe, workers, student).judge(samples, await engines[0].info())
        await router.close()
        assert len(await plane.get([s.sample_id for s in samples], ("tokens",))) == 1
        return found

    return asyncio.run(work()), plane


def test_equal_replicas_pass(folder: Path, engines: list[TorchEngine], tmp_path: Path) -> None:
    found, plane = check(folder, engines, tmp_path)
    assert found.status == "ok"
    assert "of one of 3 replicas at most" in found.detail
    assert len(plane._metas) == 4, "the replicas' own probes are gone"


def test_a_replica_that_kept_a_weight_is_named(folder: Path, engines: list[TorchEngine], tmp_path: Path) -> None:
    slot = engines[1].weight_slots["model.layers.1.mlp.down_proj.weight"]
    slot.mul_(1.1)
    found, _ = check(folder, engines, tmp_path)
    assert found.status == "failed"
    assert found.detail.startswith("replica rollout.1: mean |log-prob difference|")
    assert "preflight.max_logprob_difference" in found.detail


def test_what_rounds_the_weights_is_named_with_the_key_that_permits_it(
    folder: Path, engines: list[TorchEngine], tmp_path: Path
) -> None:
    """As fp8 rounds them: a scale for a row. The limit is the same as without, and the user's own decides."""
    for slot in engines[0].weight_slots.values():
        scale = slot.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        slot.copy_((slot / scale).to(torch.float8_e4m3fn).to(slot.dtype) * scale)
    fp8 = "rollout.engine={type: vllm, extra: {quantization: fp8_per_channel}}"
    found, _ = check(folder, engines[:1], tmp_path, fp8)
    assert found.status == "failed" and "(limit 0.001): " in found.detail
    assert found.detail.endswith(
        "rollout.engine.extra.quantization is 'fp8_per_channel', which rounds the student's weights: set "
        "preflight.max_logprob_difference to what that may cost, or remove it"
    )
    assert check(folder, engines[:1], tmp_path, fp8, "preflight.max_logprob_difference=0.2")[0].status == "ok"


def test_one_replica_alone_is_judged_by_the_group_s_probe(
    folder: Path, engines: list[TorchEngine], tmp_path: Path
) -> None:
    assert check(folder, engines[:1], tmp_path)[0].status == "ok"
    engines[0].weight_slots["model.norm.weight"].mul_(1.1)
    found, _ = check(folder, engines[:1], tmp_path)
    assert found.status == "failed"
    assert found.detail.startswith("mean |log-prob difference|")


def test_a_replica_that_draws_what_nobody_can_is_named(
    folder: Path, engines: list[TorchEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = engines[1].generate

    async def generate(*args: Any, **kwargs: Any) -> list[Generation]:
        return [dataclasses.replace(one, tokens=one.tokens + VOCAB_SIZE) for one in await draw(*args, **kwargs)]

    monkeypatch.setattr(engines[1], "generate", generate)
    with pytest.raises(UserError, match=r"rollout\.1 did not draw a probe: rollout\.1: corrupt answer: .*vocabulary"):
        check(folder, engines, tmp_path)


def test_a_replica_that_does_not_answer_is_named(folder: Path, engines: list[TorchEngine], tmp_path: Path) -> None:
    gone = RemoteEngine("http://127.0.0.1:1", timeout_s=1.0, name="rollout.1")
    with pytest.raises(UserError, match=r"rollout\.1 did not draw a probe: .*: see its log"):
        check(folder, [engines[0], gone], tmp_path)
