"""From recipe files and ``--set`` to a checked ``Recipe``, and back to text.

Precedence: schema default < ``base`` < recipe < ``--set a.b=c``. Nothing is accepted silently: an unknown key, a wrong
type, a repeated key or a failed check raises ``UserError`` with the file, the line and the dotted path.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from mopd.config.groups import Teacher
from mopd.config.schema import Recipe
from mopd.config.tree import (
    SET_ORIGIN,
    Leaf,
    Node,
    Section,
    dotted,
    field_default,
    field_types,
    merge,
    read_chain,
    read_overrides,
    section_classes,
    type_values,
    union_members,
)
from mopd.types import UserError

DEFAULT_ORIGIN = "default"
"""Origin of a value that no file sets."""
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers such as ``1e-6``, which YAML 1.1 reads as text."""

Path_ = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A recipe with its history."""

    recipe: Recipe
    origins: Mapping[str, str]
    """Dotted path of every value -> ``file:line``, ``--set`` or ``default``."""
    path: str
    """The recipe file, as it was given."""
    sources: tuple[str, ...]
    """All files read, the deepest base first."""

    def where(self, *path: str) -> str:
        """``file:line: dotted.path`` of a key, to begin an error line with; a default is named by the recipe file."""
        key = dotted(path)
        origin = self.origins.get(key) or next((o for k, o in self.origins.items() if k.startswith(f"{key}.")), None)
        return f"{_place(self.path, self.path if origin in (None, DEFAULT_ORIGIN) else origin)}: {key}"


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read, merge and check a recipe.

    Args:
        path: recipe file (YAML; JSON is YAML too).
        overrides: ``key=value`` texts of ``--set``; values are YAML.

    Raises:
        UserError: one line with file, line and dotted path.
    """
    chain = read_chain(path)
    tree = Section({}, os.fspath(path))
    for _, section in chain:
        tree = merge(tree, section, Recipe)
    if overrides:
        tree = merge(tree, read_overrides(overrides), Recipe)
    tree = _spread_teacher_defaults(tree)
    builder = _Builder(os.fspath(path))
    recipe = builder.dataclass(tree, Recipe, (), None)
    origins = {dotted(key): builder.origins.get(key, DEFAULT_ORIGIN) for key in leaf_paths(to_tree(recipe))}
    return Loaded(recipe=recipe, origins=origins, path=os.fspath(path), sources=tuple(name for name, _ in chain))


def _spread_teacher_defaults(tree: Section) -> Section:
    """Put ``teacher_defaults`` under every teacher, each value with the place where the table stands."""
    defaults, teachers = tree.items.get("teacher_defaults"), tree.items.get("teachers")
    if not isinstance(defaults, Section) or not isinstance(teachers, Section):
        return tree
    spread = {
        name: merge(defaults, teacher, Teacher) if isinstance(teacher, Section) else teacher
        for name, teacher in teachers.items.items()
    }
    return Section(tree.items | {"teachers": Section(spread, teachers.origin)}, tree.origin)


def to_tree(value: Any) -> Any:
    """A config object as plain dicts, lists and scalars, in field order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_tree(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_tree(item) for item in value]
    return value


def leaf_paths(tree: Any, path: Path_ = ()) -> dict[Path_, Any]:
    """Path -> value of every scalar, list and empty mapping of a plain tree."""
    if isinstance(tree, dict) and (tree or not path):
        return {leaf: value for key, node in tree.items() for leaf, value in leaf_paths(node, (*path, key)).items()}
    return {path: tree}


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Dotted path -> value of everything in a recipe."""
    return {dotted(path): value for path, value in leaf_paths(to_tree(recipe)).items()}


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted path -> the two values (None where absent) of every key that differs."""
    left, right = flatten(one), flatten(other)
    keys = [*left, *(key for key in right if key not in left)]
    return {
        key: (left.get(key), right.get(key))
        for key in keys
        if (key in left) != (key in right) or left.get(key) != right.get(key)
    }


def _place(recipe_file: str, origin: str) -> str:
    """Where to send the reader: ``file:line``, or the recipe with a note that ``--set`` gave the value."""
    return f"{recipe_file} ({SET_ORIGIN})" if origin == SET_ORIGIN else origin


def dump(loaded: Loaded, *, origins: bool = True) -> str:
    """The resolved recipe as YAML that loads back to the same ``Recipe``, each value with its origin as a comment."""
    lines = [f"# resolved from {', '.join(reversed(loaded.sources))}"] if origins else []
    _dump_section(to_tree(loaded.recipe), (), loaded.origins if origins else {}, lines)
    return "\n".join(lines) + "\n"


def _dump_section(section: Mapping[str, Any], path: Path_, origins: Mapping[str, str], lines: list[str]) -> None:
    for key, value in section.items():
        start = f"{'  ' * len(path)}{_scalar(key)}:"
        if isinstance(value, dict) and value:
            lines.append(start)
            _dump_section(value, (*path, key), origins, lines)
        else:
            origin = origins.get(dotted((*path, key)))
            lines.append(f"{start} {_scalar(value)}" + (f"  # {origin}" if origin else ""))


def _scalar(value: Any) -> str:
    """YAML of a scalar, a list or an empty mapping, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text


