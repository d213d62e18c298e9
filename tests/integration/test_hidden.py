"""Whole runs in which teachers send hidden states, and what such a run is refused for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.integration.world import World, mopd, read_metrics, train_expert

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
HIDDEN: dict[str, Any] = {
    "loss": {"type": "full_reverse_kl"},
    "teacher_defaults": {"payload": "hidden"},
    "preflight__require_better_teacher": False,
    "schedule__steps": 4,
}


@pytest.fixture(scope="module")
def wide_teacher(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An expert of another hidden size, with an output matrix of its own."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    make_hf_model(folder, "llama", seed=7, hidden_size=96, tie_word_embeddings=False, scale=0.1)
    make_tokenizer(folder)
    train_expert(folder, {"right": "xy"})
    return folder


@pytest.mark.parametrize("placement", ["in_process", pytest.param("local", marks=pytest.mark.long)])
def test_teachers_of_two_sizes_train_two_ranks(
    world: World, wide_teacher: Path, tmp_path: Path, placement: str
) -> None:
    run_dir = tmp_path / "run"
    tree = HIDDEN | {
        "teachers__right__model": str(wide_teacher),
        "teacher_defaults": {"payload": "hidden", "placement": {"type": placement}},
        "rollout__placement": {"type": placement},
        "data__scores_cache": str(tmp_path / "scores"),
        "metrics__diagnostics_every_steps": 1,
    }
    recipe = world.write_recipe(run_dir, **tree)
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    assert "its hidden states through the output matrix of its folder differ by" in done.stderr
    lines = read_metrics(run_dir)
    assert len(lines) == 4
    for line in lines:
        for domain in ("left", "right"):
            assert line[f"loss/{domain}"] >= 0 and line[f"entropy/{domain}"] > 0
            assert line[f"hidden_error/{domain}"] < 0.05 and line[f"kl_floor/{domain}"] < 1e-4
            assert f"teacher_mass/{domain}" not in line and f"topk_overlap/{domain}" not in line
    assert sum(lines[-1][f"loss/{domain}"] for domain in ("left", "right")) < sum(
        lines[0][f"loss/{domain}"] for domain in ("left", "right")
    )
    shutil.rmtree(run_dir)  # the same prompts and weights again: every first score is found in the cache
    again = mopd("train", recipe, "schedule.steps=3")
    assert again.returncode == 0, again.stderr
    assert read_metrics(run_dir)[0]["scores_found_share"] == 1
    assert read_metrics(run_dir)[0]["loss"] == lines[0]["loss"]


def refused(*arguments: str | Path) -> str:
    done = mopd("train", *arguments)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("model", "change", "line"),
    [
        ("wide", {"vocab_size": 70}, "has logits of 70 ids and student.model of 48: choose another teacher"),
        ("bias", {}, "tensor 'lm_head.bias' adds to the logits"),
        ("missing", {}, "tensor 'lm_head.weight' is missing"),
        ("int8", {}, "tensor 'lm_head.weight' is quantised (torch.int8)"),
        ("gemma", {}, "'model_type': 'gemma2' is not supported; the nearest name that is: 'gemma3_text'"),
    ],
)
def test_an_output_matrix_that_makes_no_logits_of_the_student(
    world: World, tmp_path: Path, model: str, change: dict[str, int], line: str
) -> None:
    teacher = make_hf_model(tmp_path / "teacher", "llama", tie_word_embeddings=False, **change)
    make_tokenizer(teacher)
    file, config = teacher / "model.safetensors", teacher / "config.json"
    weights = load_file(file)
    if model == "bias":
        weights["lm_head.bias"] = weights["lm_head.weight"][:, 0].clone()
    if model == "missing":
        del weights["lm_head.weight"]
    if model == "int8":
        weights["lm_head.weight"] = weights["lm_head.weight"].char()
    file.unlink()
    save_file(weights, file)
    if model == "gemma":
        config.write_text(config.read_text().replace('"llama"', '"gemma2"'))
    recipe = world.write_recipe(tmp_path / "run", **HIDDEN, teachers__right__model=str(teacher))
    error = refused(recipe)
    assert error.startswith("mopd: error: teachers.right.payload is 'hidden', but ") and line in error, error


def test_a_task_reward_beside_the_whole_vocabulary(world: World, tmp_path: Path) -> None:
    loss = {"type": "full_jsd", "task_reward_weight": 0.5, "tokens": {"largest": "divergence", "share": 0.5}}
    code = tmp_path / "reward.py"
    code.write_text("def letters(response, **_):\n    return sum(map(ord, response)) % 5\n")
    rewards = {"default": {"type": "custom", "path": str(code), "function": "letters"}}
    options = {**HIDDEN, "loss": loss, "rollout__samples_per_prompt": 4, "schedule__steps": 3}
    done = mopd("train", world.write_recipe(tmp_path / "run", **options, rewards=rewards))
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "run")
    for line in lines:
        assert 0.5 <= line["loss_tokens_share/left"] < 0.7
        for domain in ("left", "right"):
            both = line[f"divergence/{domain}"] + line[f"task_loss/{domain}"]
            assert line[f"loss/{domain}"] == pytest.approx(both, rel=1e-5) and line[f"divergence/{domain}"] > 0
    # Advantages of responses of one length cancel out in the loss, and not in its gradient.
    alone = mopd("train", tmp_path / "run.yaml", "loss.task_reward_weight=0", f"run_dir={tmp_path / 'alone'}")
    assert alone.returncode == 0, alone.stderr
    (first, *_) = read_metrics(tmp_path / "alone")
    assert first["loss/left"] == pytest.approx(lines[0]["divergence/left"], rel=1e-5)
    assert first["grad_norm"] != pytest.approx(lines[0]["grad_norm"], rel=1e-2)
