"""The page of keys is written from the source and up to date."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from mopd.config import data, groups, losses, schema, student
from mopd.config.document import field_docs, recipes_page
from mopd.config.reading.tree import type_values

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
SECTIONS = sorted(
    {
        cls
        for module in (schema, data, groups, losses, student)
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if dataclasses.is_dataclass(cls)
    },
    key=lambda cls: cls.__name__,
)


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == recipes_page(), "run: python -m mopd.config.document docs/recipes.md"


@pytest.mark.parametrize("cls", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_key_has_a_text(cls: type) -> None:
    assert list(field_docs(cls)) == [field.name for field in dataclasses.fields(cls)]
    assert all(field_docs(cls).values())
    assert inspect.getdoc(cls)


def test_every_section_is_on_the_page() -> None:
    page = recipes_page()
    for cls in SECTIONS:
        for name, text in field_docs(cls).items():
            if name == "type" and len(type_values(cls)) == 1:
                continue  # the heading says it
            assert f"- `{name}` (" in page
            for part in re.split(r"(?:``)?docs/\w+\.md(?:#[\w-]+)?(?:``)?", text):  # which is a link there
                assert part.replace("``", "`") in page