class _Builder:
    """Turns a merged tree into config objects, remembering origins."""

    def __init__(self, recipe_file: str) -> None:
        self.recipe_file = recipe_file
        self.origins: dict[Path_, str] = {}

    def fail(self, origin: str, path: Path_, problem: str) -> NoReturn:
        raise UserError(f"{_place(self.recipe_file, origin)}: {f'{dotted(path)}: ' if path else ''}{problem}")

    def dataclass(self, section: Section, cls: type, path: Path_, default: Any) -> Any:
        """An instance of ``cls``; keys that the section lacks come from ``default``, else from the fields."""
        types_ = field_types(cls)
        for key, node in section.items.items():
            if key not in types_:
                self.fail(node.origin, (), f"unknown key '{dotted((*path, key))}'; {_suggest(key, tuple(types_))}")
        values: dict[str, Any] = {}
        missing: list[str] = []
        for field in dataclasses.fields(cls):
            inherited = getattr(default, field.name) if isinstance(default, cls) else field_default(field)
            if field.name in section.items:
                node = section.items[field.name]
                values[field.name] = self.value(node, types_[field.name], (*path, field.name), inherited)
            elif inherited is dataclasses.MISSING:
                missing.append(dotted((*path, field.name)))
            else:
                values[field.name] = inherited
        if missing:
            origin = section.origin if path else self.recipe_file
            self.fail(origin, (), f"missing {'keys' if missing[1:] else 'key'} {', '.join(missing)}")
        try:
            return cls(**values)
        except ValueError as error:
            self._fail_check(error, section, tuple(types_), path)

    def value(self, node: Node, annotation: Any, path: Path_, default: Any) -> Any:
        """The value of one key, checked against its annotation."""
        members = union_members(annotation)
        if isinstance(node, Leaf):
            self.origins[path] = node.origin
            if node.value is None and (type(None) in members or annotation is Any):
                return None
        classes = section_classes(annotation)
        if classes:
            return self._one_of(node, classes, path, default)
        for member in members:
            if typing.get_origin(member) is Mapping:
                return self._mapping(node, typing.get_args(member)[1], path)
        if annotation is Any and isinstance(node, Section):
            return self._mapping(node, Any, path)
        if isinstance(node, Section):
            self.fail(node.origin, path, f"expected {_expected(annotation)}, got a section")
        for member in members:
            converted = _convert(node.value, member)
            if converted is not _MISFIT:
                return converted
        self.fail(node.origin, path, f"expected {_expected(annotation)}, got {_shown(node.value)}")

    def _mapping(self, node: Node, annotation: Any, path: Path_) -> dict[str, Any]:
        if not isinstance(node, Section):
            self.fail(node.origin, path, f"expected a section of named values, got {_shown(node.value)}")
        self.origins[path] = node.origin
        return {key: self.value(item, annotation, (*path, key), None) for key, item in node.items.items()}

    def _one_of(self, node: Node, classes: tuple[type, ...], path: Path_, default: Any) -> Any:
        """An instance of the class that the section's ``type`` key chooses."""
        if not isinstance(node, Section):
            self.fail(node.origin, path, f"expected a section, got {_shown(node.value)}")
        by_type = {value: cls for cls in classes for value in type_values(cls)}
        if not by_type:
            return self.dataclass(node, classes[0], path, default)
        leaf = node.items.get("type")
        if leaf is None:
            known = default if isinstance(default, classes) else None
            if known is None:
                self.fail(node.origin, path, f"missing key type: set one of {', '.join(by_type)}")
            return self.dataclass(node, type(known), path, known)
        chosen = leaf.value if isinstance(leaf, Leaf) else None
        if not isinstance(chosen, str) or chosen not in by_type:
            problem = f"unknown type {_shown(chosen)}; {_suggest(str(chosen), tuple(by_type), noun='types')}"
            self.fail(leaf.origin, (*path, "type"), problem)
        same = isinstance(default, classes) and getattr(default, "type", None) == chosen
        return self.dataclass(node, by_type[chosen], path, default if same else None)

    def _fail_check(self, error: ValueError, section: Section, fields: tuple[str, ...], path: Path_) -> NoReturn:
        """Put file and dotted path before the message of a failed ``__post_init__`` check."""
        message = str(error)
        first = re.match(r"[\w.]+", message)
        named = first[0].rstrip(".").split(".") if first else [""]
        origin = section.origin if path else self.recipe_file
        if named[0] not in fields:
            self.fail(origin, path, message)
        node: Node = section
        for part in named:
            if not isinstance(node, Section) or part not in node.items:
                break
            node = node.items[part]
            origin = node.origin
        self.fail(origin, (), f"{dotted(path)}.{message}" if path else message)


