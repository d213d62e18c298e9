"""``docs/recipes.md``, written from the text under each config field. ``python -m mopd.config.document`` prints it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
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

A recipe is one YAML file (JSON is YAML too) that says everything about a run. This page is written from the schema
in `mopd/config/` by `python -m mopd.config.document`; `mopd config RECIPE` prints a recipe with every value resolved
and the place that it comes from.

- **Precedence:** default < `base` < recipe < `key=value` behind the recipe on the command line. `base:` names one
  other recipe file, relative to the file that names it. Sections merge key by key, so teachers merge by name; lists and
  scalars are replaced. A section of another `type`, with other keys, replaces the one below it, but adds to one of
  `type: auto`: `loss.type=topk_jsd` leaves `loss.top_k` as it was, `loss.type=k2` does not. `null` takes an optional
  section away, `{}` what a mapping of names (of domains, say) holds below: `data.domain_weights={}`.
- **`mopd train my.yaml seed=1 data.train='[a.parquet, b.parquet]'`**: an override's value is YAML. A key part that
  holds a dot or `=` goes in double quotes: `'data.domain_weights."a.b"=2'`.
- **Strict:** an unknown key, a wrong type, a repeated key or a key that is not text stops the command with one line
  that names file, line and dotted path. Two kindnesses: a whole number is taken where a number is expected, and `1e-6`
  (which YAML 1.1 reads as text) is a number wherever one fits.
- **YAML that reads as something else** is refused: dates, numbers of base 60 (`1:30`) and with leading zeros (`010`),
  merge keys (`<<`), tags (`!…`) that do not fit their value, several documents in one file. In quotes it is text. Whole
  numbers have 64 bits, numbers are finite.
- **Limits:** 1 MiB, 20,000 keys and values and 64 levels, with every alias written out and every default in place;
  100 characters a key; 16 files by way of `base`; 4,000 bytes a text; 100 teachers. No key takes a number that a rank
  could not use: at most 2,147,483,647 for a count, 2,000,000 seconds for a deadline, 1e30 for anything else.
- **Texts** hold no control characters, as line ends and tabs are, which paths, names and scripts would carry on; free
  values (`chat_template_kwargs`, `megatron_overrides`) may. A regular expression spells them: `\\n`.
- **Names** of teachers and domains have 1 to 100 characters. Brackets, slashes, quotes and spaces are fine.
- **Paths** (`run_dir`, model folders, data files, the chat template, a reward's file) are relative to the **current
  working directory**, not to the recipe. Only `base` is relative to its file. Models and data may have names of the
  Hugging Face Hub instead ([data.md](data.md#names-of-the-hub)).
- **`type`** chooses among the forms of a section. Where a default is given, the section may leave `type` out.
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
    _section(Recipe, "", lines, {})
    return "\n".join(lines).rstrip() + "\n"


def _section(cls: type, path: str, lines: list[str], headings: dict[type, str]) -> None:
    """Heading, class text and table of one section, then its subsections; ``headings`` are those under which a class
    already stands."""
    choice = f" with `type: {' | '.join(type_values(cls))}`" if type_values(cls) else ""
    heading = f"{f'`{path}`' if path else 'Top level'}{choice}"
    inherited = next((base for base in cls.__mro__[1:] if base in headings and dataclasses.is_dataclass(base)), None)
    headings |= {base: heading for base in cls.__mro__[:-1] if base not in headings}
    lines.append(f"## {heading}\n")
    lines.append(_cell(inspect.getdoc(cls) or "") + "\n")
    docs = field_docs(cls)
    annotations = field_types(cls)
    if inherited is not None:
        lines.append(f"The keys of {headings[inherited]}, and:\n")
    above = () if inherited is None else field_types(inherited)
    only_type = ("type",) if len(type_values(cls)) == 1 else ()  # the heading tells it
    rows = [field for field in dataclasses.fields(cls) if field.name not in (*above, *only_type)]
    if rows:
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in rows:
        words = (f"`{field.name}`", _words(annotations[field.name]), _default(field), docs[field.name])
        lines.append("| " + " | ".join(_cell(word) for word in words) + " |")
    lines.append("")
    elsewhere: list[str] = []
    new: list[tuple[type, str]] = []
    for name, annotation in annotations.items():
        below = f"{path}.{name}" if path else name
        for member in union_members(annotation):
            inner, suffix = _inner(member)
            for section in section_classes(inner):
                if section in headings and name not in above:
                    elsewhere.append(f"{name}: {headings[section]}")
                elif section not in headings and section not in (known for known, _ in new):
                    new.append((section, f"{below}{suffix}"))
    if elsewhere:
        lines.append(f"Sections that stand above: {'; '.join(elsewhere)}.\n")
    for section, below in new:
        _section(section, below, lines, headings)


def _inner(member: Any) -> tuple[Any, str]:
    """Return what a mapping or a list holds, else the annotation itself, and the suffix of its path."""
    origin = typing.get_origin(member)
    if origin is Mapping:
        return typing.get_args(member)[1], ".NAME"
    return (typing.get_args(member)[0], "[…]") if origin is tuple else (member, "")


def _words(annotation: Any) -> str:
    """An annotation in a reader's words."""
    plain = {bool: "true/false", int: "int", float: "float", str: "text", type(None): "null", Any: "any"}
    plain[Lines] = "text"
    parts: list[str] = []
    for member in union_members(annotation):
        origin = typing.get_origin(member)
        if origin is Literal:
            parts += [f"`{choice}`" for choice in typing.get_args(member)]
        elif origin is tuple:
            parts.append(f"list of {_words(typing.get_args(member)[0]).replace(', ', ' or ')}")
        elif origin is Mapping:
            parts.append(f"names to {_words(typing.get_args(member)[1])}")
        elif isinstance(member, type) and dataclasses.is_dataclass(member):
            parts += [f"`type: {value}`" for value in type_values(member)] or ["section"]
        else:
            parts.append(plain[member])
    return ", ".join(dict.fromkeys(parts))


def _default(field: dataclasses.Field[Any]) -> str:
    value = field_default(field)
    if value is dataclasses.MISSING:
        return "**required**"
    if dataclasses.is_dataclass(value):
        return f"`type: {value.type}`" if hasattr(value, "type") else "section defaults"
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (tuple, dict)):
        return "empty" if not value else f"`{list(value)}`"
    return f"`{value}`"


def _cell(text: str) -> str:
    """Text for one table cell: one line, our double backticks as Markdown's single ones."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(recipes_page(), encoding="utf-8")
    else:
        sys.stdout.write(recipes_page())
