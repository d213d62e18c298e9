"""Rows as they are published become prompts, ground truths and domains by the name of a mapping."""

from __future__ import annotations

from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.data import DataConfig
from mopd.config.reading.build import build_from_json
from mopd.data.columns import Fields, RowReader
from mopd.data.files import MISSING

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def read(row: dict[str, Any], columns: Any, domain: str | None = "d") -> Fields:
    entry = {"path": "x.jsonl", "columns": columns, "domain": domain}
    cfg = build_from_json(DataConfig, {"train": [entry]}, "recipe")
    reader = RowReader(cfg.files(cfg.train)[0])
    return reader.read({key: value for key, value in row.items() if key in reader.columns}, "x.jsonl: row 0")


CASES: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("gsm8k", {"question": "q", "answer": "She has 1,200.\n#### 1,200"}, "q", "1200"),
    ("math", {"problem": "q", "solution": r"so \boxed{1} or \boxed{\frac{1}{2}} ok", "level": 3}, "q", r"\frac{1}{2}"),
    ("math", {"problem": "q", "solution": "none", "answer": "7"}, "q", "7"),
    ("math", {"problem": "q"}, "q", MISSING),
    (
        "mbpp",  # the full set
        {"text": "Add.", "test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_setup_code": "", "code": "no"},
        "Add.\n\nYour code should pass these tests:\n\nassert f(1) == 2\nassert f(2) == 3",
        {"test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_setup_code": ""},
    ),
    (
        "mbpp",  # the sanitized one
        {"prompt": "Add.", "test_list": ["assert f()"], "test_imports": ["import math", "import re"]},
        "Add.\n\nYour code should pass these tests:\n\nassert f()",
        {"test_list": ["assert f()"], "test_setup_code": "import math\nimport re"},
    ),
    (
        "openthoughts",
        {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        [SYSTEM, USER],
        MISSING,
    ),
    ("messages", {"messages": [USER, ANSWER, USER, ANSWER], "ground_truth": "g"}, [USER, ANSWER, USER], "g"),
    ("question_answer", {"question": "q", "answer": "#### 1"}, "q", "#### 1"),
    ("dapo", {"prompt": [USER], "reward_model": {"ground_truth": "34", "style": "rule"}}, [USER], "34"),
    ({"prompt": "a.b", "ground_truth": "c"}, {"a": {"b": "q"}, "c": [1]}, "q", [1]),
]


@pytest.mark.parametrize(("columns", "row", "prompt", "truth"), CASES)
def test_published_rows(columns: Any, row: dict[str, Any], prompt: Any, truth: Any) -> None:
    fields = read(row, columns)
    assert (fields.prompt, fields.ground_truth, fields.domain, fields.extra_info) == (prompt, truth, "d", MISSING)


def test_domain_of_the_entry_wins() -> None:
    row = {"prompt": "q", "data_source": "own", "extra_info": {"i": 1}}
    assert read(row, "verl").domain == "d" and read(row, "verl", None).domain == "own"
    assert read(row, "verl").extra_info == {"i": 1}
    assert read({"conversations": [USER], "domain": "code"}, "openthoughts", None).domain == "code"


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ("gsm8k", {"question": "q", "answer": "42"}, "row 0: column 'answer' has no '#### NUMBER'"),
    ("math", {"problem": "q", "solution": r"\boxed{1"}, "row 0: there is no column 'answer' and no \\boxed{…}"),
    ("mbpp", {"text": "q", "test_list": "assert 1"}, "row 0: column 'test_list' is no list of assert statements"),
    ("mbpp", {"text": "q", "test_list": ["a"], "test_imports": [1]}, "column 'test_imports' holds what is no text"),
    (
        "messages",
        {"prompt": "q"},
        "row 0 has no column 'messages' (it has ): columns are read as 'messages': set data.",
    ),
    ({"prompt": "p"}, {"q": "q"}, "row 0 has no column 'p' (it has ): set data.columns.prompt"),
]


@pytest.mark.parametrize(("columns", "row", "message"), BAD)
def test_what_a_mapping_cannot_read(columns: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(row, columns)
    assert message in str(caught.value) and "\n" not in str(caught.value)


BAD_RECIPES: list[tuple[dict[str, Any], str]] = [
    ({"train": [{"path": "x", "columns": "gsm8k"}]}, "train[0]: 'x': its columns gsm8k have no domain"),
    ({"train": ["x"], "columns": {"prompt": "p"}}, "train[0]: 'x': its columns have no domain"),
    ({"train": ["x"], "columns": "gsm"}, "columns: expected one of verl, dapo, gsm8k"),
    ({"train": ["x"], "columns": {"promt": "p"}}, "unknown key 'columns.promt'; did you mean 'prompt'?"),
    ({"train": ["x"], "columns": {"domain": "p"}}, "missing key columns.prompt"),
    ({"train": ["x", {"columns": "verl"}]}, "missing key train[1].path"),
    ({"train": [{"path": "x", "columns": 3}]}, "train[0].columns: expected one of verl"),
    ({"train": [{"path": "x", "domain": ""}]}, "train[0].domain: is empty"),
    ({"train": [["x"]]}, "train[0]: expected text or a section, got ['x']"),
    ({"train": ["x"], "validation": [None]}, "validation[0]: expected text or a section, got null"),
    ({"train": "x"}, "train: expected a list (text or a section each), got 'x'"),
]


@pytest.mark.parametrize(("keys", "message"), BAD_RECIPES)
def test_what_a_recipe_may_not_say(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        build_from_json(DataConfig, keys, "recipe")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_text_that_reads_as_a_number_stays_text() -> None:
    cfg = build_from_json(DataConfig, {"train": ["x"], "columns": {"prompt": "1e-6", "domain": "d"}}, "recipe")
    assert cfg.columns.prompt == "1e-6"
