"""Every key of the schema: values out of range are refused by its name; what loads, dumps and loads back equal."""

from __future__ import annotations

import json
import math
import os
import typing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mopd.base.types import UserError
from mopd.config.load import dump, load_recipe, to_tree
from mopd.config.reading.build import build_from_json
from mopd.config.reading.tree import field_types, union_members
from tests.fixtures.recipe import RECIPE
from tests.unit.config.strategies import Field, classes, fields, least_section, overlay, values

NUM_EXAMPLES = int(os.environ.get("MOPD_FUZZ_MUTATIONS", "150"))
ANY_INTEGER = {"seed"}
"""Keys that take whole numbers of either sign, as large as 64 bits hold."""
NEGATIVE = {"top_k": -1, "logprob_min_clamp": -10.0, "presence_penalty": -1.0} | dict.fromkeys(ANY_INTEGER, -5)
"""Keys that take some negative number."""
CONTROLS = "\0\a\b\t\n\v\f\r\x1b\x1f\x7f\x80\x85\x9b\u2028\u2029\u202a\u202e\u2066\u2069"
KEYS = [(cls, name) for cls in classes().values() for name in field_types(cls)]
FIELDS = list(fields())


def refused(cls: type, name: str, value: Any) -> str | None:
    try:
        build_from_json(cls, {**least_section(cls), name: value}, "file")
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return str(error)
    return None


def kinds(cls: type, name: str) -> set[Any]:
    """Scalar types of a key; of a list, those of its items."""
    return {
        item
        for member in union_members(field_types(cls)[name])
        for item in (typing.get_args(member)[:1] if typing.get_origin(member) is tuple else (member,))
    }


def as_given(cls: type, name: str, value: Any) -> Any:
    is_list = any(typing.get_origin(member) is tuple for member in union_members(field_types(cls)[name]))
    return [value] if is_list else value


@pytest.mark.parametrize("cls", classes().values(), ids=classes())
def test_what_suffices_is_taken(cls: type) -> None:
    """Else the refusals below would prove nothing."""
    build_from_json(cls, least_section(cls), "file")


@pytest.mark.parametrize(("cls", "name"), KEYS, ids=lambda part: getattr(part, "__name__", part))
def test_values_out_of_range_are_refused_by_name(cls: type, name: str) -> None:
    bad: list[Any] = []
    if kinds(cls, name) & {int, float}:
        bad += [-(10**40), 10**40, True, "many"]
        bad += [] if name in NEGATIVE else [-1]
    if int in kinds(cls, name):
        bad += [1.5] + ([] if name in ANY_INTEGER else [2**62])
    if float in kinds(cls, name):
        bad += [math.inf, -math.inf, math.nan, "1e999", "-1e999", 1e300]
    if name.endswith("timeout_s"):
        bad += [1e-9, 1e9]
    if str in kinds(cls, name):
        bad += ["", "\ud800", "x" * 5000, 3, False, *(f"a{letter}b" for letter in CONTROLS)]
    for value in bad:
        message = refused(cls, name, as_given(cls, name, value))
        assert message is not None and name in message, (value, message)


@pytest.mark.parametrize(("name", "value"), NEGATIVE.items())
def test_exceptions_are_real(name: str, value: Any) -> None:
    assert any(refused(cls, name, value) is None for cls, key in KEYS if key == name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> typing.Iterator[Path]:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "base.yaml").write_text(RECIPE)
    yield folder


def test_what_loads_dumps_and_loads_back_equal(folder: Path) -> None:
    """Any key of the whole schema with any value, through a file and through what is printed."""
    counts: Counter[str] = Counter()
    path, resolved = folder / "recipe.json", folder / "resolved.yaml"

    @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        field: Field = data.draw(st.sampled_from(FIELDS))
        value = data.draw(values(field_types(field[1])[field[2]]))
        counts["tried"] += 1
        path.write_text(json.dumps({"base": "base.yaml", **overlay(field, value)}))
        try:
            loaded = load_recipe(path)
        except UserError as error:
            assert "\n" not in str(error) and str(folder) in str(error)
            return
        counts["loaded"] += 1
        resolved.write_text(dump(loaded), encoding="utf-8")
        again = load_recipe(resolved)
        assert again.recipe == loaded.recipe
        assert json.dumps(to_tree(again.recipe)) == json.dumps(to_tree(loaded.recipe))  # True is no 1, -0.0 no 0.0

    check()
    print(dict(counts))
    assert counts["loaded"] > counts["tried"] // 4, counts
