"""What a recipe may say beside a custom loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.load import load_recipe
from mopd.config.losses import CustomLossConfig
from tests.fixtures.recipe import RECIPE

TWO_TEACHERS = "teachers.math.weight=1;teachers.other={model: /models/other, domains: [math], weight: 1}"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def loaded(recipe: Path, loss: str, *overrides: str) -> Any:
    return load_recipe(recipe, [f"loss={{type: custom, {loss}}}", *overrides]).recipe.loss


def test_its_keys(recipe: Path) -> None:
    loss = loaded(recipe, "module: mine.py:f, options: {beta: 0.5, names: [a]}, top_k: 8, aggregation: sequence_mean")
    assert isinstance(loss, CustomLossConfig) and loss.options == {"beta": 0.5, "names": ["a"]} and loss.top_k == 8
    for module in ("package.module:name", "mine", "/a folder/with:colon.py:name"):
        assert loaded(recipe, f"module: '{module}'").module == module
    loaded(recipe, "module: f.py:g", "objective=off_policy_scores")
    loaded(recipe, "module: f.py:g", "schedule.max_staleness=2", "rollout.top_p=0.9")
    loaded(recipe, "module: f.py:g, own_samples: true", "schedule.max_staleness=2")


@pytest.mark.parametrize(
    ("loss", "override", "words"),
    [
        ("module: 'f.py:'", "seed=1", r"loss\.module is 'f\.py:': write file\.py:name"),
        ("module: 'f.txt:g/h'", "seed=1", r"write file\.py:name"),
        ("module: f.py:g", "teacher_defaults.payload=sampled", "payload is 'sampled', but loss.type 'custom' reads"),
        ("module: f.py:g", TWO_TEACHERS, "a domain has several teachers, and the function sees the row of one"),
        ("module: f.py:g, own_samples: true", "rollout.top_p=0.9", "loss.type 'custom' estimates an expectation"),
        ("module: f.py:g, own_samples: true", "rollout.temperature=0.7", "'custom' needs them equal"),
        ("module: f.py:g, own_samples: true", "objective=off_policy_scores", "'custom' estimates an expectation"),
    ],
)
def test_what_does_not_go_together(recipe: Path, loss: str, override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        loaded(recipe, loss, *override.split(";"))
