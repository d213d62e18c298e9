"""Domains that share a run unevenly: a budget of the loss's weight, and prompts that follow the head-room.

A domain answers in one letter, another in fifty: with a fifth of the prompts the first has a hundredth of the loss
tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.integration.world import World, mopd, read_metrics, read_validation, train_expert, write_prompts

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789zyxwvutsrqponm"
RIGHT = {"brief": "+", "long": LETTERS}
BEGINNERS = {"brief": "=", "long": LETTERS.replace("fg", "gf")}
"""What the student answers at first: as long as the right answers."""
BUDGET = {"brief": 0.3, "long": 0.7}


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("uneven"))
    for path, answers in ((world.student, BEGINNERS), (world.teachers["left"], RIGHT)):
        make_tokenizer(make_hf_model(path, seed=1, scale=0.1)).save_pretrained(path)
        train_expert(path, answers, num_steps=100)
    write_prompts(world.train, num_rows=40, start=0, domains=tuple(RIGHT), answers=RIGHT)
    write_prompts(world.validation, num_rows=8, start=1000, domains=tuple(RIGHT), answers=RIGHT)
    return world


def write_recipe(world: World, run_dir: Path, *, lr: float, **sections: Any) -> Path:
    """Write a recipe for one teacher of both domains; ``sections`` are merged into those of ``World.recipe``."""
    tree = world.recipe(
        run_dir, rollout__max_response_length=60, rollout__temperature=0.2, student__max_tokens_per_micro_batch=2048
    )
    tree["student"]["parallel"] = {}
    tree["teachers"] = {"both": {"model": str(world.teachers["left"]), "domains": list(RIGHT)}}
    tree["student"]["optimizer"]["lr"] = lr
    for name, section in sections.items():
        tree[name] |= section
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


SAMPLED = {"type": "policy_gradient", "baseline": "domain", "temperature": 0.2}


@pytest.mark.parametrize("loss", [{}, pytest.param(SAMPLED, marks=pytest.mark.long)])
def test_a_domain_of_few_tokens_gets_its_budget(uneven: World, tmp_path: Path, loss: dict[str, Any]) -> None:
    recipe = write_recipe(
        uneven,
        tmp_path / "run",
        lr=1e-6,  # answers stay as long as they are
        data={"domain_weights": {"brief": 1, "long": 4}},
        loss={"domain_budget": BUDGET, **loss},
        schedule={"steps": 4, "prompts_per_step": 20},
        validation={"every_steps": 4},
    )
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    for step in read_metrics(tmp_path / "run"):
        assert step["prompts_share/brief"] == pytest.approx(0.2) and step["tokens_share/brief"] < 0.02
        for domain, share in BUDGET.items():
            assert step[f"loss_weight_share/{domain}"] == pytest.approx(share, abs=1e-6)
            assert step[f"loss_weight_share_target/{domain}"] == share
        assert step["absent_domains"] == 0
        if loss:  # the rollout's log-probs are the student's, and each response has others to be compared with
            assert step["baseline/long"] == pytest.approx(-step["kl_k1/long"], rel=0.05, abs=1e-3) != 0
        assert step["gradient_share/brief"] + step["gradient_share/long"] == pytest.approx(1)


@pytest.mark.long
def test_adaptive_prompts_follow_the_headroom_and_a_resumed_run(uneven: World, tmp_path: Path) -> None:
    """Each step's shares are those of the validation before it; a run that goes on from the middle repeats them."""
    run = tmp_path / "run"
    recipe = write_recipe(
        uneven,
        run,
        lr=3e-3,
        data={"domain_weights": "adaptive", "adaptive_floor": 0.4},
        schedule={"steps": 12, "prompts_per_step": 20},
        validation={"every_steps": 4},
        checkpoint={"every_steps": 1, "keep_last": 12, "export_hf": False},
    )
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    metrics, validations = read_metrics(run), read_validation(run)
    teacher = {domain: one["teacher"] for domain, one in json.loads((run / "headroom.json").read_text()).items()}
    gaps = [{d: max(0.0, teacher[d] - line["rewards"][d]) for d in RIGHT} for line in validations]
    for step in metrics:
        gap = gaps[(step["step"] - 1) // 4]
        share = 0.2 + 0.6 * (gap["brief"] / sum(gap.values()) if sum(gap.values()) else 0.5)
        assert step["prompts_share_target/brief"] == pytest.approx(share)
        assert step["prompts_share/brief"] == pytest.approx(share, abs=0.1)  # two prompts of a step
    for start in (8, 9):  # a validation's own step, and one after it
        done = mopd("train", recipe, "--resume", "--from", f"step_{start:08d}")
        assert done.returncode == 0, done.stderr
        assert read_metrics(run) == metrics and read_validation(run) == validations
