"""Images on their way through the workers: from rows to engines, as references to the teachers that see them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mopd.base.types import ROLLOUT_FIELDS, TEACHER_FIELDS, Prompt
from mopd.config.data import DataConfig
from mopd.config.groups import Assignment, TeacherConfig, TorchEngineConfig
from mopd.config.payloads import Asked
from mopd.data.image_refs import image_refs_from_tensor
from mopd.data.prompts import PromptDataset, load_prompts
from mopd.data.tokenizer import load_tokenizer
from mopd.data.vision_prompts import read_vision
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import SamplingParams, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.rollout import RolloutWorker
from mopd.orchestrator.teachers import TeacherWorker
from tests.fixtures.tiny_models import FP32_FORWARD_ATOL, make_hf_model
from tests.fixtures.vision import VISION_VOCAB_SIZE, image_bytes, make_vision_model
from tests.unit.orchestrator.groups import teacher_of

ENGINE = TorchEngineConfig(dtype="float32")
TOP_K = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_vision_model(folder / "student", seed=0)
    make_vision_model(folder / "seeing", seed=1)
    make_hf_model(folder / "text", vocab_size=VISION_VOCAB_SIZE)
    return folder


def dataset_of(folder: Path, models: Path, *, seed: int) -> PromptDataset:
    """Rows with two images, none and one; another seed, other images."""
    rows = [
        {
            "prompt": f"{'<image>' * num}ab",
            "data_source": "read" if num else "sort",
            "images": [{"bytes": image_bytes(56 + 28 * i, 84, seed + i), "path": None} for i in range(num)],
        }
        for num in (2, 0, 1)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{seed}.parquet")
    cfg, tokenizer = DataConfig(train=(str(folder / f"{seed}.parquet"),)), load_tokenizer(models / "student")
    return load_prompts(cfg.train, cfg, tokenizer, read_vision(models / "student", None, tokenizer))


def test_teachers_see_what_the_student_saw(models: Path, tmp_path: Path) -> None:
    """The teacher's scores are those of a transformers forward with the row's images, and of no other images."""
    student = TorchEngine.from_pretrained(models / "student", ENGINE)
    teachers = {
        name: TorchEngine.from_pretrained(models / folder, ENGINE)
        for name, folder in (("eyes", "seeing"), ("reader", "text"))
    }
    groups = {
        name: teacher_of(name, engine, vocab_size=VISION_VOCAB_SIZE, sees_images=name == "eyes")
        for name, engine in teachers.items()
    }
    domains = {"eyes": "read", "reader": "sort"}
    configs = {name: TeacherConfig(model="unread", domains=(domain,)) for name, domain in domains.items()}
    assignment = Assignment(configs)
    dataset, others = dataset_of(tmp_path, models, seed=0), dataset_of(tmp_path, models, seed=50)
    assert dataset.row(0).tokens == others.row(0).tokens and dataset.row(0).images != others.row(0).images

    async def run() -> None:
        plane = LocalDataPlane()
        rollout = RolloutWorker(student, plane, dataset, sampling=SamplingParams(max_new_tokens=5), seed=1)
        prompts = [Prompt(sample_id=i, domain=dataset.row(i).domain, row=i) for i in range(3)]
        metas = await rollout.generate(prompts)
        assert len(json.dumps([asdict(meta) for meta in metas])) < 3 * 300  # what the ranks are sent
        worker = TeacherWorker(
            groups,
            assignment,
            plane,
            asked=dict.fromkeys(groups, Asked(own=TOP_K)),
            temperature=1.0,
            dataset=dataset,
        )
        assert await worker.score(metas) == []
        fields = await plane.get([0, 1, 2], (*ROLLOUT_FIELDS, "images", *TEACHER_FIELDS))
        assert [image_refs_from_tensor(own) for own in fields["images"]] == [row.images for row in dataset.rows]
        assert [own.nbytes for own in fields["images"]] == [128, 0, 64]
        starts = [meta.prompt_length for meta in metas]
        own, wrong = [
            await teachers["eyes"].score(
                ToScore(fields["tokens"], starts, top_k=TOP_K, temperature=1.0, images=given.images_of([0, 1, 2]))
            )
            for given in (dataset, others)
        ]
        (text,) = await teachers["reader"].score(
            ToScore(fields["tokens"][1:2], starts[1:2], top_k=TOP_K, temperature=1.0)
        )
        for i, scores in ((0, own[0]), (1, text), (2, own[2])):
            torch.testing.assert_close(fields["teacher_logprobs"][i], scores.logprobs, rtol=0, atol=FP32_FORWARD_ATOL)
        assert (fields["teacher_token_logprobs"][0] - wrong[0].token_logprobs).abs().max() > 1e-2
        seen = await student.score(
            ToScore(fields["tokens"], starts, top_k=1, temperature=1.0, images=dataset.images_of([0, 1, 2]))
        )
        for scores, logprobs in zip(seen, fields["rollout_logprobs"], strict=True):
            torch.testing.assert_close(scores.token_logprobs, logprobs, rtol=0, atol=FP32_FORWARD_ATOL)

    asyncio.run(run())
