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
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from mopd.config.reading.tree import field_default, field_types, section_classes, type_values, union_members
from mopd.config.schema import Recipe
from mopd.config.values import Lines

INTRODUCTION = """\
# Recipes: every key

A recipe is one YAML file (JSON is YAML too) that says everything about a run. `mopd config RECIPE` prints every value
and where it comes from. `python -m mopd.config.document docs/recipes.md` writes this page.

- **Precedence:** default < `base` (another recipe, named relative to this file) < recipe < `key=value` on the command
  line. Sections merge key by key; lists and scalars are replaced. A section of another `type` replaces the one below
  it, unless that is `type: auto` or both types have the same keys. `null` removes an optional section, `{}` empties a
  mapping.
- **Overrides** are YAML: `mopd train my.yaml seed=1 data.train='[a.parquet, b.parquet]'`. A key part that holds a dot
  or `=` goes in double quotes: `'data.domain_weights."a.b"=2'`.
- **Refused YAML:** dates, `1:30`, `010`, merge keys (`<<`), tags (`!…`) that do not fit, several documents in one file.
  Quote such values.
- **Paths** are relative to the working directory, and may name the Hugging Face Hub
  ([data.md](data.md#names-of-the-hub)).
- **Below** a key's type and default stand in brackets; of choices the default is bold. *absent* is `null`. `type`
  chooses among the forms of a section.
"""


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


def _section(
    cls: type, path: str, lines: list[str], headings: dict[type, str], told: dict[tuple[str, Row], str]
) -> None:
    """Heading, class text and keys of one section, then its subsections; ``headings`` are those under which a class
    already stands, ``told`` those under which a row of some path does."""
    choice = f" with `type: {' | '.join(type_values(cls))}`" if type_values(cls) else ""
    heading = f"{f'`{path}`' if path else 'Top level'}{choice}"
    inherited = next((base for base in cls.__mro__[1:] if base in headings and dataclasses.is_dataclass(base)), None)
    headings |= {base: heading for base in cls.__mro__[:-1] if base not in headings}
    lines += [f"## {heading}\n", _text(inspect.getdoc(cls) or "") + "\n"]
    annotations = field_types(cls)
    above = () if inherited is None else field_types(inherited)
    rows = _rows(cls, above)
    same = [] if inherited is None else [f"Also the keys of {headings[inherited]}."]
    for where in dict.fromkeys(told[path, row] for row in rows if (path, row) in told):
        names = ", ".join(row[0] for row in rows if told.get((path, row)) == where)
        same.append(f"As in {where}: {names}.")
    if same:
        lines.append(" ".join(same) + "\n")
    rows = [row for row in rows if (path, row) not in told]
    if rows:
        lines += [*(f"- {name} ({kind}): {meaning}" for name, kind, meaning in rows), ""]
    told |= {(path, row): heading for row in rows}
    elsewhere: list[str] = []
    new: list[tuple[type, str]] = []
    for name, annotation in annotations.items():
        below = f"{path}.{name}" if path else name
        for member in union_members(annotation):
            inner, suffix = _inner(member)
            for section in section_classes(inner):
                if section in headings and name not in above and told.get((path, _row(cls, name)), heading) == heading:
                    elsewhere.append(f"`{name}`: {headings[section]}")
                elif section not in headings and section not in (known for known, _ in new):
                    new.append((section, f"{below}{suffix}"))
    if elsewhere:
        lines.append(f"Described above: {'; '.join(elsewhere)}.\n")
    for section, below in new:
        if section not in headings:  # a section before it may have led there
            _section(section, below, lines, headings, told)


def _rows(cls: type, without: Collection[str]) -> list[Row]:
    """Entries of a section's own fields: all but those ``without``, and a ``type`` that the heading tells."""
    only_type = ("type",) if len(type_values(cls)) == 1 else ()
    return [_row(cls, field.name) for field in dataclasses.fields(cls) if field.name not in (*without, *only_type)]


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
    plain = {bool: "true/false", int: "int", float: "float", str: "text", Any: "any"}
    plain[Lines] = "text"
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
            parts += [f"`type: {value}`" for value in type_values(member)] or ["section"]
        elif member is not type(None):
            parts.append(plain[member])
    return list(dict.fromkeys(parts))


def _type_and_default(cls: type, field: dataclasses.Field[Any]) -> str:
    """Choices with the default one in bold; else the type and, if it is not empty, the default behind it."""
    words = _words(field_types(cls)[field.name])
    default = _default(field)
    if default in words:
        return ", ".join(f"**{word}**" if word == default else word for word in words)
    return ", ".join([*words, default] if default else words)


def _default(field: dataclasses.Field[Any]) -> str:
    """The default as it is written; nothing for an empty collection, and for a section whose keys have theirs."""
    value = field_default(field)
    if value is dataclasses.MISSING:
        return "**required**"
    if dataclasses.is_dataclass(value):
        return f"`type: {value.type}`" if hasattr(value, "type") else ""
    if value is None:
        return "absent"
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
