"""Updates of a student with adapters bring the adapters alone, after which an engine says what the student says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.base.types import UserError
from mopd.config.data import DataConfig
from mopd.config.groups import SglangEngineConfig, TeacherConfig, TorchEngineConfig
from mopd.config.losses import TopKLossConfig
from mopd.config.placements import LocalConfig
from mopd.config.rollout import RolloutConfig
from mopd.config.schedule import ScheduleConfig
from mopd.config.schema import Recipe
from mopd.config.student import LoraConfig, OptimizerConfig, StudentConfig
from mopd.conversion.models.adapter_updates import check_updates, sends_adapters
from mopd.conversion.models.reading import read_dims
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.weights import StagedWeights, load_staged
from mopd.student.parallel import Layout
from mopd.student.sending import WeightSender, announced
from mopd.student.worker import StudentWorker
from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student.samples import DOMAINS
from tests.unit.engines.test_torch_adapters import distance, score

LORA = LoraConfig(rank=4, alpha=32)
ENGINE = TorchEngineConfig(dtype="float32")


def make_recipe(folder: Path, lora: LoraConfig | None = LORA) -> Recipe:
    return Recipe(
        run_dir="unused",
        student=StudentConfig(model=str(folder), dtype="float32", optimizer=OptimizerConfig(lr=0.05), lora=lora),
        teachers={"all": TeacherConfig(model="unused", domains=DOMAINS)},
        data=DataConfig(train=("unused",), max_prompt_length=16),
        rollout=RolloutConfig(max_response_length=16, engine=ENGINE),
        loss=TopKLossConfig(top_k=4),
        schedule=ScheduleConfig(steps=4, prompts_per_step=2),
    )


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Megatron has small functions compiled, which takes seconds each."""
    with torch._dynamo.config.patch(disable=True):
        yield


def staged(sender: WeightSender, told: dict[str, Any], version: int) -> StagedWeights:
    """What the student hands on, as a rank does over the link."""
    frames: list[bytes] = []
    tensors = sender.hand_on(told["tensors"], lambda part: frames.append(part.numpy().tobytes()))
    return StagedWeights.pack(version, tensors.encode(), frames)


def test_an_engine_says_what_the_student_says_after_each_update(layout: Layout, tmp_path: Path) -> None:
    """Of three updates; each is the bytes of A and B and little more, and no name of the base's is among them."""
    folder = make_hf_model(tmp_path / "student", "qwen3", seed=4)
    recipe = make_recipe(folder)
    worker = StudentWorker(recipe, LocalDataPlane().reader(), DOMAINS)
    told, sender = announced(recipe, worker), WeightSender(worker, adapters=True)
    assert all(".lora_" in name for name, *_ in json.loads(told["tensors"])) and told["num_constants"] == 0
    engine = TorchEngine.from_pretrained(folder, ENGINE, has_weights=False, student_adapter=LORA)
    before = None
    for version in range(3):
        adapters = dict(worker.adapter_weights())
        update = staged(sender, told, version)
        num_bytes = sum(tensor.nbytes for tensor in adapters.values())
        assert sum(map(len, update.bodies)) <= 1.02 * num_bytes
        asyncio.run(load_staged(engine, update))
        found = score(engine)
        worker.save_hf(tmp_path / f"hf{version}")
        assert distance(found, score(TorchEngine.from_pretrained(tmp_path / f"hf{version}", ENGINE))) < 1e-5
        assert before is None or distance(found, before) > 0.01
        before = found
        with torch.no_grad():
            for name, parameter in worker._chunks[0].named_parameters():
                if ".lora." in name:
                    parameter.add_(0.05 * torch.randn(parameter.shape))


def test_where_engines_cannot_follow_adapters_are_merged(tmp_path: Path) -> None:
    dims = read_dims(make_hf_model(tmp_path / "dense", "qwen3"))
    recipe = make_recipe(tmp_path / "dense")
    assert sends_adapters(recipe, dims)
    assert not sends_adapters(make_recipe(tmp_path / "dense", lora=None), dims)
    assert not sends_adapters(recipe, read_dims(make_hf_model(tmp_path / "moe", "qwen3_moe")))
    attention = replace(recipe, student=replace(recipe.student, lora=replace(LORA, target_modules=("q_proj",))))
    assert sends_adapters(attention, read_dims(tmp_path / "moe"))
    shared = LocalConfig(type="local", share_gpus_with="student")
    assert not sends_adapters(replace(recipe, rollout=replace(recipe.rollout, placement=shared)), dims)
    sglang = replace(recipe.rollout, engine=SglangEngineConfig(type="sglang"), placement=LocalConfig(type="local"))
    assert not sends_adapters(replace(recipe, rollout=sglang), dims)


def test_engines_and_folders_that_stacked_experts_do_not_go_with_are_refused(tmp_path: Path) -> None:
    """gpt-oss: vLLM and SGLang copy its experts past a reload, and a student's weights are not packed."""
    folder = make_hf_model(tmp_path, "gpt_oss")
    recipe, dims = make_recipe(folder, lora=None), read_dims(folder)
    check_updates(recipe, dims)
    elsewhere = replace(recipe, rollout=replace(recipe.rollout, engine=SglangEngineConfig(type="sglang")))
    with pytest.raises(UserError, match="only the torch engine takes updates of a student of model_type gpt_oss"):
        check_updates(elsewhere, dims)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(UserError, match=r"its experts are MXFP4 and a student's are bfloat16: convert the folder"):
        check_updates(recipe, read_dims(folder))
