"""Rows with images: sound files, teachers that see them, the same tokens and pixels on all sides."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.config.load import draft_recipe, load_recipe
from mopd.conversion.hf.manifest import make_manifest
from mopd.data.image_processing import read_image_processing
from mopd.engines.interface import EngineInfo
from mopd.engines.replicas.identity import Needs, problems_of
from mopd.launch.checks.static import StaticChecks
from mopd.orchestrator.preflight.vision import check_images, probe_rows, tokenizer_differences
from mopd.orchestrator.workers import Inputs, read_inputs
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.fixtures.vision import (
    VISION_VOCAB_SIZE,
    image_bytes,
    make_vision_model,
    make_vision_tokenizer,
    write_image_processing,
)

PICTURE = image_bytes()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make ``student``, ``seeing`` and ``text``, a text model whose tokenizer has the ids of vision."""
    folder = tmp_path_factory.mktemp("models")
    make_vision_model(folder / "student", seed=0)
    make_vision_model(folder / "seeing", seed=1)
    make_hf_model(folder / "text", vocab_size=VISION_VOCAB_SIZE)
    make_vision_tokenizer(folder / "text")
    return folder


@pytest.fixture
def recipe(models: Path, tmp_path: Path) -> Callable[..., Path]:
    """A recipe over two domains, and its file of prompts."""

    def write(images: Sequence[bytes | None] = (PICTURE, None) * 6, **teachers: str) -> Path:
        rows = [
            {
                "prompt": "sort" if image is None else "read<image>",
                "data_source": "sort" if image is None else "read",
                "images": None if image is None else [{"bytes": image, "path": None}],
            }
            for image in images
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        tree = {
            "run_dir": str(tmp_path / "run"),
            "student": {"model": str(models / "student")},
            "teachers": {
                domain: {"model": str(models / teachers.get(domain, model)), "domains": [domain]}
                for domain, model in (("read", "seeing"), ("sort", "text"))
            },
            "data": {"train": [str(tmp_path / "rows.parquet")], "max_prompt_length": 192},
            "rollout": {"max_response_length": 64},
            "loss": {"type": "topk_forward_kl", "top_k": 8},
            "schedule": {"steps": 1, "prompts_per_step": 1},
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return tmp_path / "recipe.yaml"

    return write


def inputs_of(path: Path) -> Inputs:
    return read_inputs(load_recipe(path).recipe)


def static_failures(path: Path) -> list[str]:
    checks = StaticChecks(draft_recipe(path), Hardware()).run()
    return [check.detail for check in checks if check.status == "failed"]


def test_rows_with_images_need_teachers_that_see_them(recipe: Callable[..., Path]) -> None:
    fits = recipe()
    assert inputs_of(fits).train.image_counts == {"read": 6} and static_failures(fits) == []
    blind = recipe(read="text", sort="seeing")
    line = r"rows with images have a teacher that sees none: teachers\.read for domain 'read' \(6 rows\)"
    with pytest.raises(UserError, match=line):
        inputs_of(blind)
    (problem,) = static_failures(blind)
    assert "teachers.read for domain 'read' (6 rows)" in problem


def test_a_student_without_vision_is_told_before_anything_starts(recipe: Callable[..., Path], models: Path) -> None:
    path = recipe()
    path.write_text(path.read_text().replace(str(models / "student"), str(models / "text")))
    (problem,) = static_failures(path)
    assert "domain 'read' (6 rows), for a student that sees none" in problem
    with pytest.raises(UserError, match="for a student that sees none"):
        inputs_of(path)


def test_samples_with_images_are_not_stored(recipe: Callable[..., Path]) -> None:
    path = recipe()
    path.write_text(path.read_text() + "metrics: {keep_samples: true}\n")
    (problem,) = static_failures(path)
    assert "metrics.keep_samples, data.scored: student.model sees images" in problem


def test_damaged_images_end_the_checks_with_their_row(recipe: Callable[..., Path]) -> None:
    whole = image_bytes(300, 300, kind="JPEG")
    images = [image_bytes(seed=i) for i in range(5)]
    assert check_images(inputs_of(recipe(images))).detail == "5 rows with images, 5 images decoded"
    path = recipe([*images, whole[: len(whole) // 2]])
    check = check_images(inputs_of(path))
    assert check.status == "failed" and "rows.parquet: row 5: image 0: the image is damaged" in check.detail
    (problem,) = static_failures(path)
    assert "rows.parquet: row 5: image 0: the image is damaged" in problem


def test_probes_hold_an_image_where_a_domain_has_one(recipe: Callable[..., Path]) -> None:
    dataset = inputs_of(recipe([None, None, None, image_bytes()])).train
    assert probe_rows(dataset, ["sort"], 2) == [("sort", 0), ("sort", 1)]
    assert probe_rows(dataset, ["sort", "read"], 2) == [("sort", 0), ("read", 3)]
    assert probe_rows(dataset, ["read", "sort"], 2) == [("read", 3), ("sort", 0)]
    assert probe_rows(dataset, [], 2) == []


def test_a_text_teacher_may_lack_the_ids_of_vision_alone(
    recipe: Callable[..., Path], models: Path, tmp_path: Path
) -> None:
    inputs = inputs_of(recipe())
    size = VISION_VOCAB_SIZE
    assert tokenizer_differences(inputs, str(models / "seeing"), size) == []
    assert tokenizer_differences(inputs, str(models / "text"), size) == []
    plain = make_hf_model(tmp_path / "plain")
    make_tokenizer(plain)
    (problem,) = tokenizer_differences(inputs, str(plain), size)
    assert problem.startswith("1 of ") and "<|vision_pad|>" in problem  # which the config does not name

    seeing = make_vision_model(tmp_path / "other", seed=1)
    config = json.loads((seeing / "config.json").read_text())
    config["image_token_id"], config["video_token_id"] = config["video_token_id"], config["image_token_id"]
    (seeing / "config.json").write_text(json.dumps(config))
    (problem,) = tokenizer_differences(inputs, str(seeing), size)
    assert problem.startswith("images and videos have the ids (")


def test_other_pixels_are_another_teacher(recipe: Callable[..., Path], models: Path, tmp_path: Path) -> None:
    """A server tells by what settings it makes pixels; the student's are asked for where both see images."""
    loaded = load_recipe(recipe()).recipe
    needs = Needs.of(loaded, "read")
    write_image_processing(tmp_path, max_pixels=50_000)
    other = read_image_processing(tmp_path, None).fingerprint
    smaller = replace(loaded, data=replace(loaded.data, max_pixels=6000))
    assert Needs.of(loaded, None).image_processing == needs.image_processing
    assert Needs.of(loaded, "sort").image_processing is None
    assert Needs.of(smaller, None).image_processing != needs.image_processing
    manifest = make_manifest(models / "seeing", cache_file=None, with_weights=False)

    def problems(processing: str | None) -> list[str]:
        info = EngineInfo(
            model="there", kind="vllm", vocab_size=100, max_positions=5000, dtype="float32", weight_version=-1,
            image_processing=processing,
        )  # fmt: skip
        return problems_of(info, manifest, needs, key="teachers.read", is_rollout=False)

    assert problems(read_image_processing(models / "seeing", None).fingerprint) == []
    assert "teachers.read: it makes other pixels of an image than the student" in problems(other)[0]
    assert "teachers.read: it sees no images" in problems(None)[0]
