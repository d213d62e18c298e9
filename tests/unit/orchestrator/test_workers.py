"""What a recipe's files become before any model is there, and the workers that are made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.config.data import DataConfig, ValidationConfig
from mopd.config.groups import TeacherConfig
from mopd.config.losses import TopKLossConfig
from mopd.config.rewards import ExactMatchConfig
from mopd.config.schedule import PreflightConfig, ScheduleConfig
from mopd.config.schema import Recipe
from mopd.config.student import StudentConfig
from mopd.orchestrator.workers import build_validator, read_inputs
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A recipe with validation; its teachers' folders need not exist."""
    make_hf_model(tmp_path / "student")
    make_tokenizer(tmp_path / "student")
    for name, domains in (("train", ("math", "code")), ("held", ("code", "math", "code"))):
        rows = [{"prompt": "1+1=", "data_source": domain, "reward_model": {"ground_truth": "2"}} for domain in domains]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Recipe(
        run_dir="unused",
        student=StudentConfig(model=str(tmp_path / "student")),
        teachers={"all": TeacherConfig(model="unused", domains=("math", "code"))},
        data=DataConfig(train=(str(tmp_path / "train.jsonl"),), validation=(str(tmp_path / "held.jsonl"),)),
        schedule=ScheduleConfig(steps=1, prompts_per_step=1),
        rewards={"default": ExactMatchConfig(type="exact_match")},
        validation=ValidationConfig(),
    )


@pytest.mark.parametrize(
    ("held", "trained", "watch", "line"),
    [
        ("law", "math", ("law",), None),
        ("law", "math", (), r"\['law'\] that no teacher answers for: .* name them in validation.watch"),
        ("math", "math", ("law",), "watch names 'law', but data.validation has no row of it"),
        ("law", "law", ("law",), "watch names 'law', but data.train has 1 rows of it"),
    ],
)
def test_a_watched_domain_is_validated_and_not_taught(
    recipe: Recipe, tmp_path: Path, held: str, trained: str, watch: tuple[str, ...], line: str | None
) -> None:
    for name, domain in (("train", trained), ("held", held)):
        row = {"prompt": "1+1=", "data_source": domain, "reward_model": {"ground_truth": "2"}}
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write("\n" + json.dumps(row))
    if trained == "law":  # nothing else keeps a default teacher from teaching it
        recipe = replace(recipe, teachers={"all": TeacherConfig(model="unused", domains=("math",), default=True)})
    recipe = replace(recipe, validation=ValidationConfig(watch=watch))
    if line is not None:
        with pytest.raises(UserError, match=line):
            read_inputs(recipe)
        return
    validator = build_validator(recipe, read_inputs(recipe))
    assert validator is not None and set(validator.domains) == {"code", "math"}


def test_there_is_a_validator_where_the_recipe_asks_for_one(recipe: Recipe) -> None:
    inputs = read_inputs(recipe)
    assert inputs.rewards is not None and inputs.validation is not None
    validator = build_validator(recipe, inputs)
    assert validator is not None and set(validator.domains) == {"code", "math"}
    without = replace(recipe, validation=None)
    inputs = read_inputs(without)
    assert inputs.validation is None and build_validator(without, inputs) is None


def test_budgets_and_adaptive_weights_need_every_domain(recipe: Recipe, tmp_path: Path) -> None:
    read_inputs(replace(recipe, loss=TopKLossConfig(domain_budget={"math": 0.5, "code": 0.5})))
    for budget in ({"math": 1.0}, {"math": 0.5, "code": 0.25, "law": 0.25}):
        named = "the data has .'code', 'math'.: name every domain or none"
        with pytest.raises(UserError, match=rf"loss.domain_budget names .*, {named}"):
            read_inputs(replace(recipe, loss=TopKLossConfig(domain_budget=budget)))
    adaptive = replace(recipe.data, domain_weights="adaptive")
    read_inputs(replace(recipe, data=adaptive))
    (tmp_path / "held.jsonl").write_text((tmp_path / "held.jsonl").read_text().replace("math", "code"))
    unchecked = replace(recipe, data=adaptive, preflight=PreflightConfig(require_better_teacher=False))
    with pytest.raises(UserError, match=r"data.domain_weights is adaptive, but data.validation has no row of .*'math'"):
        read_inputs(unchecked)
