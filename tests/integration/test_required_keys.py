"""A recipe of nothing but the required keys: it trains here, and what it leaves out is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mopd.config.load import load_recipe
from tests.fixtures.tiny_models import CHAT_TEMPLATE, make_hf_model, make_tokenizer
from tests.integration.world import mopd, read_metrics, write_prompts

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
STEPS = 2


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("required")
    for seed, name in enumerate(("student", "left", "right")):
        # Room for the default lengths and loss.top_k; nearly flat, so that a response meets its stop token early.
        make_hf_model(folder / name, seed=seed, vocab_size=80, max_positions=2048, scale=0.03)
        make_tokenizer(folder / name)
    make_tokenizer(folder / "right", chat_template=CHAT_TEMPLATE.replace("assistant:", "answer:"))
    write_prompts(folder / "train.parquet", num_rows=24, start=0)
    tree = {
        "run_dir": str(folder / "run"),
        "student": {"model": str(folder / "student")},
        "teachers": {name: {"model": str(folder / name), "domains": [name]} for name in ("left", "right")},
        "data": {"train": [str(folder / "train.parquet")]},
        "schedule": {"steps": STEPS, "prompts_per_step": 4},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def test_it_trains(recipe: Path) -> None:
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    run = recipe.with_name("run")
    assert [line["step"] for line in read_metrics(run)] == [*range(1, STEPS + 1)]
    assert "chat template of right: teachers.right.model" in done.stderr and "chat template of left" not in done.stderr
    assert "no validation section: no teacher's reward is compared, and no best checkpoint is kept" in done.stderr
    assert (run / "hf" / "config.json").is_file()
    kept = load_recipe(run / "recipe.yaml").recipe
    groups = [kept.rollout, *kept.teachers.values()]
    assert {(g.placement.type, g.engine.type, g.engine.dtype) for g in groups} == {("in_process", "torch", "float32")}
    assert kept.student.dtype == "float32"


def test_teachers_are_checked_without_a_second_model(recipe: Path) -> None:
    off = ("--set", "preflight.compare_with_transformers=false", "--set", "rollout.max_response_length=16")
    done = mopd("check", recipe, *off, "--set", "teachers.right.placement={type: local, num_threads: 1}")
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.replace("│", " ").split())
    assert words.count("equal what its own greedy continuations report") == 2, done.stdout
