"""The tool as a whole, with models too small and lessons too short to learn anything."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration, Qwen3ForCausalLM

from tools import make_vision_toy
from tools.quickstart.cache import PartsFolder
from tools.vision_toy.tasks import exercises


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    with pytest.MonkeyPatch.context() as patch:
        text = {**make_vision_toy.TEXT_SHAPE, "intermediate_size": 16, "num_hidden_layers": 1}
        patch.setattr(make_vision_toy, "TEXT_SHAPE", text)
        patch.setattr(make_vision_toy, "TOWER_SHAPE", {**make_vision_toy.TOWER_SHAPE, "depth": 1})
        patch.setattr(make_vision_toy, "STEPS", dict.fromkeys(make_vision_toy.STEPS, 1))
        patch.setattr(make_vision_toy, "BATCH_SIZE", 4)
        patch.setattr(make_vision_toy, "TRAIN_ROWS", 6)
        patch.setattr(make_vision_toy, "VALIDATION_ROWS", 4)
        first = make_vision_toy.build(PartsFolder(folder), threads=1)
        times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        assert make_vision_toy.build(PartsFolder(folder), threads=1) == first
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times
    assert {name: set(facts["exact_match"]) for name, facts in first.items()} == {
        "vision-base": {"read", "sort"},
        "reader": {"read", "sort"},
        "sorter": {"sort"},
    }
    return folder


def test_the_models_are_two_of_vision_and_one_of_text_with_one_vocabulary(assets: Path) -> None:
    vocabularies = []
    for name, kind in (
        ("vision-base", Qwen2_5_VLForConditionalGeneration),
        ("reader", Qwen2_5_VLForConditionalGeneration),
        ("sorter", Qwen3ForCausalLM),
    ):
        model = kind.from_pretrained(assets / "models" / name)
        tokenizer = AutoTokenizer.from_pretrained(assets / "models" / name)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        vocabularies.append(tokenizer.get_vocab())
        assert (assets / "models" / name / "preprocessor_config.json").exists() == (name != "sorter")
        assert "_name_or_path" not in json.loads((assets / "models" / name / "config.json").read_text())
    assert vocabularies[0] == vocabularies[1] == vocabularies[2]


def test_images_are_paths_in_one_file_and_bytes_in_the_others(assets: Path) -> None:
    lines = [json.loads(line) for line in (assets / "data/train.jsonl").read_text().splitlines()]
    assert [line["data_source"] for line in lines] == ["read", "sort"] * 6
    for line in lines:
        (message,) = line["prompt"]
        assert ("<image>" in message["content"]) == ("images" in line) == (line["data_source"] == "read")
    opened = Image.open(assets / "data" / lines[0]["images"][0]["path"])
    assert (opened.format, opened.size) == ("JPEG", (84, 56))
    table = pq.read_table(assets / "data/validation.parquet").to_pylist()
    assert [row["images"] is None for row in table] == [False, True] * 4
    kept = Image.open(io.BytesIO(table[0]["images"][0]["bytes"]))
    assert (kept.format, kept.size) == ("PNG", (84, 56))


def test_other_images_for_the_same_questions(assets: Path) -> None:
    right, blank, other = (
        pq.read_table(assets / f"data/{name}.parquet").to_pylist() for name in ("validation", "blank", "shuffled")
    )
    for column in ("prompt", "reward_model"):
        assert [r[column] for r in right] == [r[column] for r in blank] == [r[column] for r in other]
    assert len({row["images"][0]["bytes"] for row in blank if row["images"]}) == 1
    pairs = [(a["images"], b["images"]) for a, b in zip(right, other, strict=True) if a["images"]]
    assert all(a != b for a, b in pairs)
    assert sorted(a[0]["bytes"] for a, _ in pairs) == sorted(b[0]["bytes"] for _, b in pairs)


def test_a_quarter_of_the_pairs_is_known_to_the_base() -> None:
    made = list(islice(exercises("read", "some"), 2000))
    share = sum(one.answer == one.mistaken for one in made) / len(made)
    assert 0.22 < share < 0.28
    assert len({one.letters for one in made}) == 256