_MISFIT = object()


def _convert(value: Any, annotation: Any) -> Any:
    """``value`` as the annotated type, or ``_MISFIT``. No guess beyond int -> float and exponents without a dot."""
    origin = typing.get_origin(annotation)
    if annotation is Any:
        return _convert_plain(value)
    if annotation is float:
        if isinstance(value, str) and EXPONENT.fullmatch(value):
            value = float(value)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if number and math.isfinite(value) else _MISFIT
    if annotation in (bool, int, str):
        return value if type(value) is annotation else _MISFIT
    if origin is Literal:
        return value if value in typing.get_args(annotation) else _MISFIT
    if origin is tuple:
        if not isinstance(value, list):
            return _MISFIT
        items = tuple(_convert(item, typing.get_args(annotation)[0]) for item in value)
        return _MISFIT if any(item is _MISFIT for item in items) else items
    return _MISFIT


def _convert_plain(value: Any) -> Any:
    """A value of a free-form section (``megatron_overrides``): what JSON can say, exponents as numbers."""
    if isinstance(value, list):
        items = [_convert_plain(item) for item in value]
        return _MISFIT if any(item is _MISFIT for item in items) else items
    if isinstance(value, dict):
        pairs = {key: _convert_plain(item) for key, item in value.items()}
        return _MISFIT if any(item is _MISFIT for item in pairs.values()) else pairs
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return _MISFIT
    return value if value is None or isinstance(value, (bool, int, float, str)) else _MISFIT


def _expected(annotation: Any) -> str:
    """An annotation in a reader's words."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Any: "a plain value"}
    words[type(None)] = "null"
    parts: list[str] = []
    for member in union_members(annotation):
        if typing.get_origin(member) is Literal:
            parts.append("one of " + ", ".join(str(choice) for choice in typing.get_args(member)))
        elif typing.get_origin(member) is tuple:
            parts.append(f"a list ({_expected(typing.get_args(member)[0])} each)")
        else:
            parts.append(words[member])
    return " or ".join(parts)


def _shown(value: Any) -> str:
    """A value as it would stand in the file, cut to one short line."""
    names = {True: "true", False: "false"}
    text = "null" if value is None else names[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _suggest(key: str, known: tuple[str, ...], *, noun: str = "keys") -> str:
    """A cure for a name that the schema does not have."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    elsewhere = [path for path in _schema_paths(Recipe, ()) if path[-1] == key] if noun == "keys" else []
    if len(elsewhere) == 1:
        return f"did you mean '{'.'.join(elsewhere[0])}'?"
    return f"known {noun}: {', '.join(known)}"


def _schema_paths(cls: type, path: Path_) -> list[Path_]:
    """Every key that the schema knows, ``NAME`` standing for the names in a mapping."""
    found: list[Path_] = []
    for name, annotation in field_types(cls).items():
        found.append((*path, name))
        for member in union_members(annotation):
            mapped = typing.get_origin(member) is Mapping
            inner = typing.get_args(member)[1] if mapped else member
            below = (*path, name, "NAME") if mapped else (*path, name)
            for section in section_classes(inner):
                found.extend(p for p in _schema_paths(section, below) if p not in found)
    return found
