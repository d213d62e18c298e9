"""``docs/recipes.md``, written from the text under each config field. ``python -m mopd.config.document`` prints it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mopd.config.reading.tree import field_default, field_types, section_classes, type_values, union_members
from mopd.config.schema import Recipe
from mopd.config.values import Lines

INTRODUCTION = """\
# Recipes: every key

A recipe is one YAML file (JSON is YAML too) that says everything about a run. `mopd config RECIPE` prints every value
and where it comes from.

- **Precedence:** default < `base` (another recipe, named relative to this file) < recipe < `key=value` on the command
  line. Sections merge key by key; lists and scalars are replaced. A section of another `type` replaces the one below
  it, unless that is `auto` or both have the same keys. `null` removes an optional section, and an entry of names to
  values that cannot be null (`rewards.code=null`, `teachers.code=null`); `{}` empties a mapping.
- **Overrides** are YAML: `mopd train my.yaml seed=1 data.train='[a.parquet, b.parquet]'`. Double quotes hold a part
  with a dot or `=`: `'data.domain_weights."a.b"=2'`.
- **Quote** dates, `1:30` and `010`.
- **Paths** are relative to the working directory, or [names of the Hub](data.md#names-of-the-hub). A `module` of yours
  is `file.py:name`, `package.module:name`, or an entry point.
- **In brackets** stands the default, or the type of a key that may be absent (`null`); of choices the default is bold.
  A heading with a colon names the `type` that chooses this form of a section.
"""


PLAIN: Mapping[Any, str] = {bool: "true/false", int: "int", float: "float", str: "text", Lines: "text"}
"""Types of one value in a reader's words."""
ABSENT = "absent"


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the text under it, read from the source: Python does not keep these strings."""
    docs: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__[:-1]):
        docs |= _own_field_docs(ancestor)
    return docs


def _own_field_docs(cls: type) -> dict[str, str]:
    module = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    docs: dict[str, str] = {}
    for statement, below in itertools.pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            docs[statement.target.id] = " ".join(below.value.value.split())
    return docs


def recipes_page() -> str:
    """The whole page as Markdown."""
    lines = [INTRODUCTION]
    _section(Recipe, "", lines, {}, {})
    return "\n".join(lines).rstrip() + "\n"


Row = tuple[str, ...]
Place = tuple[str, str]
"""Path of a section and the value of ``type`` that chooses it, if any."""


def _section(
    cls: type, path: str, lines: list[str], places: dict[type, Place], told: dict[tuple[str, Row], Place]
) -> None:
    """Heading, class text and keys of one section, then its subsections; ``places`` are those where a class already
    stands, ``told`` those where a row of some path does."""
    types = type_values(cls)
    place = (path, types[0] if types else "")
    places |= {base: place for base in cls.__mro__[:-1] if base not in places}
    lines.append(f"## {_name(path, *types)}\n")
    text = _text(inspect.getdoc(cls) or "")
    if text not in (row[2] for _, row in told):
        lines.append(text + "\n")
    annotations = field_types(cls)
    above = (path, *(places[base][0] for base in cls.__mro__[1:] if base in places))
    rows = _rows(cls)
    same = {row: told[at, row] for row in rows for at in reversed(above) if (at, row) in told}
    if same:
        names = {where: ", ".join(row[0] for row in same if same[row] == where) for where in same.values()}
        lines.append(" ".join(f"As in {_reference(where, path)}: {names[where]}." for where in names) + "\n")
    rows = [row for row in rows if row not in same]
    if rows:
        lines += [*(f"- {name} ({kind}): {meaning}" for name, kind, meaning in rows), ""]
    told |= {(path, row): place for row in rows}
    new: list[tuple[type, str]] = []
    for name, annotation in annotations.items():
        below = f"{path}.{name}" if path else name
        for member in union_members(annotation):
            inner, suffix = _inner(member)
            for section in section_classes(inner):
                if section not in places and section not in (known for known, _ in new):
                    new.append((section, f"{below}{suffix}"))
    for section, below in new:
        if section not in places:  # else a section before it has led there
            _section(section, below, lines, places, told)


def _name(path: str, *types: str) -> str:
    """A section as a heading names it."""
    name = f"`{path}`" if path else "Top level"
    return f"{name}: {', '.join(f'`{value}`' for value in types)}" if types else name


def _reference(place: Place, path: str) -> str:
    """A section as text in the section of ``path`` names it."""
    return f"`{place[1]}`" if place[0] == path and place[1] else _name(place[0], *filter(None, place[1:]))


def _rows(cls: type) -> list[Row]:
    """Entries of a section's fields: all but a ``type`` that the heading tells."""
    only_type = len(type_values(cls)) == 1
    return [_row(cls, field.name) for field in dataclasses.fields(cls) if not (only_type and field.name == "type")]


def _row(cls: type, name: str) -> Row:
    (field,) = (field for field in dataclasses.fields(cls) if field.name == name)
    return tuple(_text(word) for word in (f"`{name}`", _type_and_default(cls, field), field_docs(cls)[name]))


def _inner(member: Any) -> tuple[Any, str]:
    """Return what a mapping or a list holds, else the annotation itself, and the suffix of its path."""
    origin = typing.get_origin(member)
    if origin is Mapping:
        return typing.get_args(member)[1], ".NAME"
    return (typing.get_args(member)[0], "[…]") if origin is tuple else (member, "")


def _words(annotation: Any) -> list[str]:
    """The forms that an annotation allows, in a reader's words."""
    plain = {**PLAIN, Any: "any"}
    parts: list[str] = []
    for member in union_members(annotation):
        origin = typing.get_origin(member)
        if origin is Literal:
            parts += [f"`{choice}`" for choice in typing.get_args(member)]
        elif origin is tuple:
            parts.append(f"list of {' or '.join(_words(typing.get_args(member)[0]))}")
        elif origin is Mapping:
            parts.append(f"names to {', '.join(_words(typing.get_args(member)[1]))}")
        elif isinstance(member, type) and dataclasses.is_dataclass(member):
            parts += [f"`{value}`" for value in type_values(member)] or ["section"]
        elif member is not type(None):
            parts.append(plain[member])
    return list(dict.fromkeys(parts))


def _type_and_default(cls: type, field: dataclasses.Field[Any]) -> str:
    """Choices with the default one in bold; else the default, and the type where the default does not show it."""
    words = _words(field_types(cls)[field.name])
    default = _default(field)
    if field.name == "type":
        return default  # the heading has the choices
    if default in words:
        return ", ".join(f"**{word}**" if word == default else word for word in words)
    plain = set(words) <= {*PLAIN.values(), "names to text"}
    if plain and default == ABSENT:
        return ", ".join(words)
    if plain and isinstance(field_default(field), (bool, int, float)):
        return default
    return ", ".join([*words, default] if default else words)


def _default(field: dataclasses.Field[Any]) -> str:
    """The default as it is written; nothing for an empty collection, and for a section whose keys have theirs."""
    value = field_default(field)
    if value is dataclasses.MISSING:
        return "**required**"
    if dataclasses.is_dataclass(value):
        return f"`{value.type}`" if hasattr(value, "type") else ""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (tuple, dict)):
        return f"`{list(value)}`" if value else ""
    return f"`{value}`"


def _text(text: str) -> str:
    """Text on one line, our double backticks as Markdown's single ones, names of pages as links."""
    text = re.sub(r"(``)?docs/(\w+\.md)(#[\w-]+)?(``)?", r"[\2](\2\3)", " ".join(text.split()))
    return text.replace("``", "`")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(recipes_page(), encoding="utf-8")
    else:
        sys.stdout.write(recipes_page())
