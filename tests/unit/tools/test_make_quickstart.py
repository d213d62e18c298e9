"""The tool as a whole, with models too small and lessons too short to learn anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from tools import make_quickstart
from tools.quickstart.cache import PartsFolder

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_quickstart, "SHAPE", {**make_quickstart.SHAPE, "hidden_size": 16, "num_hidden_layers": 1})
    monkeypatch.setattr(make_quickstart, "STEPS", dict.fromkeys(make_quickstart.STEPS, 2))
    monkeypatch.setattr(make_quickstart, "BATCH_SIZE", 4)
    monkeypatch.setattr(make_quickstart, "TRAIN_ROWS", 6)
    monkeypatch.setattr(make_quickstart, "VALIDATION_ROWS", 4)


@pytest.mark.usefixtures("small")
def test_folders_load_and_a_second_call_changes_nothing(tmp_path: Path) -> None:
    first = make_quickstart.build(PartsFolder(tmp_path), threads=1)
    assert set(first) == {"base", "reversal", "sorting", "next_letter"}
    for name in ("base", "teachers/reversal", "teachers/sorting", "teachers/next_letter"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert isinstance(model, Qwen3ForCausalLM)
        assert model.config.head_dim == 32 and model.config.tie_word_embeddings
        assert model.config.vocab_size == len(tokenizer)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        with safe_open(tmp_path / name / "model.safetensors", "pt") as weights:
            assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 - not a mapping
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert make_quickstart.build(PartsFolder(tmp_path), threads=1) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times


@pytest.mark.usefixtures("small")
def test_prompts_have_the_columns_that_practitioners_have(tmp_path: Path) -> None:
    make_quickstart.build(PartsFolder(tmp_path), threads=1)
    rows = pq.read_table(tmp_path / "data/validation.parquet").to_pylist()
    assert len(rows) == 12
    assert set(rows[0]) == {"data_source", "prompt", "reward_model", "extra_info"}
    row = next(row for row in rows if row["data_source"] == "reversal")
    (message,) = row["prompt"]
    assert message["role"] == "user" and message["content"].startswith("rev ")
    assert row["reward_model"] == {"style": "rule", "ground_truth": message["content"].removeprefix("rev ")[::-1]}
    assert row["extra_info"] == {"index": rows.index(row), "split": "validation"}
    apart = pq.read_table(tmp_path / "data_by_domain/reversal_validation.parquet").to_pylist()
    assert [r["prompt"] for r in apart] == [r["prompt"] for r in rows if r["data_source"] == "reversal"]


@pytest.mark.usefixtures("small")
def test_the_same_numbers_make_the_same_weights_and_a_teacher_differs_from_its_base(tmp_path: Path) -> None:
    weights = []
    for folder in ("one", "two"):
        make_quickstart.build(PartsFolder(tmp_path / folder), threads=1)
        files = [tmp_path / folder / name / "model.safetensors" for name in ("base", "teachers/sorting")]
        weights.append([file.read_bytes() for file in files])
    assert weights[0] == weights[1]
    assert weights[0][0] != weights[0][1]


@pytest.mark.usefixtures("small")
def test_more_lessons_for_one_expert_leave_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_quickstart.build(PartsFolder(tmp_path), threads=1)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("**/model.safetensors")}
    monkeypatch.setitem(make_quickstart.STEPS, "sorting", 3)
    make_quickstart.build(PartsFolder(tmp_path), threads=1)
    again = {path: path.stat().st_mtime_ns for path in tmp_path.glob("**/model.safetensors")}
    assert [path.parent.name for path in times if times[path] != again[path]] == ["sorting"]


def test_it_runs_as_a_file_and_as_a_module() -> None:
    for command in (["tools/make_quickstart.py"], ["-m", "tools.make_quickstart"]):
        run = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
        assert "quickstart_assets" in run.stdout
