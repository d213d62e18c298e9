"""``null`` removes an entry of every mapping of free names whose values cannot be null, and of no other one."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.load import draft_recipe, dump, load_recipe, to_tree
from mopd.config.reading.tree import field_types, section_classes, split_dotted, union_members
from mopd.config.schema import Recipe
from tests.fixtures.recipe import RECIPE
from tests.unit.config.conftest import Write

CODE = RECIPE.replace("teachers:\n", "teachers:\n  code: {model: models/code, domains: [code]}\n")
REMOVALS: dict[str, tuple[str, list[str]]] = {
    "teachers.code": (CODE, []),
    "rewards.code": (RECIPE.replace("rewards: {", "rewards: {code: {type: math}, "), []),
    "domains.code": (
        f"{CODE}domains: {{code: {{gate: {{by: teacher_answers, others: skip}}}}, math: {{}}}}\n"
        "loss: {tail: bucket}\n",
        [],
    ),
    "data.domain_weights.code": (CODE.replace("data: {", "data: {domain_weights: {math: 2, code: 1}, "), []),
    "data.system_prompt.code": (CODE.replace("data: {", "data: {system_prompt: {math: Add., code: Write.}, "), []),
    "data.prompt_suffix.code": (CODE.replace("data: {", "data: {prompt_suffix: {code: Now.}, "), []),
    "loss.domain_budget.code": (
        f"{CODE}loss: {{domain_budget: {{math: 0.5, code: 0.5}}}}\n",
        ["loss.domain_budget.math=1"],
    ),
    'slurm.components."teachers.code"': (
        f'{CODE}slurm: {{form: heterogeneous, components: {{rollout: {{}}, "teachers.code": {{}}}}}}\n',
        [],
    ),
}
"""Entry to remove -> a recipe that has it, and what must change with it."""


def mappings(cls: type = Recipe, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted path and type of the values of every mapping of free names that an override reaches."""
    for name, annotation in field_types(cls).items():
        for member in union_members(annotation):
            is_mapping = typing.get_origin(member) is Mapping
            inner = typing.get_args(member)[1] if is_mapping else member
            below = (*path, name, "NAME") if is_mapping else (*path, name)
            if is_mapping:
                yield ".".join((*path, name)), inner
            for section in section_classes(inner):
                yield from mappings(section, below)


def at(tree: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def test_every_such_mapping_of_the_schema_is_tried_here() -> None:
    without_null = {
        path for path, values in mappings() if values is not Any and type(None) not in union_members(values)
    }
    assert {".".join(split_dotted(entry)[:-1]) for entry in REMOVALS} == without_null
    assert {path for path, _ in mappings()} > without_null | {"rollout.engine.extra", "teachers.NAME.tokenizer_map"}


@pytest.mark.parametrize("entry", REMOVALS)
def test_an_override_removes_an_entry(write: Write, entry: str) -> None:
    text, more = REMOVALS[entry]
    *above, name = split_dotted(entry)
    recipe = write(text)
    before = at(to_tree(load_recipe(recipe).recipe), tuple(above))
    loaded = load_recipe(recipe, [f"{entry}=null", *more])
    after = at(to_tree(loaded.recipe), tuple(above))
    assert name in before and [*after] == [key for key in before if key != name]
    if not more:
        assert after == {key: value for key, value in before.items() if key != name}
    Path("resolved.yaml").write_text(dump(loaded), encoding="utf-8")
    assert load_recipe("resolved.yaml").recipe == loaded.recipe
    assert not any(key.startswith(f"{entry}.") or key == entry for key in loaded.origins)
    other = f"{'.'.join(above)}.codes"
    with pytest.raises(UserError) as caught:
        load_recipe(recipe, [f"{other}=null"])
    said = f"{other}: null removes an entry, and there is none of this name; did you mean '"
    assert str(caught.value).startswith(f"recipe.yaml (override): {said}") and name in str(caught.value)


def test_a_recipe_removes_an_entry_of_its_base_and_a_later_override_brings_it_back(write: Write) -> None:
    write(CODE, "base.yaml")
    top = write("base: base.yaml\nteachers: {code: null}\n")
    assert [*load_recipe(top).recipe.teachers] == ["math"]
    again = ["teachers.code={model: models/other, domains: [code]}"]
    assert load_recipe(top, again).recipe.teachers["code"].model == "models/other"
    assert [*load_recipe("base.yaml", [*again, "teachers.code=null"]).recipe.teachers] == ["math"]
    assert [*load_recipe("base.yaml", ["teachers={code: null}"]).recipe.teachers] == ["math"]


def test_what_is_no_entry_is_refused_with_the_names_that_there_are(write: Write) -> None:
    def refused(key: str, text: str = RECIPE) -> str:
        recipe = write(text)
        with pytest.raises(UserError) as caught:
            load_recipe(recipe, [f"{key}=null"])
        assert (str(caught.value),) == draft_recipe(recipe, [f"{key}=null"]).problems
        return str(caught.value)

    said = "null removes an entry, and there is none of this name; "
    assert refused("rewards.hop") == f"recipe.yaml (override): rewards.hop: {said}did you mean 'default'?"
    assert refused("domains.hop") == f"recipe.yaml (override): domains.hop: {said}remove the key"
    many = "".join(f"  r{number}: {{type: math}}\n" for number in range(500))
    found = refused("rewards.r1x", RECIPE.replace("rewards: {default: {type: exact_match}}", f"rewards:\n{many}"))
    assert found.endswith("did you mean 'r1, r91, r81'?")
    assert "missing key teachers" not in refused("teachers.hop")


def test_null_stays_a_value_where_it_is_one(write: Write) -> None:
    recipe = write(RECIPE.replace("domains: [math]", "domains: [math], tokenizer: own, tokenizer_map: {a: b}"))
    changed = ["teachers.math.tokenizer_map.a=null", "student.megatron_overrides.x=null", "rollout.engine.type=vllm"]
    loaded = load_recipe(recipe, [*changed, "rollout.engine.extra={seed: 1}", "rollout.engine.extra.seed=null"]).recipe
    assert loaded.teachers["math"].tokenizer_map == {"a": None}
    assert loaded.student.megatron_overrides == {"x": None}
    assert to_tree(loaded.rollout.engine)["extra"] == {"seed": None}
